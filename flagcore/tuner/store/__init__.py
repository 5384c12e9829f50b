"""The run directory: its lock, its identity, and its trials in an Optuna journal."""
