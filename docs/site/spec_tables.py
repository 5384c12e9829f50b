"""Tables of the keys of a spec, from its JSON Schema."""

import json
import re
from functools import lru_cache
from typing import Any

from flagcore_goodput.job import JobDocument
from flagcore_megatron.space.knobs import KNOBS
from flagcore_rl.documents import RlDocument
from flagcore_serving.documents import ServeDocument

from flagcore.spec.schema import document_of
from flagcore.spec.validate import describe, keys_of

MARK = re.compile(r"^<!-- keys (train|serve|rl|goodput):([\w.]*) -->$", re.MULTILINE)
"""The first line of a block of this module."""
HEAD = "| key | values | default | meaning |\n| --- | --- | --- | --- |"


def render(mark: str) -> str:
    """Return the table of the keys of a section of the spec: `keys KIND:SECTION`."""
    kind, _, section = mark.split()[1].partition(":")
    return _table(kind, tuple(filter(None, section.split("."))))


@lru_cache
def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a spec of this kind."""
    documents: dict[str, Any] = {"train": document_of("megatron", KNOBS), "serve": ServeDocument, "rl": RlDocument}
    documents["goodput"] = JobDocument
    return dict(documents[kind].model_json_schema())


def _table(kind: str, section: tuple[str, ...]) -> str:
    root = schema(kind)
    rows = [_row(str(path[-1]), each, root) for path, each in keys_of(root, root) if path[:-1] == section]
    return "\n".join([HEAD, *rows])


def _row(name: str, key: dict[str, Any], root: dict[str, Any]) -> str:
    default = key.get("default", "required")
    if isinstance(default, dict):
        default = "absent"
    default_text = (
        default if isinstance(default, str) and default in ("required", "absent") else f"`{json.dumps(default)}`"
    )
    cells = (f"`{name}`", _values(describe(key, root)), default_text, key["description"])
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in cells)} |"


def _values(text: str) -> str:
    """Return a description of values without limits that only detect typing errors."""
    return re.sub(r"(text|a string|a whole number from \d+) (?:of 1 )?to \d{3,}(?: characters)?", r"\1", text)
