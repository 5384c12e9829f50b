"""What saves, failures and restarts take from a training job."""
