"""A run's directory: its lock, its identity, and its trials in optuna's journal."""

from flagcore.store.directory import RunDirectory
from flagcore.store.trials import OptunaStore, stored_trials

__all__ = ["OptunaStore", "RunDirectory", "stored_trials"]
