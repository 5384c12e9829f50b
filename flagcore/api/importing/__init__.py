"""Import the configuration and the measurements of another tuner."""
