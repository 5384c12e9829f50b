"""A run's directory: its lock, its identity, and its trials in optuna's journal."""
