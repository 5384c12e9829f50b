"""Specs as users pass them, the plugins that they need, and warnings: the log `flagcore`, by default on stderr."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from flagcore.api.common.calibrated_plugins import CalibratedPlugins
from flagcore.calibration import Calibrations
from flagcore.contracts import (
    EngineDefaults,
    InstalledVersion,
    KeyWarnings,
    MultiHostLauncher,
    Workload,
    labels_of,
    untested_reason,
)
from flagcore.domain.chip import Support, unknown_chip_hint
from flagcore.domain.effects import engine_task
from flagcore.domain.knob import Knob, Knobs
from flagcore.domain.prediction import Labels
from flagcore.domain.secrets import secrets_in_data
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import AUTO, HOSTFILE, Spec, TrainSpec
from flagcore.errors import FlagError, SpecError, join_errors
from flagcore.i18n import _
from flagcore.plugins import LAUNCHERS, STRATEGIES, LoadedPlugins, engines, launcher, load_plugins, names, strategy
from flagcore.problem import Problem, sizes_fixed_at_one
from flagcore.report.formats import as_yaml
from flagcore.spec import parse_spec, spec_as_data
from flagcore.spec.convert import check_engines, without_spares
from flagcore.spec.plain_data import KeyPath, plain, spec_error
from flagcore.spec.serving import engines_of, select_engine
from flagcore.spec.validate import convert_all
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
    tuner = data.get("auto_tuner") or {}
    given = tuner.get("control") or {}
    control = {key: value for key, value in given.items() if key != "fidelity"}
    control |= {} if fidelity is None else {"fidelity": fidelity}
    return dict(data) if control == given else {**data, "auto_tuner": {**tuner, "control": control}}


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
    engine, knobs = _engine_name(data), {}
    if engine is not None:
        with suppress(FlagError, KeyError):
            knobs = {knob.name: knob for knob in engines()[engine].knobs}
        if without is not None and set(used) - knobs.keys():
            knobs |= {knob.name: knob for knob in load_plugins(without).knobs_on_any_chip(engine)}
    return knobs


def labels_of_spec(data: Mapping[str, Any]) -> Labels:
    """Return the labels of the engine of a spec or job record; none for an engine that is not installed here.

    The engine of a job record without one is the first that trains.
    """
    known = engines()
    with suppress(FlagError, KeyError, StopIteration):
        name = _engine_name(data) or next(name for name, engine in known.items() if engine.kind == "train")
        return labels_of(known[name])
    return Labels()


def _engine_name(data: Mapping[str, Any]) -> str | None:
    """Return the name of a spec's engine, of several the first; None without one."""
    sections = (data.get(kind) for kind in ("train", "serve"))
    engine = next((each["engine"] for each in sections if isinstance(each, Mapping) and "engine" in each), None)
    engine = engine[0] if isinstance(engine, list) and engine else engine
    return engine if isinstance(engine, str) else None


LOG = logging.getLogger("flagcore")


@contextmanager
def loaded_plugins(without: Collection[str]) -> Iterator[LoadedPlugins]:
    """Load the plugins, with the user's calibrations, and warn at the end of each that failed."""
    found = load_plugins(without)
    loaded = CalibratedPlugins(found.plugins, found.failures, Calibrations.of_user(), LOG.warning)
    try:
        yield loaded
    finally:
        warn(loaded.failures)


def parsed(data: Mapping[str, Any], *, file: str, base: Path, without: Collection[str] = ()) -> Spec:
    """Turn plain data into a spec. Plugins are asked for their knobs only if it names some that its engine lacks.

    Raises SpecError.
    """
    train, tuner = data.get("train"), data.get("auto_tuner")
    sections = [tuner.get(key) for key in ("space", "baseline")] if isinstance(tuner, Mapping) else []
    named = {name for section in sections if isinstance(section, Mapping) for name in section}
    engine = train.get("engine") if isinstance(train, Mapping) else next(iter(engines_of(data)), None)
    more: Sequence[Knob] = ()
    known = engines()
    if named and isinstance(engine, str) and engine in known:
        own = {name for knob in known[engine].knobs for name in knob.names}
        more = load_plugins(without).knobs_on_any_chip(engine) if named - own - {engine} else ()
        more = [knob for knob in more if knob.name not in own]
    parts: dict[str, Callable[[], object]] = {
        "spec": lambda: parse_spec(data, file=file, base=base, engines=known, plugin_knobs=more)
    }
    for key, group, named_object in (("strategy", STRATEGIES, strategy), ("launcher", LAUNCHERS, launcher)):
        name = tuner.get(key) if isinstance(tuner, Mapping) else None
        if isinstance(name, str) and name not in names(group):
            parts[key] = partial(_require_installed, named_object, name, file)
    with _with_unknown_chips(data.get("cluster"), file, without):
        found: Spec = convert_all(parts)["spec"]
    if not (isinstance(tuner, Mapping) and "launcher" in tuner):
        found = _with_launcher(found, any_number=data.get("cluster") == AUTO)
    return _with_hosts(found)


def _with_launcher(spec: Spec, any_number: bool) -> Spec:
    """Return a job for several nodes with the launcher of the allocation that flagcore runs in, if any.

    A command that trains may start all nodes itself, so that it needs the name of a launcher.
    """
    cluster, work = spec.cluster, spec.work
    several = not (cluster.hosts or cluster.groups) and (any_number or cluster.nodes > 1)
    if not several or (isinstance(work, TrainSpec) and work.command is not None):
        return spec
    launchers = ((name, launcher(name)) for name in names(LAUNCHERS))
    found = (name for name, each in launchers if isinstance(each, MultiHostLauncher) and each.has_allocation())
    return replace(spec, launcher=next(found, spec.launcher))


def _with_hosts(spec: Spec) -> Spec:
    """Return `spec` with the hosts that its launcher finds, if it names none. Raises SpecError for another number."""
    cluster, finder = spec.cluster, launcher(spec.launcher)
    at_most = max(spec.trial_nodes) + cluster.spares
    hosts = finder.find_hosts(at_most) if isinstance(finder, MultiHostLauncher) and not cluster.hosts else ()
    if HOSTFILE in " ".join(spec.work.command or ()) and not (hosts or cluster.hosts):
        where = "serve" if isinstance(spec.work, ServeSpec) else "train"
        problem, fix = _("uses {name}, but no hosts are known", name=HOSTFILE), _("name them in cluster.hostfile")
        raise SpecError(key=f"{where}.command", value=" ".join(spec.work.command or ()), problem=problem, fix=fix)
    if cluster.hosts or cluster.groups or not (hosts or cluster.spares):
        return spec
    count = without_spares(hosts, cluster.spares)
    if max(spec.trial_nodes) > count:
        found = ", ".join(hosts)
        problem = _("must be at most {count}: {launcher} found {hosts}", count=count, launcher=finder.name, hosts=found)
        raise SpecError(key="cluster.nodes", value=cluster.nodes, problem=problem, fix=_("leave it out"))
    nodes = cluster.nodes if cluster.nodes > 1 else count
    return replace(spec, cluster=replace(cluster, hosts=hosts, nodes=nodes))


@contextmanager
def _with_unknown_chips(cluster: object, file: str, without: Collection[str]) -> Iterator[None]:
    """Add the errors of unknown chips to a SpecError. Without any, `discover` finds them."""
    try:
        yield
    except SpecError as error:
        raise join_errors([*error.problems, *_unknown_chips(cluster, file, without)]) from None


def _unknown_chips(cluster: object, file: str, without: Collection[str]) -> Iterator[SpecError]:
    sections: list[tuple[KeyPath, Any]] = [(("cluster",), cluster)]
    if isinstance(cluster, Mapping) and isinstance(cluster.get("groups"), list):
        sections = [(("cluster", "groups", place), group) for place, group in enumerate(cluster["groups"])]
    chips = load_plugins(without).chips()
    for at, section in sections:
        name = section.get("chip") if isinstance(section, Mapping) else None
        if isinstance(name, str) and name != AUTO and not any(chip.has_name(name) for chip in chips):
            problem, fix = _("is not known to any installed plugin"), unknown_chip_hint(name, chips)
            yield spec_error((*at, "chip"), problem, value=name, fix=fix, file=file)


def _require_installed(named_object: Callable[[str], object], name: str, file: str) -> None:
    try:
        named_object(name)
    except SpecError as error:
        raise spec_error(error.key, error.problem, value=error.value, fix=error.fix, file=file) from None


def validate_engines(data: Mapping[str, Any], *, file: Path, base: Path, without: Collection[str] = ()) -> None:
    """Raise SpecError for what is wrong with a spec, which may have several engines.

    One of several that cannot be tuned is no error: it is skipped.
    """
    several, failed = engines_of(data), list[SpecError]()
    if len(several) < 2:
        parsed(data, file=str(file), base=base, without=without)
        return
    with _with_unknown_chips(data.get("cluster"), str(file), without):
        check_engines(data, file=str(file), engines=engines())
    for name in several:
        try:
            parsed(select_engine(data, name), file=str(file), base=base, without=without)
        except SpecError as error:
            failed.append(error)
    if len(failed) == len(several):
        raise failed[0]


def warn_about_problem(problem: Problem, workload: Workload) -> None:
    """Warn of an engine that is untested on the chip, of devices that no candidate uses, of variables that the user
    sets differently from plugins, of sizes that a rule holds at 1, of pruning rules that had to be left out, of
    settings that do nothing, and of flags that cannot be checked.
    """
    support, task = problem.platform.support, problem.platform.task
    engine, lines = task.spec.work.engine, list[object]()
    unknown = support.reason if support.support is Support.UNKNOWN else ""
    if reasons := [reason for reason in (unknown, untested_reason(workload)) if reason]:
        names = {"engine": engine, "chip": task.cluster.chips, "reason": "; ".join(reasons)}
        lines.append(_("{engine} on {chip}: untested; {reason}", **names))
    lines += _idle_devices(problem, workload)
    lines += [*problem.platform.conflicts, *sizes_fixed_at_one(problem), *problem.pruned.broken_rules]
    if isinstance(workload, KeyWarnings):
        lines += workload.spec_warnings(task.spec)
    if isinstance(task.spec.work, ServeSpec):
        lines += _unchecked(task.spec.work, task.spec, workload)
    warn(lines)


def _idle_devices(problem: Problem, workload: Workload) -> list[str]:
    """Return that no candidate uses all devices that a trial may use."""
    work, task, rows = problem.platform.task.spec.work, problem.platform.task, problem.pruned.open_rows
    if not isinstance(work, ServeSpec) or not isinstance(workload, EngineDefaults) or not rows.size:
        return []
    most = int(workload.device_counts(engine_task(task), problem.space.columns(rows)).max())
    usable = work.cards or task.cluster.devices
    if most >= usable:
        return []
    text = _("candidates use at most {most} of {usable} devices; ", most=most, usable=usable)
    return [text + _("add `instances: auto` to auto_tuner.space, or set auto_tuner.cards: {most}", most=most)]


def _unchecked(serve: ServeSpec, spec: Spec, workload: Workload) -> list[str]:
    """Return that flags of an engine are not checked, if it is not installed here."""
    if not serve.engine_args or not isinstance(workload, InstalledVersion):
        return []
    try:
        found = workload.installed_version(replace(spec, work=replace(serve, engine_version=None)))
    except FlagError:
        found = ""
    flags = ", ".join(serve.engine_args)
    return [] if found else [f"serve.engine_args ({flags}): not checked, {serve.engine} is not installed here"]


def warn(problems: Iterable[object]) -> None:
    """Warn of each problem."""
    for problem in problems:
        LOG.warning("%s", problem)
