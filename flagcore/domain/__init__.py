"""The data types of flagcore: frozen dataclasses that know no files, plugins or optuna."""
