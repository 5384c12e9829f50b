"""Tools for vendor plugins and engines: readers of data files and of the output of tools, and calibration."""

SDK = (
    *("chip_file", "choices", "detection", "engines", "fields", "kernel_table", "machine", "metrics", "plugin", "rows"),
    "settings",
)
"""The modules that other distributions may import."""
