"""NVIDIA GPUs as a flagcore plugin."""
