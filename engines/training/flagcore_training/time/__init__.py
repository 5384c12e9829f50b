"""Time of a training step: passes, layers, the pipeline, the optimizer and the step as a whole."""
