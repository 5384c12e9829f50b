"""Iluvatar CoreX GPUs as a flagcore plugin."""
