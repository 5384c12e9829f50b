"""Warnings beside the result of a command: the log `flagcore`, by default on stderr."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagcore.api.common.calibrated_plugins import CalibratedPlugins
from flagcore.calibration import Calibrations
from flagcore.contracts import InstalledVersion, KeyWarnings, Workload, untested_reason
from flagcore.domain.chip import Support
from flagcore.domain.knob import Knob
from flagcore.domain.serving import ServeSpec
from flagcore.domain.spec import Spec
from flagcore.errors import FlagError
from flagcore.plugins import LoadedPlugins, engines, load_plugins
from flagcore.problem import Problem, sizes_held_at_one
from flagcore.spec import parse_spec

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
    engine = train.get("engine") if isinstance(train, Mapping) else None
    more: Sequence[Knob] = ()
    known = engines()
    if named and isinstance(engine, str) and engine in known:
        own = {knob.name for knob in known[engine].knobs}
        more = load_plugins(without).knobs_on_any_chip(engine) if named - own else ()
    return parse_spec(data, file=file, base=base, engines=known, plugin_knobs=more)


def warn_about_problem(problem: Problem, workload: Workload) -> None:
    """Warn of an engine that is untested on the chip, of variables that the user sets differently from plugins,
    of sizes that a rule holds at 1, of pruning rules that had to be left out, of settings that do
    nothing, and of flags that cannot be checked.
    """
    support, task = problem.platform.support, problem.platform.task
    if support.support is Support.UNKNOWN:
        chip = task.cluster.chips
        warn([f"{task.spec.work.engine} on {chip}: untested; {support.reason}"])
    if untested := untested_reason(workload):
        warn([f"engine {task.spec.work.engine} is untested: {untested}"])
    warn(problem.platform.conflicts)
    warn(sizes_held_at_one(problem))
    warn(problem.pruned.broken_rules)
    if isinstance(workload, KeyWarnings):
        warn(workload.spec_warnings(task.spec))
    if isinstance(task.spec.work, ServeSpec):
        warn(_unchecked(task.spec.work, task.spec, workload))


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
