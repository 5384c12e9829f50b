"""The engine Megatron: its knobs and their rules, its flags, predictions and trials.

The adapter is imported only when it is used. A trial process, which only needs `trial`, starts sooner without it.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flagcore_megatron.adapter import ENGINE

__all__ = ["ENGINE"]

SDK = ("importing.arguments", "mixed.hetero", "space.knobs", "space.meshes", "space.stages")
"""The modules that readers of other tools' files for Megatron may import."""


def __getattr__(name: str) -> object:
    if name != "ENGINE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flagcore_megatron.adapter import ENGINE

    return ENGINE
