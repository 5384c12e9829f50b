"""The flags of llama-server that the embedded server supports, from `flags.json`.

The process of the embedded server imports this module, so it imports nothing large. Spellings and defaults: llama.cpp
`tools/server/README.md` (00dc8057); fields: `xllamacpp.CommonParams` (2026.10).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag: its spellings, the dotted field that it sets, and the type of its value.

    `kind` is int, float, text, list (comma-separated numbers), on/off, switch, or the name of an enum of the wheel with
    the members `words`. A switch sets True, and its `off` spellings set False. Only `tensor_split` has several values.
    """

    names: Sequence[str]
    field: str
    kind: str = "int"
    words: Sequence[str] = ()
    off: Sequence[str] = ()


FLAGS = tuple(Flag(**row) for row in json.loads(Path(__file__).with_name("flags.json").read_text("utf-8")))
BY_NAME = {name.lstrip("-"): flag for flag in FLAGS for name in (*flag.names, *flag.off)}
