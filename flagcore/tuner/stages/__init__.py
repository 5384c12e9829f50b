"""The stages of the loop, one module each. Stages do not import each other."""
