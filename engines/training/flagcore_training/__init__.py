"""Memory, step time, parallel layouts and pipeline schedules of transformer training, for any training engine."""

SDK = (
    *("adapters", "layout", "kinds", "splits", "stages", "weights", "schedules", "critical_path", "commands", "knobs"),
    *("memory.activations", "memory.modules", "memory.states", "memory.training", "time.optimizer"),
    *("time.passes", "time.pipeline", "time.stage", "time.step", "lengths", "reading", "start", "microbench.kernels"),
    *("trial", "peft", "frameworks", "real_job"),
)
"""The modules that other distributions may import. `trial` is a package."""
