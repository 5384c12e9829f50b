"""The orders in which candidates are tried. With the store, the only room that may know optuna."""
