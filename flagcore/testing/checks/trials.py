"""Trials: telemetry, pruning rules, and changes to a launch."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from flagcore.contracts import PruningRule
from flagcore.domain.chip import Device
from flagcore.domain.launch import Launch
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Space
from flagcore.plugins import launcher, workload
from flagcore.stages.build import build
from flagcore.stages.discover import costs as costs_of
from flagcore.stages.predict import predict
from flagcore.stages.prune import prune
from flagcore.testing import fakes
from flagcore.testing.kit import Problem, Problems, Skip, Subject, check

RANGES: Mapping[str, tuple[float, float]] = {
    "memory_used_bytes": (0, 2**42),
    "power_watts": (0, 5000),
    "power_limit_watts": (1, 5000),
    "temperature_celsius": (-40, 150),
    "utilization_share": (0, 1),
    "clock_hertz": (0, 1e10),
    "load_average": (0, 1e5),
    "throttled": (0, 1),
}
"""Range of each figure; names end in the unit."""
Sample = tuple[Device, Mapping[str, float]]


def _samples(plugin: Subject) -> list[Sample]:
    """Return a reading of each device of this machine, or else of each device of the first transcript with known
    chips.
    """
    plugin.implements("flagcore_telemetry")
    samples = plugin.once("samples", lambda: _read_sample(plugin))
    if not samples:
        raise Skip("there is no device of a known chip, neither here nor in a transcript with its memory")
    return samples


def _read_sample(plugin: Subject) -> list[Sample]:
    def sample(device: Device) -> list[Sample]:
        reader = plugin.loaded.telemetry(device)
        return [(device, reader.sample())] if reader else []

    if here := plugin.loaded.devices():
        return [pair for device in here for pair in sample(device)]
    try:
        listings = plugin.listings
    except Skip:
        return []
    for each in listings:
        if all(plugin.loaded.find_chip(listed.chip) and listed.memory_mib for listed in each.lists):
            with fakes.machine(fakes.printing(each)):
                return [pair for device in fakes.ask(plugin) for pair in sample(device)]
    return []


@check(each=_samples)
def telemetry_names_are_known(device: Device, sample: Mapping[str, float]) -> Problems:
    location = f"flagcore_telemetry of device {device.index}: "
    for name, value in sample.items():
        if not any(name == prefix or name.startswith(f"{prefix}_") for prefix in RANGES):
            yield Problem(f"{location}{name} is an unknown figure", f"the names are {', '.join(RANGES)}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            yield Problem(
                f"{location}{name} = {value!r} is not a number", "leave out what the tool does not report (N/A)"
            )


@check("give bytes, watts, degrees, shares of 1 and hertz", each=_samples)
def telemetry_is_plausible(device: Device, sample: Mapping[str, float]) -> Problems:
    for name, value in sample.items():
        low, high = next((limits for prefix, limits in RANGES.items() if name.startswith(prefix)), (-1e30, 1e30))
        if isinstance(value, (int, float)) and not low <= value <= high:
            yield f"flagcore_telemetry of device {device.index}: {name} = {value:g}, not {low:g} to {high:g}"


@check("read it from the same output: trials use the values that the device reports", each=_samples)
def telemetry_has_memory_in_use(device: Device, sample: Mapping[str, float]) -> Problems:
    if "memory_used_bytes" not in sample:
        yield f"flagcore_telemetry of device {device.index} lacks memory_used_bytes"


@check("read the first figure of the cell: memory in use is not the memory of the device")
def telemetry_memory_is_that_in_use(plugin: Subject) -> Problems:
    samples = _samples(plugin)
    full = [device for device, sample in samples if sample.get("memory_used_bytes") == (device.memory_bytes or -1)]
    if full and len(full) == len(samples):
        used = full[0].memory_bytes
        yield f"flagcore_telemetry: memory_used_bytes = {used} of every device, which is all of its memory"


@check("compare names with chip.has_name(device.chip)")
def telemetry_accepts_chip_aliases(plugin: Subject) -> Problems:
    plugin.implements("flagcore_telemetry")
    for chip in plugin.chips:
        if plugin.loaded.telemetry(Device(index=0, chip=chip.name)) is None:
            continue
        for name in sorted({*chip.aliases, chip.name.lower(), f"{chip.vendor} {chip.name}"}):
            if plugin.loaded.telemetry(Device(index=0, chip=name)) is None:
                yield f"flagcore_telemetry accepts {chip.name}, but not its other name {name!r}"


RuleWithCandidates = tuple[PruningRule, Space, Predictions]


def _rules(plugin: Subject) -> list[RuleWithCandidates]:
    """Return each rule with the candidates of its task."""
    plugin.implements("flagcore_pruning_rules")
    return plugin.once("pruning rules", lambda: _rules_with_candidates(plugin))


def _rules_with_candidates(plugin: Subject) -> list[RuleWithCandidates]:
    found: list[RuleWithCandidates] = []
    engine = workload("megatron")
    for task in plugin.tasks():
        if rules := plugin.loaded.pruning_rules(task):
            space = build(engine.axes(task), engine.rules(task), engine.merges(task))
            predictions = predict(task, engine, space, costs_of(task.cluster, plugin.loaded, "megatron"))
            found += [(rule, space, predictions) for rule in rules]
    if not found:
        raise Skip("the plugin has no pruning rules for a small task on 8 of its chips")
    return found


@check("give it a name of letters and underscores, and a sentence for `flag explain`", each=_rules)
def pruning_rules_have_messages(rule: PruningRule, space: Space, predictions: Predictions) -> Problems:
    if not rule.name.isidentifier() or not rule.message.strip():
        yield f"flagcore_pruning_rules: the rule {rule.name!r} has the message {rule.message!r}"


@check(each=_rules)
def pruning_rules_leave_candidates(rule: PruningRule, space: Space, predictions: Predictions) -> Problems:
    pruned_rows = prune(space, predictions, workload("megatron"), (rule,), ())
    if pruned_rows.broken_rules:
        yield Problem(
            f"flagcore_pruning_rules: {'; '.join(map(str, pruned_rows.broken_rules))}",
            "return an array of booleans, one per candidate, computed from the columns of knobs",
        )
    elif not pruned_rows.open_rows.size:
        yield Problem(
            f"flagcore_pruning_rules: {rule.name} leaves no candidate of a small model on 8 devices",
            "prune only candidates that are worse than a remaining one",
        )


@check("compute a new array: columns[...] of a rule are also those of the rules after it", each=_rules)
def pruning_rules_keep_columns(rule: PruningRule, space: Space, predictions: Predictions) -> Problems:
    rows = np.arange(min(len(space), 200))
    columns = {name: column.copy() for name, column in space.columns(rows).items()}
    before = {name: column.copy() for name, column in columns.items()}
    with suppress(Exception):  # another check reports it
        rule.prunes(columns, predictions.take(rows))
    changed = [name for name in before if not np.array_equal(before[name], columns.get(name, ()))]
    if changed:
        yield f"flagcore_pruning_rules: {rule.name} changes the column {changed[0]!r}"


@check("judge each row independently: no mean, no minimum, no sorting", each=_rules)
def pruning_rules_judge_single_candidates(rule: PruningRule, space: Space, predictions: Predictions) -> Problems:
    rows = np.linspace(0, len(space) - 1, min(len(space), 200)).astype(np.int64)
    try:
        together, *pieces = (
            np.asarray(rule.prunes(space.columns(some), predictions.take(some)))
            for some in (rows, rows[:50], rows[50:51], rows[51:])
        )
        is_equal = np.array_equal(together, np.concatenate(pieces))
    except Exception:
        return  # another check reports it
    if not is_equal:
        yield f"flagcore_pruning_rules: {rule.name} depends on the other candidates"


LAUNCH = Launch(
    argv=("echo", "the command"),
    folder="/tmp/trial",
    environment={"KEEP": "me"},
    timeout_seconds=60.0,
    memory_limit_bytes=2**30,
)
START_SECONDS = 30.0
"""Time limit for the start of a trial."""


def _prepared_launches(plugin: Subject) -> Iterator[tuple[Launch]]:
    plugin.implements("flagcore_prepare_launch")
    return ((plugin.loaded.prepare_launch(LAUNCH, task),) for task in plugin.tasks())


@check(each=_prepared_launches)
def prepared_launch_extends_the_launch(prepared: Launch) -> Problems:
    if not " ".join(prepared.argv).endswith("echo the command"):
        yield Problem(
            f"flagcore_prepare_launch turns 'echo the command' into {' '.join(prepared.argv)!r} as argv",
            "put a wrapper before launch.argv and keep the rest",
        )
    extend = "extend it: replace(launch, environment={**launch.environment, ...})"
    if prepared.folder != LAUNCH.folder or prepared.directory != LAUNCH.directory:
        yield Problem("flagcore_prepare_launch changes the folder of the trial", extend)
    if prepared.environment.get("KEEP") != "me":
        yield Problem("flagcore_prepare_launch drops a variable of launch.environment", extend)
    if prepared.timeout_seconds > 60.0 or not 0 < (prepared.memory_limit_bytes or 0) <= 2**30:
        fix = "keep or lower the limits: they are the user's"
        yield Problem("flagcore_prepare_launch raises timeout_seconds or memory_limit_bytes of a trial", fix)


@check("add it with `value`, meaning and source, or correct its name")
def prepared_variables_are_documented(plugin: Subject) -> Problems:
    documented = {each.name for each in plugin.variables}
    for (prepared,) in _prepared_launches(plugin):
        for name in sorted({*prepared.environment} - {*LAUNCH.environment} - documented):
            yield f"flagcore_prepare_launch adds {name}, which is missing in environment.yaml"


@check("a wrapper must exist here, start the command and stay its parent")
def prepared_launch_can_be_stopped(plugin: Subject) -> Problems:
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder, "begun")
        code = f"import time; open({str(marker)!r}, 'w').close(); time.sleep(60)"
        sleeper = Launch(argv=(sys.executable, "-S", "-c", code), folder=folder)
        trial = launcher("local").start(plugin.loaded.prepare_launch(sleeper, next(plugin.tasks())))
        deadline = time.monotonic() + START_SECONDS
        while not marker.exists() and trial.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        was_alive = marker.exists() and trial.poll() is None
        exit_record = trial.stop()
        if not was_alive or exit_record.ended_by != "request":
            yield f"flagcore_prepare_launch: a sleeping trial was ended by {exit_record.ended_by} ({exit_record.code})"
