"""Lists of names of the FlagScale importer, from its tables."""

from flagcore_megatron.importing.arguments import TABLES

NAMES = {"other_layers": tuple(TABLES["other_layers"])}


def render(mark: str) -> str:
    """Return the names of a list as a sentence: `flagscale LIST`."""
    return ", ".join(f"`{name}`" for name in NAMES[mark.split()[1]]) + "."
