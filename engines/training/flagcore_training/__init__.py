"""Memory, step time, parallel layouts and pipeline schedules of transformer training, for any training engine."""

SDK = (
    *("flagcore_training.layout", "flagcore_training.stages", "flagcore_training.schedules"),
    *("flagcore_training.critical_path", "flagcore_training.memory.activations", "flagcore_training.memory.training"),
    *("flagcore_training.time.optimizer", "flagcore_training.time.passes", "flagcore_training.time.pipeline"),
    *("flagcore_training.time.step", "flagcore_training.commands", "flagcore_training.knobs"),
    *("flagcore_training.reading", "flagcore_training.start", "flagcore_training.trial"),
)
"""The modules that training engines may import. `trial` is a package."""
