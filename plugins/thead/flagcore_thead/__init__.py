"""T-Head PPUs as a flagcore plugin."""
