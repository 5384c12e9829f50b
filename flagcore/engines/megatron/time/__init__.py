"""Time of a training step: layers, stages, pipeline, gradient reduction, optimizer."""
