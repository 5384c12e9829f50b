"""Memory of a rank in training: what layers store, states, buffers, the peak over a step."""
