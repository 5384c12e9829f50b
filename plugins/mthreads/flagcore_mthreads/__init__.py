"""Moore Threads GPUs as a flagcore plugin."""
