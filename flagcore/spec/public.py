"""Shapes of public models, by the names of their Hugging Face repositories: a plan needs no download."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from flagcore.spec.plain_data import package_yaml

_NAMES = package_yaml(__package__, "names.yaml")
FORMATS, _SAME_SHAPE = _NAMES["formats"], _NAMES["same_shape"]


@lru_cache(maxsize=1)
def public_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of public models by name: the keys of config.json, and the format of quantized weights."""
    table: dict[str, dict[str, Any]] = package_yaml(__package__, "public_models.yaml")
    return table


def find_public(name: str) -> tuple[dict[str, Any], str | None] | None:
    """Return the config.json of a public model, and the format of its weights if they are quantized.

    Letters may differ in case. Fine-tuned and quantized variants, also of other organizations, have the shape of the
    model whose name they extend. Returns None for an unknown name.
    """
    found = public_name(name)
    if found is None or name.count("/") != 1:
        return None
    config, weights = dict(public_models()[found]), _stem(name)[1]
    stored = config.pop("weights", None)
    is_stored = found.lower() == name.lower() or weights is None
    return config, (stored if is_stored else None if weights == "bf16" else weights)


def public_name(name: str) -> str | None:
    """Return the public model whose shape a name has, or None. The organization does not matter."""
    table, stem = public_models(), _stem(name)[0]
    names = [known for known in table if known.lower() == name.lower()]
    names += [known for known in table if _stem(known)[0] == stem]
    return names[0] if names else None


def absolute_model(source: str, base: Path) -> str:
    """Return the absolute path of a model, or the name itself of a public model that is not a file or directory."""
    path = base / source
    return source if find_public(source) and not path.exists() else str(path.resolve())


def _stem(name: str) -> tuple[str, str | None]:
    """Return the part of a repository's name that determines the shape, and the weight format at its end, if any."""
    model = name.lower().rpartition("/")[2].removeprefix("meta-").replace("quantized.", "quantized-")
    words, weights = model.split("-"), None
    words = [*words[:1], *(each for each in words[1:] if each not in ("instruct", "chat"))]
    while len(words) > 1 and (
        words[-1] in _SAME_SHAPE or words[-1] in FORMATS or re.fullmatch(r"[01]\d{3}|2[345]\d\d", words[-1])
    ):
        last = FORMATS.get(words.pop())
        weights = weights or last
    return "-".join(words), weights
