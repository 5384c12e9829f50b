"""The engine Megatron: its knobs and their rules, its flags, predictions and trials."""

SDK = (
    "importing.arguments",
    "mixed.hetero",
    "program.user_command",
    "space.knobs",
    "space.meshes",
    "space.split",
    "space.stages",
)
"""The modules that readers of other tools' files for Megatron may import."""
