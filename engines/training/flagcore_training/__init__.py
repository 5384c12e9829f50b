"""Memory, step time, parallel layouts and pipeline schedules of transformer training, for any training engine."""

SDK = (
    *("adapters", "layout", "mixes", "stages", "schedules", "critical_path", "memory.activations", "memory.adapters"),
    *("memory.training", "time.optimizer", "time.pace", "time.passes", "time.pipeline", "time.stage", "time.step"),
    *("commands", "knobs", "lengths", "reading", "start", "microbench.kernels", "trial", "unmodelled"),
)
"""The modules that other distributions may import. `trial` is a package."""
