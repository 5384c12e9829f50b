"""Tools for vendor plugins: readers of chip and cost files, and of the output of management tools."""
