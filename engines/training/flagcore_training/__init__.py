"""Memory, step time, parallel layouts and pipeline schedules of transformer training, for any training engine."""
