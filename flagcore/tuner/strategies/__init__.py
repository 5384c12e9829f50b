"""Search strategies, which choose the order of trials. Only this package and the store may import optuna."""
