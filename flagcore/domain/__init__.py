"""The nouns: frozen, typed, without YAML, files, plugins or optuna."""
