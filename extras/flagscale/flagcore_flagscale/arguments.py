"""Translates engine arguments: common ones with vLLM's names, and those of each engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flagcore.engines.serving.launch.importing import LENGTHS, parse_length
from flagcore_flagscale.engines import (
    COMMON_ARGUMENTS,
    ENGINES,
    KNOBS,
    KNOBS_BY_ARGUMENT,
    RESERVED_ARGUMENTS,
    TABLES,
    flagscale_name,
)
from flagcore_flagscale.source import Source

_SPEC_KEY = "serve.engine_args"

Arguments = dict[str, tuple[str, Any]]
"""The key in the tree and the value of each argument, by the engine's names."""


def engine_arguments(source: Source, item: dict[str, Any], engines: list[str]) -> dict[str, Arguments]:
    """Take the arguments of a model, and return those of each engine; specific arguments override common ones."""
    common, specific = (
        source.mapping(f"serve[0].{key}", item.pop(key, None)) for key in ("engine_args", "engine_args_specific")
    )
    specific_arguments = {ENGINES.get(name, name): given for name, given in specific.items() if isinstance(given, dict)}
    for name in specific_arguments.keys() - set(engines):
        source.note(
            f"serve[0].engine_args_specific.{flagscale_name(name) if name in KNOBS else name}",
            "dropped: it is not tuned",
            _SPEC_KEY,
        )
    arguments: dict[str, Arguments] = {}
    for engine in engines:
        result: Arguments = {}
        for key, value in common.items():
            _add_argument(source, engine, f"engine_args.{key}", value, COMMON_ARGUMENTS[engine], result)
        for key, value in specific_arguments.get(engine, {}).items():
            _add_argument(source, engine, f"engine_args_specific.{flagscale_name(engine)}.{key}", value, None, result)
        arguments[engine] = result
    return arguments


def add_to_spaces(source: Source, arguments_by_engine: dict[str, Arguments], spaces: dict[str, dict[str, Any]]) -> None:
    """Add the arguments of several engines to their spaces as knobs with one value.

    `serve.engine_args` of a spec applies to all engines, so it cannot have arguments of single engines.
    """
    for engine, arguments in arguments_by_engine.items():
        for key, (tree_key, value) in arguments.items():
            knob = KNOBS_BY_ARGUMENT.get(key, key)
            if knob not in KNOBS[engine]:
                text = f"dropped for {engine} ({value}): with several engines only knobs can differ"
                source.note(tree_key, text, _SPEC_KEY)
            elif knob in spaces[engine]:
                path = f"auto_tuner.space.{engine}.{knob}"
                source.note(tree_key, f"dropped for {engine} ({value}): the space has values for it", path)
            else:
                spaces[engine][knob] = value


def _add_argument(
    source: Source, engine: str, key: str, value: Any, names: dict[str, str] | None, result: Arguments
) -> None:
    """Add one argument by the engine's name for it; without `names` of common arguments the name stays."""
    tree_key, name = f"serve[0].{key}", key.rpartition(".")[2].lstrip("-").replace("-", "_")
    engine_name = name if names is None or engine == "vllm" else names.get(name)
    if name in RESERVED_ARGUMENTS:
        source.note(tree_key, f"dropped: {RESERVED_ARGUMENTS[name]}", _SPEC_KEY)
        return
    if isinstance(value, (dict, list)):
        source.note(tree_key, f"dropped ({value}): flagcore passes on single values", _SPEC_KEY)
        return
    if engine_name is None:
        source.note(tree_key, f"dropped ({value}): FlagScale has no name for it in {engine}", _SPEC_KEY)
        return
    if engine_name == "ctx_size" and name != engine_name:
        text = "the context of all slots together, as FlagScale passes it to llama.cpp; in vLLM it is per sequence"
        source.note(tree_key, f"{engine_name}: {text}", f"{_SPEC_KEY}.{engine_name}")
    elif engine_name != name:
        source.note(tree_key, f"{engine} calls it {engine_name}", f"{_SPEC_KEY}.{engine_name}")
    if engine_name == "kv_cache_type" and engine == "llamacpp" and str(value).startswith("fp8"):
        source.note(tree_key, f"{value} becomes q8_0 for keys and values", f"{_SPEC_KEY}.{engine_name}")
        value = "q8_0"
    if (
        isinstance(value, str)
        and (name in TABLES["path_arguments"] or value.startswith("./"))
        and os.path.exists(value)
    ):
        value = str(Path(value).resolve())
    if engine_name in result and result[engine_name][1] != value:
        previous_key, previous = result[engine_name]
        text = f"dropped for {engine} ({previous}): {tree_key} is used"
        source.note(previous_key, text, f"{_SPEC_KEY}.{engine_name}")
    is_length = name in LENGTHS
    result[engine_name] = tree_key, parse_length(value) if is_length else value
