"""Normalizes other layouts of trees: moved sections, and lists in place of mappings.

The layouts are those of the examples in FlagScale's repository since 2024, and of its slides.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from flagcore.importers.flagscale.engines import TABLES
from flagcore.importers.flagscale.source import Source

_EXPERIMENT, _RUNNER = "experiment", "experiment.runner"
MOVED_KEYS: dict[str, str] = TABLES["moved_keys"]
_PROFILE = ("profile", "resources")


def normalize_layout(source: Source) -> None:
    """Move keys to their usual sections, with a note on each. Raises SpecError without the section `experiment`."""
    experiment = source.left.get(_EXPERIMENT)
    if experiment is not None and not isinstance(experiment, dict):
        raise source.error(_EXPERIMENT, "must be a mapping", value=experiment, fix="write its keys below it")
    if experiment is None:
        matches = get_close_matches(_EXPERIMENT, source.left.keys() - {_EXPERIMENT}, n=1)
        fix = f"did you mean {matches[0]}?" if matches else "give the tree's top file, which has it, as --config-name"
        raise source.error(_EXPERIMENT, "is missing", fix=fix)
    for key in ("task", "runner", "auto_tuner"):
        if not isinstance(given := experiment.get(key), (dict, type(None))):
            if key != "task":
                fix = "write its keys below it"
                raise source.error(f"{_EXPERIMENT}.{key}", "must be a mapping", value=given, fix=fix)
            experiment["task"] = {"type": given}
            source.note(f"{_EXPERIMENT}.task", f"read as {_EXPERIMENT}.task.type")
    for old_key, new_key in MOVED_KEYS.items():
        if (value := source.take(old_key)) is None:
            continue
        source.note(old_key, f"read as {new_key}")
        for key in source.put(new_key, value):
            suffix = f".{key}" if key else ""
            source.note(f"{old_key}{suffix}", f"dropped ({value[key] if key else value}): {new_key}{suffix} is used")


def model_list(source: Source) -> list[Any]:
    """Take the list of models of a tree for serving, or build it from `model_args` of older trees."""
    section = source.take("serve")
    if not isinstance(section, dict):
        return section if isinstance(section, list) else [section]
    models = section.pop("model_args", None)
    if not isinstance(models, dict):
        return [section]
    _take_nodes(source, section)
    if section:
        source.note(f"serve ({', '.join(section)})", "dropped: each trial starts the engine's own server", "serve")
    items = []
    for index, (name, flags) in enumerate(models.items()):
        args = {key.replace("-", "_"): value for key, value in flags.items()} if isinstance(flags, dict) else {}
        switches = args.pop("action_args", None) or []
        if not isinstance(switches, list):
            source.note(f"serve.model_args.{name}.action-args", f"dropped ({switches}): it is not a list", "serve")
            switches = []
        args |= {str(each).replace("-", "_"): True for each in switches}
        if (tag := args.pop("model_tag", None)) is not None:
            args = {"model": tag, **args}
        source.note(f"serve.model_args.{name}", f"read as serve[{index}].engine_args", "serve")
        items.append({"serve_id": name, "engine": "vllm", "engine_args": args})
    return items


def _take_nodes(source: Source, serve: dict[str, Any]) -> None:
    """Move the hosts that the oldest trees list under `serve` to the nodes and slots of the runner."""
    nodes = serve["hostfile"].get("nodes") if isinstance(serve.get("hostfile"), dict) else None
    hosts = (
        [host for each in nodes if isinstance(each, dict) for host in each.values()] if isinstance(nodes, list) else []
    )
    slots = [host["slots"] for host in hosts if isinstance(host, dict) and type(host.get("slots")) is int]
    if not slots or len(slots) < len(hosts) or min(slots) < 1:
        return
    del serve["hostfile"]
    for key, value in (("nnodes", len(slots)), ("nproc_per_node", min(slots))):
        source.put(f"{_RUNNER}.{key}", value)
    text = f"dropped: {len(slots)} hosts of {min(slots)} slots; used if the runner does not define them"
    source.note("serve.hostfile", text, "cluster")


def normalize_specific_arguments(source: Source, item: dict[str, Any], engines: list[str]) -> None:
    """Move profiles and arguments that are not in an engine's section out of `engine_args_specific`."""
    specific = item.get("engine_args_specific")
    if not isinstance(specific, dict):
        return
    for key in _PROFILE:
        if isinstance(specific.get(key), dict):
            item.setdefault(key, specific.pop(key))
            source.note(f"serve[0].engine_args_specific.{key}", f"read as serve[0].{key}")
    ungrouped = [key for key, value in specific.items() if not isinstance(value, (dict, type(None)))]
    if not ungrouped:
        return
    arguments = {key: specific.pop(key) for key in ungrouped}
    engine = engines[0]
    specific[engine] = {**arguments, **(specific.get(engine) or {})}
    text = f"read as arguments of {engine}: FlagScale expects them in a section of the engine"
    source.note(f"serve[0].engine_args_specific ({', '.join(ungrouped)})", text, "serve.engine_args")
