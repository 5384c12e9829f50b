"""How candidates split the work of a training step over devices."""
