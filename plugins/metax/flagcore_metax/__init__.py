"""MetaX GPUs as a flagcore plugin."""
