"""Memory of a rank in training: stored activations, model states, buffers, and the peak during a step."""
