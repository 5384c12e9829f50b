"""Tools for the plugins of vendors: readers of chip and cost files, and of the output of management tools."""
