"""Memory, time, parallel layout and pipeline schedules of transformers in training, for any training engine."""
