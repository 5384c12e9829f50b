"""The serving engines: their knobs, and how their servers are started, loaded, measured and predicted."""
