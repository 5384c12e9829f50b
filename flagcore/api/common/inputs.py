"""Specs: as users pass them, a file or plain data, and as the folder of a run stores them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from flagcore.domain.knob import Knobs
from flagcore.domain.secrets import secrets_in_data
from flagcore.errors import FlagError
from flagcore.plugins import engines, load_plugins
from flagcore.problem import Problem
from flagcore.report.formats import as_yaml
from flagcore.spec import spec_as_data
from flagcore.spec.plain_data import plain
from flagcore.store.directory import write

SpecLike: TypeAlias = "Path | str | Mapping[str, Any]"
"""A spec: a file, or its content. Relative paths in data start at the working directory."""

UNNAMED = Path("spec")
"""Name of a spec without a file, in messages and for the folder of its run."""


def spec_data(spec: SpecLike, data: Mapping[str, Any] | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the file of a spec, and its content: `data` if there is any. Raises SpecError."""
    if isinstance(spec, Mapping):
        return UNNAMED, dict(plain(spec, file=str(UNNAMED)))
    file = Path(spec)
    return file, spec_as_data(file) if data is None else dict(data)


RUNS = Path("runs")
"""The default folder of runs."""


def with_fidelity(data: Mapping[str, Any], fidelity: str | None = None) -> dict[str, Any]:
    """Return a spec's data with a fidelity, or without any."""
    tuner = dict(data.get("auto_tuner") or {})
    control = {key: value for key, value in (tuner.get("control") or {}).items() if key != "fidelity"}
    if fidelity is not None:
        control["fidelity"] = fidelity
    if control == (tuner.get("control") or {}):
        return dict(data)
    return {**data, "auto_tuner": {**tuner, "control": control}}


def with_absolute_paths(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return a spec's data with absolute paths, so that a copy of it means the same in another folder."""
    moved = dict(data)
    if isinstance(data.get("model"), str):
        moved["model"] = str((base / data["model"]).resolve())
    for kind in ("train", "serve"):
        work = dict(data.get(kind) or {})
        if work.get("command"):
            moved[kind] = {**work, "directory": str((base / (work.get("directory") or ".")).resolve())}
    serve = dict(moved.get("serve") or {})
    if serve.get("weights"):
        serve["weights"] = str((base / serve["weights"]).resolve())
    if (serve.get("profile") or {}).get("trace"):
        serve["profile"] = {**serve["profile"], "trace": str((base / serve["profile"]["trace"]).resolve())}
    if serve:
        moved["serve"] = serve
    cluster = data.get("cluster")
    if isinstance(cluster, dict) and cluster.get("hostfile"):
        moved["cluster"] = {**cluster, "hostfile": str((base / cluster["hostfile"]).resolve())}
    return moved


def write_spec(folder: Path, data: Mapping[str, Any], base: Path) -> None:
    """Write a spec's data, with absolute paths, to the folder of a run. Raises RunError."""
    text = as_yaml(with_absolute_paths(data, base)) + "\n"
    write(folder / "spec.yaml", text, private=bool(secrets_in_data(data)))


def fixed_task(data: Mapping[str, Any], problem: Problem) -> dict[str, object]:
    """Return what must not change when a run is resumed: spec, model, hardware, and how trials are started."""
    cluster = problem.platform.task.cluster
    group = cluster.groups[0]
    hardware = {"chip": cluster.chips, "nodes": group.nodes, "devices_per_node": group.devices_per_node}
    platform = problem.platform
    engine = {"device": platform.support.device_type, "backend": platform.support.distributed_backend}
    given = {"environment": dict(platform.environment), "engine": engine}
    return {
        "spec": with_fidelity(data),
        "model": asdict(platform.task.spec.model),
        "hardware": hardware,
        "plugins say": given,
    }


def knobs_of_spec(data: Mapping[str, Any], used: Iterable[str] = (), without: Collection[str] | None = None) -> Knobs:
    """Return the knobs of a spec's engine by name; none for an engine that is not installed here.

    Plugins are asked for `used` knobs that the engine lacks, those `without` some, or none of them for None.
    """
    sections = (data.get(kind) for kind in ("train", "serve"))
    engine = next((each["engine"] for each in sections if isinstance(each, Mapping) and "engine" in each), None)
    engine = engine[0] if isinstance(engine, list) and engine else engine
    knobs = {}
    if isinstance(engine, str):
        with suppress(FlagError, KeyError):
            knobs = {knob.name: knob for knob in engines()[engine].knobs}
        if without is not None and set(used) - knobs.keys():
            knobs |= {knob.name: knob for knob in load_plugins(without).knobs_on_any_chip(engine)}
    return knobs
