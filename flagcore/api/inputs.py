"""Reads specs as users pass them, loads their plugins, and logs warnings to the logger `flagcore`."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from flagcore import plugins
from flagcore.api.notes import LOG, warn, warn_about_problem
from flagcore.contracts import Problem
from flagcore.domain.chip import unknown_chip_hint
from flagcore.domain.files import write
from flagcore.domain.knob import Knob, Knobs
from flagcore.domain.prediction import Labels
from flagcore.domain.secrets import secrets_in_data
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import AUTO, HOSTFILE, LOCAL, Spec
from flagcore.errors import FlagError, NoDevice, SpecError, UsageError, join_errors
from flagcore.i18n import N_, _
from flagcore.plugins import LoadedPlugins
from flagcore.report.formats import as_yaml
from flagcore.spec.clusters import without_spares
from flagcore.spec.convert import check_engines, engines_of, parse_spec, select_engine
from flagcore.spec.models import absolute_model
from flagcore.spec.plain_data import KeyPath, parse_yaml, plain, spec_as_data, spec_error
from flagcore.spec.validate import Context, checked, located
from flagcore.tuner.problem import OnUsual, build_problem


@dataclass(frozen=True)
class LoadedSpec:
    """The content of a spec that may differ from its file, as with `--set`, or whose file has another format.

    Relative paths are relative to the directory of `file`. `os.fspath` returns `file`.
    """

    file: Path | str
    data: Mapping[str, Any]

    def __fspath__(self) -> str:
        return os.fspath(self.file)


SpecLike: TypeAlias = Path | str | LoadedSpec | Mapping[str, Any]
"""A spec: its file, or its content as data. Relative paths in data are relative to the working directory."""


UNNAMED = Path("spec")
"""The name of a spec without a file, in messages and for the folder of its run."""


def spec_data(spec: SpecLike) -> tuple[Path, dict[str, Any]]:
    """Return the file and the content of a spec. Raises SpecError."""
    if isinstance(spec, Mapping):
        return UNNAMED, dict(plain(spec, file=str(UNNAMED)))
    if isinstance(spec, LoadedSpec):
        return Path(spec.file), dict(spec.data)
    return Path(spec), spec_as_data(Path(spec))


def changed_spec(spec: SpecLike, changes: Mapping[str, Any]) -> LoadedSpec:
    """Return a spec with new values of keys, which are dotted, such as `cluster.nodes`.

    Raises SpecError if a key is inside a value such as a path.
    """
    file, data = spec_data(spec)
    changed = deepcopy(data)
    for key, value in changes.items():
        *names, last = key.split(".")
        section: Any = changed
        for depth, name in enumerate(names, start=1):
            section[name] = {} if section.get(name) is None else section[name]
            section = section[name]
            if not isinstance(section, dict):
                error_text = _("has no keys, so {key} cannot be set", key=key)
                raise spec_error(".".join(names[:depth]), error_text, value=section, file=str(file))
        section[last] = value
    return LoadedSpec(file, changed)


def about_sections(spec: SpecLike, tokens: int, step_s: Sequence[float]) -> Iterator[str]:
    """Yield what the sections of a valid spec say about a plan with steps of `tokens` tokens, as `Section.about_plan`.
    `step_s`: the seconds of a step, the expected ones first."""
    file, data = spec_data(spec)
    for key, (kind, _default) in plugins.engines(data).sections(data).items():
        section = checked(kind, data[key], Context(file=str(file), data=data))
        yield section.about_plan([tokens / each for each in step_s])


def with_limits(spec: SpecLike, limits: Iterable[str], rate: float | str | None = None) -> LoadedSpec:
    """Return a spec of servers with limits, such as `p99 ttft 1s`, and a `rate` of requests per second, or `auto`.

    Raises UsageError, SpecError.
    """
    file, data = spec_data(spec)
    if "serve" not in data:
        text = N_("--slo and --rate are for servers, but {file} has no section {section}")
        raise UsageError(_(text, file=file, section="serve"))
    documents = import_module(plugins.kinds()["serve"].documents)
    return changed_spec(LoadedSpec(file, data), documents.changes_of_load(limits, rate))


def with_settings(spec: SpecLike, settings: Iterable[str]) -> LoadedSpec:
    """Return a spec with changed keys. Each setting is `KEY=VALUE` with a YAML value. Raises UsageError, SpecError."""
    changes = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise UsageError(_("--set {text}: expected KEY=VALUE, such as cluster.nodes=2", text=text))
        changes[key] = parse_yaml(value, file=f"--set {key}")
    if not isinstance(spec, (Mapping, LoadedSpec)) and Path(spec).is_dir():
        names = {"key": next(iter(changes)), "run": os.fspath(spec)}
        raise UsageError(_("--set {key} works only with a spec, but {run} is a run directory", **names))
    return changed_spec(spec, changes)


RUNS = Path("runs")
"""The default folder of runs."""


def specs_by_engine(spec: SpecLike) -> dict[str, LoadedSpec]:
    """Return a spec for each engine that a spec lists, by the engine's name."""
    file, data = spec_data(spec)
    kinds = plugins.kinds()
    return {name: LoadedSpec(file, select_engine(data, name, kinds)) for name in engines_of(data, kinds)}


def with_fidelity(data: Mapping[str, Any], fidelity: str | None = None) -> dict[str, Any]:
    """Return the content of a spec with `fidelity` in `auto_tuner.control`, or without that key if it is None."""
    tuner = data.get("auto_tuner") or {}
    old_control = tuner.get("control") or {}
    control = {key: value for key, value in old_control.items() if key != "fidelity"}
    control |= {} if fidelity is None else {"fidelity": fidelity}
    return dict(data) if control == old_control else {**data, "auto_tuner": {**tuner, "control": control}}


def without_budget(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a spec without the keys that may change when a run is resumed."""
    kept = {key: each for key, each in with_fidelity(data).items() if key not in plugins.names(plugins.SECTIONS)}
    if control := (kept.get("auto_tuner") or {}).get("control"):
        fixed = {key: value for key, value in control.items() if key not in ("max_trials", "max_time")}
        kept["auto_tuner"] = {**kept["auto_tuner"], "control": fixed}
    return kept


PATHS = (("model",), ("cluster", "hostfile"))
"""The keys of every spec whose values are paths. Models may also be names of public models, which stay as they are."""


def with_absolute_paths(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return a spec's data with absolute paths, so that a copy in another folder is equivalent."""
    resolved = deepcopy(dict(data))
    paths = list[tuple[str, ...]](PATHS)
    jobs = plugins.kinds()
    for kind in jobs:
        work = resolved.get(kind)
        if work and work.get("command"):
            work["directory"] = str((base / (work.get("directory") or ".")).resolve())
        paths += [(kind, *path) for path in jobs[kind].paths] if work else []
    for *sections, key in paths:
        section: Any = resolved
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and section.get(key) and isinstance(section[key], str):
            section[key] = absolute_model(section[key], base)
    return resolved


def write_spec(folder: Path, data: Mapping[str, Any], base: Path) -> None:
    """Write a spec's data, with absolute paths, to the folder of a run. Raises RunError if it cannot be written."""
    text = as_yaml(with_absolute_paths(data, base)) + "\n"
    write(folder / "spec.yaml", text, private=bool(secrets_in_data(data)))


def fixed_task(data: Mapping[str, Any], problem: Problem) -> dict[str, object]:
    """Return what must not change when a run is resumed: the spec, model, hardware, and how trials start."""
    platform, cluster = problem.platform, problem.platform.task.cluster
    sizes = [[each.chip.name, each.nodes, each.devices_per_node] for each in cluster.groups]
    hardware = {"chip": cluster.chips, "nodes": sizes[0][1], "devices_per_node": sizes[0][2]}
    engine = {"device": platform.support.device_type, "backend": platform.support.distributed_backend}
    return {
        "spec": without_budget(data),
        "model": asdict(replace(platform.task.spec.model, unread=())),
        "hardware": hardware | ({"others": sizes[1:]} if sizes[1:] else {}),
        "plugins say": {"environment": dict(platform.environment), "engine": engine},
        **({"precision": platform.task.spec.work.precision} if platform.precision_reason else {}),
    }


def knobs_of_spec(data: Mapping[str, Any], used: Iterable[str] = (), without: Collection[str] | None = None) -> Knobs:
    """Return the knobs of a spec's engine by name. The result is empty if the engine is not installed.

    If `used` contains knobs that the engine does not have, all plugins except those in `without` are asked for them. If
    `without` is None, no plugin is asked.
    """
    engine, knobs = _engine_name(data), {}
    if engine is not None:
        with suppress(FlagError, KeyError):
            knobs = {knob.name: knob for knob in plugins.engines(data)[engine].knobs}
        if without is not None and set(used) - knobs.keys():
            knobs |= {knob.name: knob for knob in _knobs_of_plugins(engine, without)}
    return knobs


def _knobs_of_plugins(engine: str, without: Collection[str]) -> tuple[Knob, ...]:
    """Return the knobs that plugins and measured choices add to an engine. Their failures are reported later."""
    return plugins.with_overlay(plugins.load_plugins(without), LOG.debug).knobs_on_any_chip(engine)


def labels_of_spec(data: Mapping[str, Any]) -> Labels:
    """Return the labels of the engine of a spec. They are empty if the engine is not installed."""
    with suppress(FlagError, KeyError):
        labels: Labels = plugins.engines(data)[_engine_name(data) or ""].plans.labels
        return labels
    return Labels()


def _engine_name(data: Mapping[str, Any]) -> str | None:
    """Return the name of the first engine that a spec names, or None."""
    return next(iter(engines_of(data, plugins.kinds())), None)


@contextmanager
def loaded_plugins(without: Collection[str]) -> Iterator[LoadedPlugins]:
    """Load the plugins, with what an overlay adds. When the context ends, warn about each failure."""
    loaded = plugins.with_overlay(plugins.load_plugins(without), LOG.warning)
    try:
        yield loaded
    finally:
        warn(loaded.failures)


class OpenedSpec(NamedTuple):
    """A spec as it was read, its plugins, and its search problem."""

    spec: Spec
    plugins: LoadedPlugins
    problem: Problem


def open_spec(
    source: SpecLike,
    chip: str | None = None,
    without: Collection[str] = (),
    *,
    plan: bool = False,
    on_usual: OnUsual | None = None,
    change: Callable[[Spec], Spec] = lambda spec: spec,
    completed: Mapping[str, KnobValue] | None = None,
) -> OpenedSpec:
    """Take a spec from its file to its search problem, optionally for another chip or as a `plan`.

    `change`: applied to the spec after it was read. `completed`: the baseline of its run, see `build_problem`. Raises
    SpecError and other FlagErrors.
    """
    spec = change(read_spec(source, chip, without))
    with loaded_plugins(without) as loaded:
        engine = plugins.engine_of(spec.work)
        problem = build_problem(spec, loaded, engine, plan=plan, on_usual=on_usual, completed=completed)
    warn_about_problem(problem)
    return OpenedSpec(spec, loaded, problem)


def read_spec(source: SpecLike, chip: str | None = None, without: Collection[str] = ()) -> Spec:
    """Read a spec, optionally for another chip. Raises SpecError, UsageError."""
    file, content = spec_data(source)
    spec = _parsed(content, file, without)
    if chip is None:
        return spec
    if spec.cluster.groups:
        raise UsageError(_("--chip {chip} needs one kind of chip; {file} has cluster.groups", chip=chip, file=file))
    return replace(spec, cluster=replace(spec.cluster, chip=chip))


def _parsed(data: Mapping[str, Any], path: Path, without: Collection[str], base: Path | None = None) -> Spec:
    """Parse the plain data of the spec in the file `path`. Its paths are relative to `base`, by default its folder.

    Raises SpecError.
    """
    file, base = str(path), base or path.parent
    tuner = tuner if isinstance(tuner := data.get("auto_tuner"), Mapping) else {}
    installed, unknown_names = plugins.engines(data), list(_unknown_names(tuner, file))
    plugin_knobs = _plugin_knobs(data, tuner, installed, without)
    try:
        spec = parse_spec(data, file=file, base=base, engines=installed, plugin_knobs=plugin_knobs)
    except SpecError as error:
        unknown_chips = _unknown_chips(data.get("cluster"), file, without)
        raise join_errors([*error.problems, *unknown_chips, *unknown_names]) from None
    if unknown_names:  # without other errors, an unknown chip is reported by the stage `discover`
        raise join_errors(unknown_names)
    if "launcher" not in tuner:
        spec = _with_launcher(spec, any_number=data.get("cluster") == AUTO)
    spec = _with_hosts(spec)
    if error_text := _min_nodes_error(spec):
        min_nodes, fix = spec.cluster.min_nodes, _("leave it out")
        raise SpecError(key="cluster.min_nodes", value=min_nodes, problem=error_text, fix=fix)
    return spec


def _plugin_knobs(
    data: Mapping[str, Any], tuner: Mapping[str, Any], installed: Collection[str], without: Collection[str]
) -> list[Knob]:
    """Return the knobs that plugins add to the engine of a spec.

    Plugins are asked only if the space or the baseline has a name that the engine does not know.
    """
    sections = [section for key in ("space", "baseline") if isinstance(section := tuner.get(key), Mapping)]
    engine, names = _engine_name(data), {name for section in sections for name in section}
    if not engine or engine not in installed:
        return []
    engine_names = {name for knob in knobs_of_spec(data).values() for name in knob.names} if names else set()
    found = _knobs_of_plugins(engine, without) if names - engine_names - {engine} else ()
    if names - engine_names - {engine, *(knob.name for knob in found)}:
        plugins.with_overlay(plugins.load_plugins(without), LOG.warning).knobs_on_any_chip(engine)
    return [knob for knob in found if knob.name not in engine_names]


def _min_nodes_error(spec: Spec) -> str:
    """Return why trials cannot continue on fewer nodes, or an empty string if they can or `min_nodes` is not set."""
    if spec.cluster.min_nodes is None:
        return ""
    if not plugins.engine_of(spec.work).replicas:
        return _("needs an engine with data-parallel replicas")
    if not spec.on_each_host:
        return _("needs auto_tuner.launcher and hosts")
    if not spec.sizes[:-1]:
        text = N_("leaves no node count below cluster.nodes = {nodes} that divides the global batch size")
        return _(text, nodes=spec.cluster.nodes)
    return ""


def _with_launcher(spec: Spec, any_number: bool) -> Spec:
    """Return a spec for several nodes with the launcher of the current allocation, if there is an allocation.

    A job with a `train.command` is unchanged, because the command may start all nodes itself.
    """
    cluster, work = spec.cluster, spec.work
    needs_launcher = not (cluster.hosts or cluster.groups) and (any_number or cluster.nodes > 1)
    if not needs_launcher or work.starts_itself:
        return spec
    for name in plugins.names(plugins.LAUNCHERS):
        try:
            if plugins.launcher(name).has_allocation():
                return replace(spec, launcher=name)
        except NoDevice as error:
            warn([error])
    return spec


def _with_hosts(spec: Spec) -> Spec:
    """Add the hosts that the launcher finds to a spec without hosts. Raises SpecError if it finds too few."""
    cluster, at_most = spec.cluster, spec.trial_nodes + spec.cluster.spares
    hosts = () if cluster.hosts or spec.launcher == LOCAL else plugins.launcher(spec.launcher).find_hosts(at_most)
    if HOSTFILE in " ".join(spec.work.command or ()) and not (hosts or cluster.hosts):
        error_text, fix = _("uses {name}, but no hosts are known", name=HOSTFILE), _("list them in cluster.hostfile")
        key, value = f"{spec.work.kind}.command", " ".join(spec.work.command or ())
        raise SpecError(key=key, value=value, problem=error_text, fix=fix)
    if cluster.hosts or cluster.groups or not (hosts or cluster.spares):
        return spec
    count = without_spares(hosts, cluster.spares)
    if spec.trial_nodes > count:
        names = {"launcher": spec.launcher, "hosts": ", ".join(hosts)}
        error_text = _("must be at most {count}: {launcher} found {hosts}", count=count, **names)
        raise SpecError(key="cluster.nodes", value=cluster.nodes, problem=error_text, fix=_("leave it out"))
    nodes = cluster.nodes if cluster.nodes > 1 else count
    return replace(spec, cluster=replace(cluster, hosts=hosts, nodes=nodes))


def _unknown_names(tuner: Mapping[str, Any], file: str) -> Iterator[SpecError]:
    """Yield an error for a strategy or a launcher that is not installed."""
    for key, group, find in (
        ("strategy", plugins.STRATEGIES, plugins.strategy),
        ("launcher", plugins.LAUNCHERS, plugins.launcher),
    ):
        name = tuner.get(key)
        if isinstance(name, str) and name not in plugins.names(group):
            try:
                find(name)
            except SpecError as error:
                yield located(error, (), file)


def _unknown_chips(cluster: object, file: str, without: Collection[str]) -> Iterator[SpecError]:
    sections: list[tuple[KeyPath, Any]] = [(("cluster",), cluster)]
    if isinstance(cluster, Mapping) and isinstance(cluster.get("groups"), list):
        sections = [(("cluster", "groups", place), group) for place, group in enumerate(cluster["groups"])]
    loaded = plugins.load_plugins(without)
    for at, section in sections:
        name = section.get("chip") if isinstance(section, Mapping) else None
        if isinstance(name, str) and name != AUTO and not any(chip.matches_name(name) for chip in loaded.chips(name)):
            error_text, fix = _("is not supported by any installed plugin"), unknown_chip_hint(name, loaded.chips())
            yield spec_error((*at, "chip"), error_text, value=name, fix=fix, file=file)


def check_chips(cluster: object) -> None:
    """Raise SpecError if a spec's cluster names a chip that no installed plugin lists."""
    if errors := list(_unknown_chips(cluster, "", ())):
        raise join_errors(errors)


def check_spec(spec: SpecLike, without: Collection[str] = (), base: Path | None = None) -> None:
    """Raise SpecError if a spec with one or several engines is invalid.

    If at least one of several engines is valid, there is no error, because the others are skipped. Paths are relative
    to `base`, by default the folder of the file.
    """
    file, data = spec_data(spec)
    several, failed = engines_of(data, plugins.kinds()), list[SpecError]()
    if len(several) < 2:
        _parsed(data, file, without, base)
        return
    try:
        check_engines(data, file=str(file), base=base or file.parent, engines=plugins.engines())
    except SpecError as error:
        raise join_errors([*error.problems, *_unknown_chips(data.get("cluster"), str(file), without)]) from None
    for name in several:
        try:
            _parsed(select_engine(data, name, plugins.kinds()), file, without, base)
        except SpecError as error:
            failed.append(error)
    if len(failed) == len(several):
        raise failed[0]
