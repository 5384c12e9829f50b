"""Translates the sections that trees for training and serving share: machines, environment, budgets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flagcore.errors import SpecError
from flagcore.importers.flagscale.engines import TABLES
from flagcore.importers.flagscale.source import Source
from flagcore.spec.plain_data import spec_error

_RUNNER, _TUNER = "experiment.runner", "experiment.auto_tuner"
_STARTS = "flagcore starts trials itself"
DROPPED_KEYS: dict[str, str] = TABLES["dropped"]
RUNNER_KEYS: tuple[str, ...] = tuple(TABLES["dropped_of_runner"])


def check_experiment(source: Source) -> None:
    """Add notes about a missing section `auto_tuner` and about the action."""
    if not source.left["experiment"].get("auto_tuner"):
        text = "is missing: every knob is auto, with FlagScale's own time limits"
        source.note(_TUNER, text, "auto_tuner")
        source.left["experiment"].pop("auto_tuner", None)
    action = source.take("action")
    if action is not None:
        text = "is what flagcore does" if action == "auto_tune" else f"{action} is read as auto_tune"
        source.note("action", text)


def drop_launcher_keys(source: Source) -> None:
    """Drop the keys that only FlagScale's own launcher needs, with notes."""
    for key, why in DROPPED_KEYS.items():
        source.drop(key, why)
    for key in RUNNER_KEYS:
        source.drop(f"{_RUNNER}.{key}", _STARTS)


def cluster(source: Source) -> tuple[dict[str, Any], int, int, str]:
    """Return the section `cluster` without memory, the nodes, the devices per node, and the first host.

    As in FlagScale, the devices are the minimum of the slots in the host file, `nproc_per_node` and the visible
    devices. Raises SpecError.
    """
    key, default = f"{_RUNNER}.nproc_per_node", 8
    has_nodes, has_devices = (source.at(each) not in ({}, None) for each in (f"{_RUNNER}.nnodes", key))
    nodes, devices = _first_number(source, f"{_RUNNER}.nnodes", 1), _first_number(source, key, default)
    if not has_devices:
        source.note(key, f"is missing: {default}, FlagScale's default", "cluster")
    name, visible = _visible_devices(source)
    if 0 < visible <= devices:
        text = f"{visible} of {devices} are visible by experiment.envs.{name}, and FlagScale uses no more"
        source.note(key, text, "cluster")
        devices, has_devices = visible, True
    hostfile = source.take(f"{_RUNNER}.hostfile")
    section: dict[str, Any] = {"chip": "auto"}
    hosts = _hosts(source, Path(str(hostfile)), nodes if has_nodes else None) if hostfile else None
    first_host = "localhost"
    if hosts:
        path, names, slots = hosts
        nodes, first_host = len(names), names[0] if len(names) > 1 else first_host
    if hosts and slots and has_devices and devices < slots:
        text = f"dropped: it has {slots} slots a host, of which nproc_per_node or what is visible leaves {devices}"
        source.note(f"{_RUNNER}.hostfile", text, "cluster")
    elif hosts:
        keys = f"{_RUNNER}.hostfile" + (", nproc_per_node" if slots else "")
        text = "hosts and slots are those of the file; several are reached by ssh; set cluster.chip for its device type"
        source.note(keys, text, "cluster")
        section |= {"hostfile": path, **({} if slots else {"devices_per_node": devices})}
        return section, nodes, slots or devices, first_host
    return {**section, "nodes": nodes, "devices_per_node": devices}, nodes, devices, first_host


def _visible_devices(source: Source) -> tuple[str, int]:
    """Return the first variable of visible devices and their number, 0 if there is none."""
    envs = source.at("experiment.envs")
    for name, value in envs.items() if isinstance(envs, dict) else ():
        if name.endswith("_VISIBLE_DEVICES"):
            listed = str(value) if type(value) is int or isinstance(value, str) else ""
            return name, len([each for each in listed.split(",") if each.strip()])
    return "", 0


def environment(source: Source, *, own_devices: bool) -> dict[str, str | int]:
    """Return the section `envs`. With `own_devices` trials choose their devices, so device variables are dropped."""
    variables, envs = source.section("experiment.envs"), dict[str, Any]()
    for key, value in variables.items():
        path = f"experiment.envs.{key}"
        if isinstance(value, (dict, list)):
            source.note(path, "dropped: all nodes and devices of a trial have the same variables", "envs")
        elif key.endswith("_VISIBLE_DEVICES") and own_devices:
            source.note(path, f"dropped: trials choose their devices; start flag with {key}={value} instead", "envs")
        elif value is not None or not own_devices:
            envs[key] = value if isinstance(value, str) or type(value) is int else str(value)
    vendors = [
        vendor for start, vendor in TABLES["vendors_by_variable"].items() if any(key.startswith(start) for key in envs)
    ]
    if vendors and not {"GEMS_VENDOR", "FLAGGEMS_VENDOR"} & envs.keys():
        envs["GEMS_VENDOR"] = vendors[0]
        source.note("experiment.envs", f"has variables of {vendors[0]}: GEMS_VENDOR is set", "envs")
    return envs


TIME_LIMITS = {"train": 300, "serve": 3000}
"""FlagScale's default time limits of one trial, in seconds."""


def control(source: Source, kind: str) -> dict[str, Any]:
    """Return the section `auto_tuner.control` of a spec of `kind` train or serve."""
    section_key = f"{_TUNER}.control"
    section: dict[str, Any] = {}
    text = f"is not set: instead of FlagScale's {TIME_LIMITS[kind]} s the limit of a trial follows its prediction"
    if (limit := source.take(f"{section_key}.max_time_per_task")) is not None:
        section["max_time_per_task"] = limit
        text = "holds for all trials; FlagScale gives the first one twice the time"
    source.note(f"{section_key}.max_time_per_task", text, "auto_tuner.control.max_time_per_task")
    if (max_time := source.take(f"{section_key}.max_time")) is not None:
        section["max_time"] = max_time
    run_best = source.take(f"{section_key}.run_best")
    if not isinstance(run_best, (bool, type(None))):
        source.report(f"{section_key}.run_best", "must be true or false", value=run_best)
    section["run_best"] = bool(run_best)
    if run_best is None:
        text = "unless this is false FlagScale runs the best at the end; in flagcore set it to true, or use `flag run`"
        source.note(f"{section_key}.run_best", text, "auto_tuner.control.run_best")
    text = "FlagScale tries all that is not pruned; flagcore at most auto_tuner.control.max_trials, 20 by default"
    source.note(f"{section_key}", text, "auto_tuner.control")
    return section


def _first_number(source: Source, key: str, default: int) -> int:
    """Return the number at `key`, or the first number of a text such as `1:2`."""
    value = source.take(key, default)
    first = str(value).partition(":")[0]
    if isinstance(value, bool) or not first.isdecimal() or int(first) < 1:
        source.report(key, "must be a whole number from 1", value=value, fix=f"use {default}")
        return default
    if first != str(value):
        source.note(key, f"of {value} the first number counts, as for FlagScale", "cluster")
    return int(first)


def _hosts(source: Source, path: Path, nodes: int | None) -> tuple[str, tuple[str, ...], int | None] | None:
    """Return the absolute path of the host file, its hosts and its slots; None if it does not have `nodes` hosts."""
    from flagcore.spec.convert import UNEQUAL, read_hosts

    key, text = f"{_RUNNER}.hostfile", ""
    try:
        hosts, slots = read_hosts(path, file=source.file) if path.is_file() else ((), None)
    except SpecError as error:
        if error.problem != UNEQUAL:
            at = key if error.key.startswith("cluster.") else error.key
            raise spec_error(at, error.problem, value=error.value, fix=error.fix, file=error.file) from None
        text = (
            f"dropped: {error.key} of {path} differs from the first host, so nnodes and nproc_per_node count; "
            "cluster.groups has nodes of several chips"
        )
    if not text and not hosts:
        text = (
            f"dropped: {path} is not in {os.getcwd()}: nnodes and nproc_per_node count; FlagScale takes one node then"
        )
    elif not text and nodes not in (None, len(hosts)):
        text = f"dropped: it names {len(hosts)} hosts, but nnodes is {nodes}, so nnodes and nproc_per_node count"
    if text:
        source.note(key, text, "cluster")
        return None
    return str(path.resolve()), hosts, slots
