"""Arguments of the engines: common ones by vLLM's names, and those of each engine."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

from flagcore.importers.flagscale.engines import AS_KNOBS, COMMON, ENGINES, KNOBS, OWN_ARGUMENTS, TABLES, flagscale_name
from flagcore.importers.flagscale.source import Source

_AT = "serve.engine_args"
_TIMES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

Arguments = dict[str, tuple[str, Any]]
"""Arguments by the engine's names, each with its key in the tree and its value."""


def engine_arguments(source: Source, item: dict[str, Any], engines: list[str]) -> dict[str, Arguments]:
    """Take the arguments of a model and return those of each engine. Engine-specific arguments override common ones."""
    common, specific = (
        source.mapping(f"serve[0].{key}", item.pop(key, None)) for key in ("engine_args", "engine_args_specific")
    )
    own = {ENGINES.get(name, name): given for name, given in specific.items() if isinstance(given, dict)}
    for name in own.keys() - set(engines):
        source.note(
            f"serve[0].engine_args_specific.{flagscale_name(name) if name in KNOBS else name}",
            "dropped: it is not tuned",
            _AT,
        )
    found: dict[str, Arguments] = {}
    for engine in engines:
        made: Arguments = {}
        for key, value in common.items():
            _add(source, engine, f"engine_args.{key}", value, COMMON[engine], made)
        for key, value in own.get(engine, {}).items():
            _add(source, engine, f"engine_args_specific.{flagscale_name(engine)}.{key}", value, None, made)
        found[engine] = made
    return found


def add_to_spaces(source: Source, given: dict[str, Arguments], spaces: dict[str, dict[str, Any]]) -> None:
    """Add the arguments of several engines to their spaces as knobs with one value: `serve.engine_args` is for all."""
    for engine, arguments in given.items():
        for key, (at, value) in arguments.items():
            knob = AS_KNOBS.get(key, key)
            if knob not in KNOBS[engine]:
                text = f"dropped for {engine} ({value}): with several engines only knobs can differ"
                source.note(at, text, _AT)
            elif knob in spaces[engine]:
                where = f"auto_tuner.space.{engine}.{knob}"
                source.note(at, f"dropped for {engine} ({value}): the space has values for it", where)
            else:
                spaces[engine][knob] = value


def _add(source: Source, engine: str, key: str, value: Any, names: dict[str, str] | None, made: Arguments) -> None:
    """Add one argument by the engine's name. Without `names` of the common arguments it has the same one."""
    at, name = f"serve[0].{key}", key.rpartition(".")[2].lstrip("-").replace("-", "_")
    called = name if names is None or engine == "vllm" else names.get(name)
    if name in OWN_ARGUMENTS:
        source.note(at, f"dropped: {OWN_ARGUMENTS[name]}", _AT)
        return
    if isinstance(value, (dict, list)):
        source.note(at, f"dropped ({value}): flagcore passes on single values", _AT)
        return
    if called is None:
        source.note(at, f"dropped ({value}): FlagScale has no name for it in {engine}", _AT)
        return
    if called == "ctx_size" and name != called:
        text = "the context of all slots together, as FlagScale passes it to llama.cpp; in vLLM it is per sequence"
        source.note(at, f"{called}: {text}", f"{_AT}.{called}")
    elif called != name:
        source.note(at, f"{engine} calls it {called}", f"{_AT}.{called}")
    if called == "kv_cache_type" and engine == "llamacpp" and str(value).startswith("fp8"):
        source.note(at, f"{value} becomes q8_0 for keys and values", f"{_AT}.{called}")
        value = "q8_0"
    if (
        isinstance(value, str)
        and (name in TABLES["path_arguments"] or value.startswith("./"))
        and os.path.exists(value)
    ):
        value = str(Path(value).resolve())
    if called in made and made[called][1] != value:
        source.note(made[called][0], f"dropped for {engine} ({made[called][1]}): {at} is used", f"{_AT}.{called}")
    made[called] = at, _length(value) if name in ("max_model_len", "context_length", "ctx_size") else value


def _length(value: Any) -> Any:
    """Return `4k` as 4000, `4K` as 4096 and `1.5k` as 1500, as vLLM reads them."""
    found = re.fullmatch(r"(\d{1,9})(?:\.(\d{1,9}))?([kKmMgG])", value) if isinstance(value, str) else None
    if not found or (found[2] and found[3].isupper()):
        return value
    return int(Decimal(f"{found[1]}.{found[2] or 0}") * _TIMES[found[3]])
