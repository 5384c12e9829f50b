"""The serving engines: their knobs, and how their servers are started, loaded, measured and predicted."""

SDK = (
    *("advice", "engine", "job", "launch.importing", "launch.reports", "launch.server", "load.result", "load.routing"),
    *("model", "schedules", "space"),
)
"""The modules that serving engines may import. `model` and `space` are packages."""
