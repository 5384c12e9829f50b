"""AMD Instinct GPUs as a flagcore plugin."""
