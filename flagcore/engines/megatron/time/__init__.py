"""Time of a training step: layers, stages, pipeline, exchange of gradients, optimizer."""
