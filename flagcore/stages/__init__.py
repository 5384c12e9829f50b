"""The stages of the loop, one file each. Stages do not import each other."""
