"""Lists of names of the FlagScale importer, from its tables."""

from __future__ import annotations

import re

from flagcore.engines.megatron.importing.shape import OTHER_LAYERS

MARK = re.compile(r"^<!-- flagscale (\w+) -->$", re.MULTILINE)
NAMES = {"other_layers": OTHER_LAYERS}


def fill(text: str) -> str:
    """Return the text with the names below each mark `<!-- flagscale LIST -->`."""
    return MARK.sub(lambda found: ", ".join(f"`{name}`" for name in NAMES[found[1]]) + ".", text)
