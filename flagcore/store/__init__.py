"""A run's directory: who holds it, what it was started with, and its trials in optuna's journal.

It does not know how a trial was run or ranked.
"""

from flagcore.store.directory import RunDirectory
from flagcore.store.trials import OptunaStore, stored_trials

__all__ = ["OptunaStore", "RunDirectory", "stored_trials"]
