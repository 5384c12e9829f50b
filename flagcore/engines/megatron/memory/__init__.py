"""Memory of a rank in training: what layers keep, states, buffers, the peak over a step."""
