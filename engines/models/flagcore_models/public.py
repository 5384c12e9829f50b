"""Knows public models by name: a plan needs no download."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from flagcore.errors import SpecError
from flagcore.spec.models import absolute_model, model_from
from flagcore.spec.plain_data import Notes, package_yaml, parse_yaml
from flagcore_models.formats import config_of, format_of_weights
from flagcore_models.keys import Table, is_mxfp4, section_of

_NAMES = package_yaml(__package__, "names.yaml")
FORMATS, _SAME_SHAPE = _NAMES["formats"], _NAMES["same_shape"]
GGUF_BITS: Mapping[str, float] = _NAMES["gguf"]
"""Bits per weight of the formats of GGUF files."""
PUBLISHERS: Mapping[str, str] = _NAMES["publishers"]
"""Whose checkpoint of a model in a format is meant where only the model is named."""
_FILE = "public_models.yaml"


@lru_cache(maxsize=1)
def public_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of public models by name: the keys of config.json."""
    table: dict[str, dict[str, Any]] = package_yaml(__package__, _FILE)
    return table


@lru_cache(maxsize=1)
def _table() -> Table:
    return Table(files(__package__).joinpath(_FILE).read_text("utf-8"), partial(parse_yaml, file=_FILE))


def find_public(name: str) -> tuple[dict[str, Any], str | None] | None:
    """Return the config.json of a public model, and the format of its weights if they are quantized.

    Letters may differ in case. Fine-tuned and quantized variants, also of other organizations, have the shape of the
    model whose name they extend. Returns None for an unknown name.
    """
    if (found := public_name(name)) is None or name.count("/") != 1:
        return None
    config, (stem, weights), lower = dict(_table()[found]), _stem(name), name.lower()
    if lower.endswith("-base"):  # only DeepSeek-V4's experts that were trained further have 4 bits
        config.pop("expert_dtype", None)
    if weights == "mxfp4" and is_mxfp4(config):  # its own
        weights = None
    if weights is None and "gguf" in lower and format_of_weights(config) != "int4":  # those in mxfp4 stay in it
        weights = _NAMES["usual_gguf"]
    if any(f"-{word}" in lower for word in _NAMES["in_bf16"].get(lower.partition("/")[0], ())):
        weights = weights or "bf16"
    for date, (family, tokens) in _NAMES["contexts"].items():
        if f"-{date}" in lower and stem.startswith(family):
            config["max_position_embeddings"] = tokens
            break
    else:
        values = (each["keys"] for each in _NAMES["values"] if found in each["models"])
        config = next(values, {}) | config
    if found.lower() == name.lower() or weights is None:
        return config, format_of_weights(config)
    config.pop("quantization_config", None)
    for each in _NAMES["stated"]:
        if lower.startswith(tuple(each["names"])) and weights in each["weights"] and each.get("word", "") in lower:
            whole = {"modules_to_not_convert": _NAMES["in_16_bits"].get(stem, [])}
            config["quantization_config"] = each["section"] | whole
            if attention := next((kind for word, kind in _NAMES["attention"].items() if f"-{word}" in lower), None):
                config["quantization_config"]["attention_dtype"] = attention
    return config, None if weights == "bf16" else weights


def quant_method(weights: str) -> str:
    """Return the `quant_method` of weights in a folder or with a public name. Empty if it is unknown."""
    public = None if os.path.exists(weights) else find_public(weights)
    config, stored = public or (dict[str, Any](), None)
    with suppress(SpecError):
        config = config or config_of(Path(weights))
    named = next((each for each in ("awq", "gptq") if stored == "int4" and each in weights.lower()), "")
    return str(section_of(config, "quantization_config").get("quant_method", named))


@lru_cache(maxsize=1024)
def public_name(name: str) -> str | None:
    """Return the public model whose shape a name has, or None. The organization does not matter."""
    table, stem = _table(), _stem(name)[0]
    names = [known for known in table if known.lower() == name.lower()]
    names += [known for known in table if _stem(known)[0] == stem]
    return names[0] if names else None


def tuned_from(name: str) -> str | None:
    """Return the public model whose shape a name has, also without Math or Coder, and without what follows a size."""
    words = re.sub(r"-(Math|Coder)(?=-)", "", name).split("-")
    sizes = () if "VL" in words else (n for n in range(len(words), 1, -1) if re.search(r"\d[bB]$", words[n - 1]))
    return next(filter(None, map(public_name, (name, *("-".join(words[:n]) for n in sizes)))), None)


def similar_models(name: str) -> list[str]:
    """Return up to three public models that a name may mean. The organization does not matter."""
    if public := public_name(name):
        return [public]
    names = {each.rpartition("/")[2].lower(): each for each in _table()}
    return [names[each] for each in get_close_matches(name.rpartition("/")[2].lower(), names)]


@lru_cache(maxsize=4096)
def _stem(name: str) -> tuple[str, str | None]:
    """Return the part of a repository's name that determines the shape, and the weight format at its end, if any."""
    lower = name.lower().replace(":", "-").replace(".gguf", "-gguf")  # tags and files of repositories with GGUF files
    own = re.sub("^[a-z]+_(?=.*gguf)", "", lower.rpartition("/")[2])  # such as Qwen_Qwen3-8B-GGUF
    words, weights = own.replace("quantized.", "quantized-").split("-"), None
    words = words[1:] if words[0] in _NAMES["owners"] and len(words) > 1 else words
    words = [*words[:1], *(each for each in words[1:] if each not in ("instruct", "chat"))]
    while len(words) > 1 and (
        words[-1] in _SAME_SHAPE
        or _format(words[-1])
        or re.fullmatch(r"[01]\d{3}|2[3-6]\d\d", words[-1])
        or (_format(words[-2]) and re.fullmatch(r"v\d", words[-1]))
    ):
        last = _format(words.pop())
        weights = last if last in ("nvfp4", "mxfp4") else weights or last
    return "-".join(words), weights


def _format(word: str) -> str | None:
    """Return the format of weights that a word of a name means, or None."""
    starts = [word[:length] for length in range(len(word), 3, -1)]
    return FORMATS.get(word) or next((kind for each in starts for kind in GGUF_BITS if kind.startswith(each)), None)


def model_of(given: str | None, names: Sequence[object], directory: Path, notes: Notes) -> str:
    """Return the model. `names`: what the command calls it, which may be a path elsewhere."""
    for name in filter(None, (given, *map(str, filter(None, names)))):
        with suppress(SpecError):
            model_from(name, base=directory)
            return absolute_model(name, directory)
        if given is None and (known := tuned_from(name.rstrip("/"))):
            notes.note("model", f"has the shape of {known}, as its name says", "model")
            return known
    if given is not None:
        model_from(given, base=directory)  # raises the error
    fix = "give a directory with its config.json, or the public name of a model of this shape, as --model"
    notes.report("model", "is not known from the command", value=next(filter(None, names), None), fix=fix)
    return ""
