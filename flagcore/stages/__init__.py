"""One stage of the loop a file, one verb each. The stages do not know each other."""
