"""Lists of names of the FlagScale importer, from its tables."""

from flagcore.engines.megatron.importing.arguments import OTHER_LAYERS

NAMES = {"other_layers": OTHER_LAYERS}


def render(mark: str) -> str:
    """Return the names of a list as a sentence: `flagscale LIST`."""
    return ", ".join(f"`{name}`" for name in NAMES[mark.split()[1]]) + "."
