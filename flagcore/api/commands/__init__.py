"""One module for each command of `flag`, named after it."""
