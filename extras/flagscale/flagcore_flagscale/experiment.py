"""Translates the sections that training and serving configurations share: machines, environment, budgets."""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagcore.errors import SpecError
from flagcore.spec.clusters import UNEQUAL, HostLine, read_hosts
from flagcore.spec.plain_data import spec_error
from flagcore_flagscale.source import TABLES, Source

_RUNNER, _TUNER = "experiment.runner", "experiment.auto_tuner"
_STARTS = "flagcore starts trials itself"
_EXPORT = re.compile(r"""export(\s+\w+=[^\s$`'"\\|&<>(){}*?~]*)+""")
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
        text = "is flagcore's default" if action == "auto_tune" else f"{action} is treated as auto_tune"
        source.note("action", text)


def drop_launcher_keys(source: Source) -> None:
    """Drop the keys that only FlagScale's own launcher needs, with notes."""
    for key, why in DROPPED_KEYS.items():
        source.drop(key, why)
    for key in RUNNER_KEYS:
        source.drop(f"{_RUNNER}.{key}", _STARTS)


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The section `cluster` without memory, the nodes, the devices per node, and the first host.

    `lines` are the lines of the host file, if it is used.
    """

    section: dict[str, Any]
    nodes: int
    devices: int
    first_host: str
    lines: Sequence[HostLine] = ()


def machines(source: Source) -> Machines:
    """Return the machines on which the runner starts the job.

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
        text = f"{visible} of {devices} are visible because of experiment.envs.{name}, so FlagScale uses these only"
        source.note(key, text, "cluster")
        devices, has_devices = visible, True
    path = str(source.take(f"{_RUNNER}.hostfile") or "")
    lines = _hosts(source, Path(path), nodes if has_nodes else None)
    slots, nodes = (lines[0].slots, len(lines)) if lines else (None, nodes)
    first_host = lines[0].host if len(lines) > 1 else "localhost"
    is_limited = bool(slots and has_devices and devices < slots)
    if is_limited:
        text = f"dropped: it has {slots} slots per host, but nproc_per_node and the visible devices allow {devices}"
        source.note(f"{_RUNNER}.hostfile", text, "cluster")
    if is_limited or not lines:
        section = {"chip": "auto", "nodes": nodes, "devices_per_node": devices}
        return Machines(section=section, nodes=nodes, devices=devices, first_host=first_host)
    section = _of_hostfile(source, path, lines, {} if slots else {"devices_per_node": devices})
    return Machines(section=section, nodes=nodes, devices=slots or devices, first_host=first_host, lines=lines)


def _of_hostfile(source: Source, path: str, lines: Sequence[HostLine], of_nodes: dict[str, int]) -> dict[str, Any]:
    """Return the section `cluster` for a host file. `of_nodes`: the devices of each node, if it has no slots."""
    keys, text = f"{_RUNNER}.hostfile" + ("" if of_nodes else ", nproc_per_node"), "hosts and slots come from the file"
    section: dict[str, Any] = {"hostfile": str(Path(path).resolve())}
    kinds = list(dict.fromkeys(line.kind for line in lines))
    if len(kinds) == 1:
        section = {"chip": "auto", **section, **of_nodes}
        text += ", and trials start by ssh; set cluster.chip to the type of its devices"
    else:
        section["groups"] = [{"chip": kind, **of_nodes} for kind in kinds]
        text += ", and trials start by ssh; its types are the chips of groups"
    source.note(keys, text, "cluster")
    return section


def _visible_devices(source: Source) -> tuple[str, int]:
    """Return the first variable that restricts the visible devices, and their number. The number is 0 if there is
    none."""
    envs = source.at("experiment.envs")
    name = _name_of_visible(envs) if isinstance(envs, dict) else ""
    value = envs[name] if name else None
    listed = str(value) if type(value) is int or isinstance(value, str) else ""
    return name, len([each for each in listed.split(",") if each.strip()])


def _name_of_visible(variables: Iterable[str]) -> str:
    return next((name for name in variables if name.endswith("_VISIBLE_DEVICES")), "")


def environment(source: Source, *, own_devices: bool) -> dict[str, str | int]:
    """Return the section `envs`. With `own_devices` trials choose their devices, so device variables are dropped. No
    shell starts these trials, so variables that `before_start` exports are added to the section."""
    exports = _exports(source) if own_devices else {}
    variables, envs = exports | source.section("experiment.envs"), dict[str, Any]()
    for key, value in variables.items():
        path = f"experiment.envs.{key}"
        if isinstance(value, (dict, list)):
            source.note(path, "dropped: all nodes and devices of a trial have the same variables", "envs")
        elif key.endswith("_VISIBLE_DEVICES") and own_devices:
            source.note(path, f"dropped: trials choose their devices; start flag with {key}={value} instead", "envs")
        elif value is not None or not own_devices:
            envs[key] = value if isinstance(value, str) or type(value) is int else str(value)
    return envs


def add_own_variables(source: Source, cluster: dict[str, Any], lines: Sequence[HostLine]) -> None:
    """Move the variables of device types and of hosts into the section `cluster`; `lines` are those of its host file.

    As in FlagScale, a host's variables override those of the host's type, which override all others.
    """
    envs, groups = source.at("experiment.envs"), cluster.get("groups", ())
    if not isinstance(envs, dict):
        return
    kinds = {line.kind for line in lines} | {_kind(group) for group in groups}
    of_types = _variables(source, "device_type_specific", kinds)
    of_hosts = _variables(source, "node_specific", {line.host for line in lines})
    for line in lines:
        visible = {**envs, **of_types.get(line.kind, {}), **of_hosts.get(line.host, {})}
        name = _name_of_visible(visible)
        count = len(str(visible.get(name)).split(","))
        if name and line.slots and count < line.slots:
            problem, fix = f"shows {count} of {line.slots} slots of {line.host}", f"write slots={count} in that line"
            source.report(f"experiment.envs.{name}", problem, value=visible[name], fix=fix)
    for group in groups:
        if own := of_types.get(_kind(group)):
            group["envs"] = own
    if lines and not groups:
        envs.update(of_types.get(lines[0].kind, {}))
    if of_hosts:
        cluster["host_envs"] = of_hosts


def _variables(source: Source, section: str, names: Collection[str]) -> dict[str, dict[str, str | int]]:
    """Take the variables of each of `names` in a section of `experiment.envs`."""
    key, found = f"experiment.envs.{section}", dict[str, dict[str, str | int]]()
    for name, given in source.section(key).items():
        own = source.mapping(f"{key}.{name}", given)
        if name in names:
            found[name] = {each: value if type(value) is int else str(value) for each, value in own.items()}
        else:
            source.note(f"{key}.{name}", "dropped: no host of the host file has this name or type", "envs")
    return found


def _kind(group: Mapping[str, Any]) -> str:
    return str(group.get("name", group["chip"]))


TIME_LIMITS = {"train": 300, "serve": 3000}
"""FlagScale's default time limits of one trial, in seconds."""


def control(source: Source, kind: str) -> dict[str, Any]:
    """Return the section `auto_tuner.control` of a spec of `kind` train or serve."""
    section_key = f"{_TUNER}.control"
    section: dict[str, Any] = {}
    text = f"is not set: the limit of a trial follows its prediction; FlagScale's default is {TIME_LIMITS[kind]} s"
    if (limit := source.take(f"{section_key}.max_time_per_task")) is not None:
        section["max_time_per_task"] = limit
        text = "applies to all trials; FlagScale doubles it for the first trial"
    source.note(f"{section_key}.max_time_per_task", text, "auto_tuner.control.max_time_per_task")
    if (max_time := source.take(f"{section_key}.max_time")) is not None:
        section["max_time"] = max_time
    run_best = source.take(f"{section_key}.run_best")
    if not isinstance(run_best, (bool, type(None))):
        source.report(f"{section_key}.run_best", "must be true or false", value=run_best)
    section["run_best"] = bool(run_best)
    if run_best is None:
        text = "FlagScale runs the best at the end by default; in flagcore, set this to true, or use `flag run`"
        source.note(f"{section_key}.run_best", text, "auto_tuner.control.run_best")
    text = (
        "FlagScale tries every candidate that is not pruned; flagcore tries at most auto_tuner.control.max_trials (20)"
    )
    source.note(f"{section_key}", text, "auto_tuner.control")
    return section


def _first_number(source: Source, key: str, default: int) -> int:
    """Return the number at `key`, or the first number of a string such as `1:2`."""
    value = source.take(key, default)
    first = str(value).partition(":")[0]
    if isinstance(value, bool) or not first.isdecimal() or int(first) < 1:
        source.report(key, "must be a whole number from 1", value=value, fix=f"use {default}")
        return default
    if first != str(value):
        source.note(key, f"the first number of {value} is used, as in FlagScale", "cluster")
    return int(first)


def _hosts(source: Source, path: Path, nodes: int | None) -> Sequence[HostLine]:
    """Return the lines of the host file, or an empty result if there is none or it does not list `nodes` hosts."""
    key, text = f"{_RUNNER}.hostfile", ""
    if path == Path():
        return ()
    try:
        lines = read_hosts(path, file=source.file) if path.is_file() else ()
    except SpecError as error:
        if error.problem != UNEQUAL:
            hosts_key = key if error.key.startswith("cluster.") else error.key
            raise spec_error(hosts_key, error.problem, value=error.value, fix=error.fix, file=error.file) from None
        source.note(key, f"dropped: {error.key} of {path} {UNEQUAL}, so nnodes and nproc_per_node are used", "cluster")
        return ()
    if not lines:
        text = (
            f"dropped: {path} is not in {os.getcwd()}, so nnodes and nproc_per_node are used; FlagScale uses one node"
        )
    elif nodes not in (None, len(lines)):
        text = f"dropped: it names {len(lines)} hosts, but nnodes is {nodes}, so nnodes and nproc_per_node are used"
    if text:
        source.note(key, text, "cluster")
    return () if text else lines


def _exports(source: Source) -> dict[str, str]:
    """Take the variables that plain `export` commands of `before_start` set; the other commands stay."""
    before_start = source.at("experiment.cmds.before_start")
    if not isinstance(before_start, str):
        return {}
    source.take("experiment.cmds.before_start")
    exports, others = dict[str, str](), list[str]()
    for command in (each.strip() for each in re.split(r"&&|;|\n", before_start)):
        if _EXPORT.fullmatch(command):
            exports |= dict(each.split("=", 1) for each in command.split()[1:])
        elif command:
            others.append(command)
    if others:
        source.put("experiment.cmds.before_start", " && ".join(others))
    return exports
