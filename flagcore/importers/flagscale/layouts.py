"""Trees of other layouts are normalized before their keys are read: moved sections, lists in place of mappings.

Layouts are those of the examples in FlagScale's repository since 2024, and of its slides.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from flagcore.importers.flagscale.engines import TABLES
from flagcore.importers.flagscale.source import Source

_EXPERIMENT, _RUNNER = "experiment", "experiment.runner"
MOVED: dict[str, str] = TABLES["moved_keys"]
_PROFILE = ("profile", "resources")


def normalize_layout(source: Source) -> None:
    """Move keys to where they belong, with a note on each. Raises SpecError without an experiment."""
    experiment = source.left.get(_EXPERIMENT)
    if experiment is not None and not isinstance(experiment, dict):
        raise source.error(_EXPERIMENT, "must be a mapping", value=experiment, fix="write its keys below it")
    if experiment is None:
        near = get_close_matches(_EXPERIMENT, source.left.keys() - {_EXPERIMENT}, n=1)
        fix = f"did you mean {near[0]}?" if near else "give the tree's top file, which has it, as --config-name"
        raise source.error(_EXPERIMENT, "is missing", fix=fix)
    for key in ("task", "runner", "auto_tuner"):
        if not isinstance(given := experiment.get(key), (dict, type(None))):
            if key != "task":
                fix = "write its keys below it"
                raise source.error(f"{_EXPERIMENT}.{key}", "must be a mapping", value=given, fix=fix)
            experiment["task"] = {"type": given}
            source.note(f"{_EXPERIMENT}.task", f"read as {_EXPERIMENT}.task.type")
    for old, new in MOVED.items():
        if (found := source.take(old)) is None:
            continue
        source.note(old, f"read as {new}")
        for key in source.put(new, found):
            at = f".{key}" if key else ""
            source.note(f"{old}{at}", f"dropped ({found[key] if key else found}): {new}{at} is used")


def model_list(source: Source) -> list[Any]:
    """Take the list of models of a tree for serving, or make it from `model_args` of older trees."""
    given = source.take("serve")
    if not isinstance(given, dict):
        return given if isinstance(given, list) else [given]
    models = given.pop("model_args", None)
    if not isinstance(models, dict):
        return [given]
    _take_nodes(source, given)
    if given:
        source.note(f"serve ({', '.join(given)})", "dropped: each trial starts the engine's own server", "serve")
    made = []
    for place, (name, flags) in enumerate(models.items()):
        args = {key.replace("-", "_"): value for key, value in flags.items()} if isinstance(flags, dict) else {}
        switches = args.pop("action_args", None) or []
        if not isinstance(switches, list):
            source.note(f"serve.model_args.{name}.action-args", f"dropped ({switches}): it is not a list", "serve")
            switches = []
        args |= {str(each).replace("-", "_"): True for each in switches}
        if (tag := args.pop("model_tag", None)) is not None:
            args = {"model": tag, **args}
        source.note(f"serve.model_args.{name}", f"read as serve[{place}].engine_args", "serve")
        made.append({"serve_id": name, "engine": "vllm", "engine_args": args})
    return made


def _take_nodes(source: Source, serve: dict[str, Any]) -> None:
    """Give the runner the nodes and slots of the hosts that the oldest trees list under `serve`."""
    listed = serve["hostfile"].get("nodes") if isinstance(serve.get("hostfile"), dict) else None
    hosts = (
        [host for each in listed if isinstance(each, dict) for host in each.values()]
        if isinstance(listed, list)
        else []
    )
    slots = [host["slots"] for host in hosts if isinstance(host, dict) and type(host.get("slots")) is int]
    if not slots or len(slots) < len(hosts) or min(slots) < 1:
        return
    del serve["hostfile"]
    for key, value in (("nnodes", len(slots)), ("nproc_per_node", min(slots))):
        source.put(f"{_RUNNER}.{key}", value)
    text = f"dropped: {len(slots)} hosts of {min(slots)} slots, if the runner does not give them"
    source.note("serve.hostfile", text, "cluster")


def normalize_specific_arguments(source: Source, item: dict[str, Any], engines: list[str]) -> None:
    """Move what is not in the section of an engine out of `engine_args_specific`: profiles, and arguments."""
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
