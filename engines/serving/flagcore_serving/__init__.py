"""The serving engines: their knobs, and how their servers are started, loaded, measured and predicted."""

SDK = (
    *("flagcore_serving.engine", "flagcore_serving.launch.importing", "flagcore_serving.launch.reports"),
    *("flagcore_serving.launch.server", "flagcore_serving.load.result", "flagcore_serving.load.routing"),
    "flagcore_serving.space",
)
"""The modules that serving engines may import. `space` is a package."""
