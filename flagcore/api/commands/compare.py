"""Compares two candidates: their knobs, predictions and measurements, and why they differ."""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

from flagcore.api.commands.explain import RAN, state_of
from flagcore.api.inputs import SpecLike
from flagcore.api.runs import Snapshot, load_snapshot
from flagcore.api.subject import Subject, expected_text
from flagcore.domain.metrics import HIGHEST_LOAD, equal_devices
from flagcore.domain.prediction import Prediction
from flagcore.domain.records import GIB
from flagcore.domain.trial import is_disturbed
from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.report import candidate_report
from flagcore.report.explanation import figure_pairs, memory_parts, shown_latencies
from flagcore.tuner.run_folder import differences
from flagcore.tuner.search_state import are_repeated, noise, significant


def compare(
    a: str, b: str, *, spec: SpecLike | None = None, chip: str | None = None, without: Collection[str] = ()
) -> candidate_report.Comparison:
    """Compare two candidates.

    A candidate is given as `RUN:CANDIDATE`, or as `RUN` for the best candidate of a run. RUN may also be a spec file.
    `b` may be CANDIDATE alone if it is of the same run. If `spec` is given, both are candidates of this spec. CANDIDATE
    has the same form as for `explain_candidate`. `chip` requires a spec. Raises the errors of `flagcore.errors`.
    """
    run_a, name = _split_name(a) if spec is None else (spec, a)
    run_b, other = _split_name(b, run_a) if spec is None else (spec, b)
    snapshot = load_snapshot(run_a, chip, without)
    other_snapshot = snapshot if run_a == run_b else load_snapshot(run_b, chip, without)
    return compare_subjects(Subject.of(snapshot, name), Subject.of(other_snapshot, other))


def _split_name(text: str, default: SpecLike | None = None) -> tuple[SpecLike, str]:
    """Return the run or spec that `text` names, or else `default`, and the name of the candidate."""
    run, colon, name = text.rpartition(":")
    if not os.path.exists(text) and colon and os.path.exists(run):
        return Path(run), name
    if os.path.exists(text):
        return Path(text), "best"
    if default is not None and not colon and os.sep not in text:
        return default, text
    raise UsageError(_("{text} is not a run: give RUN or RUN:CANDIDATE, or --spec SPEC and two candidates", text=text))


def compare_subjects(a: Subject, b: Subject) -> candidate_report.Comparison:
    """Return the comparison of two candidates. Raises UsageError if one is a training job and the other a server."""
    specs = [side.snapshot.task.spec for side in (a, b)]
    if specs[0].work.kind != specs[1].work.kind:
        places = {"a": a.snapshot.where, "b": b.snapshot.where}
        raise UsageError(_("{a} and {b} cannot be compared: one is a training job, the other a server", **places))
    seconds, certainty = _times(a, b)
    loads = _loads(a, b)
    predicted = [each.at_load(min(loads)) if loads else each.predicted for each in (a, b)]

    def pairs(figures: Callable[[Prediction], Mapping[str, float]]) -> dict[str, tuple[float, float]]:
        first, second = predicted
        return figure_pairs(figures(first), figures(second)) if first and second else {}

    sides = _side(a), _side(b)
    return candidate_report.Comparison(
        a=sides[0],
        b=sides[1],
        objective=specs[0].objective,
        loads=loads,
        differs=a.differing(b.candidate),
        tasks=_task_differences(a.snapshot, b.snapshot),
        time=pairs(lambda found: found.parts_s),
        memory=pairs(lambda found: {name: size / GIB for name, size in memory_parts(found).items()}),
        figures=pairs(partial(shown_latencies, limits=[*specs[0].work.slo, *specs[1].work.slo])),
        gap=None if seconds is None else _relative(a, b, *seconds),
        certainty=certainty,
        because=tuple(_reasons(a, b, sides, seconds, certainty)),
        knobs={**b.snapshot.problem.knobs, **a.snapshot.problem.knobs},
    )


def _side(subject: Subject) -> candidate_report.Side:
    """Return the state, the predictions and the measurements of one compared candidate."""
    state, because, _rules = state_of(subject)
    cluster = subject.snapshot.task.cluster
    return candidate_report.Side(
        name=subject.name,
        where=str(subject.snapshot.where),
        candidate=subject.candidate.as_dict(),
        chip=cluster.chips,
        devices=cluster.devices,
        state=state,
        because=tuple(because),
        predicted=subject.predicted,
        believed=None if state == RAN and not is_disturbed(subject.runs) else subject.believed,
        measured=_measured(subject),
    )


def _measured(side: Subject) -> candidate_report.MeasuredRuns | None:
    """Return the medians over a candidate's measured runs, or None if there are none."""
    figures = [run.measurement for run in side.runs if run.measurement]
    if not figures:
        return None
    steps_s = [each.step_time_s for each in figures]
    used = max(each.device_used_bytes or each.peak_reserved_bytes or 0 for each in figures)
    return candidate_report.MeasuredRuns(
        step_time_s=side.measured_s,
        spread_s=median(each.spread_s for each in figures),
        between_s=max(steps_s) - min(steps_s) if len(figures) > 1 else None,
        runs=len(figures),
        noise=noise(side.runs),
        fidelity=side.runs[0].fidelity,
        device_used_gib=used / 2**30 if used else None,
    )


def _unit(side: Subject) -> float:
    """Return the tokens per device and step, or 1 for a server. To compare tasks, step times are divided by them."""
    tokens = side.snapshot.task.spec.work.step_tokens
    return tokens / side.snapshot.task.cluster.devices if tokens else 1.0


def _relative(a: Subject, b: Subject, a_s: float, b_s: float) -> float:
    """Return how much longer `b` takes than `a` on equal devices, such as 0.1 for 10%. Training: per token."""
    figures = [each.predicted.figures if each.predicted else {} for each in (b, a)]
    return b_s / _unit(b) / (a_s / _unit(a)) * equal_devices(a.snapshot.task.spec.objective, *figures) - 1.0


def _loads(a: Subject, b: Subject) -> tuple[float, float] | None:
    """Return the highest loads of both candidates, as measured or else as predicted, if they differ."""
    found = list[float]()
    for each in (a, b):
        measured = [run.measurement.figures.get(HIGHEST_LOAD, 0.0) for run in each.runs if run.measurement]
        predicted = each.predicted.figures.get(HIGHEST_LOAD, 0.0) if each.predicted else 0.0
        found.append(max(measured, default=0.0) or predicted)
    return (found[0], found[1]) if all(found) and found[0] != found[1] else None


def _times(a: Subject, b: Subject) -> tuple[tuple[float, float] | None, str]:
    """Return both step times in seconds, or None if one is unknown, and the certainty of the difference."""
    if a.snapshot.task.spec.objective != b.snapshot.task.spec.objective and _unit(a) == _unit(b) == 1.0:
        return None, candidate_report.UNKNOWN
    if a.measured_s and b.measured_s:
        gap = _relative(a, b, a.measured_s, b.measured_s)
        longer = max(gap, 1.0 / (1.0 + gap) - 1.0)
        units = _unit(a), b.measured_s * _unit(a) / a.measured_s / (1.0 + gap)  # in which both have the ratio `gap`
        steps = (
            [run.measurement.step_time_s / unit for run in side.runs if run.measurement]
            for side, unit in zip((a, b), units, strict=True)
        )
        is_clear = significant(longer, a.runs, b.runs) and are_repeated(a.runs, b.runs) and not overlap(*steps)
        return (
            a.measured_s,
            b.measured_s,
        ), candidate_report.SIGNIFICANT if is_clear else candidate_report.NOT_SIGNIFICANT
    has_trials = a.snapshot.has_trials and b.snapshot.has_trials
    if has_trials and a.known_s and b.known_s:
        return (a.known_s, b.known_s), candidate_report.CORRECTED
    if a.predicted_s and b.predicted_s:
        return (a.predicted_s, b.predicted_s), candidate_report.PREDICTED
    return None, candidate_report.UNKNOWN


def overlap(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether the ranges of two candidates' step times overlap, given the step times of the runs of each."""
    return max(first) >= min(second) and max(second) >= min(first)


def _task_differences(a: Snapshot, b: Snapshot) -> tuple[str, ...]:
    """Return the differences between two tasks as `key: a -> b`, without the differences between the candidates."""
    if a is b:
        return ()
    tasks: list[object] = []
    for task in (a.task, b.task):
        spec, cluster = task.spec, task.cluster
        parts = json.loads(json.dumps({"model": asdict(spec.model), spec.work.kind: asdict(spec.work)}, default=str))
        tasks.append({"chip": cluster.chips, "devices": cluster.devices, "objective": spec.objective, **parts})
    found = list(differences(tasks[0], tasks[1]))
    further = len(found) - MAX_DIFFERENCES
    return (*found[:MAX_DIFFERENCES], *([_("and {count} more", count=further)] if further > 0 else []))


def _reasons(
    a: Subject, b: Subject, sides: Sequence[candidate_report.Side], seconds: tuple[float, float] | None, certainty: str
) -> list[str]:
    """Return why a candidate is illegal, or where `b` spends more or less time than `a`.

    The parts of steps with different numbers of tokens are not compared.
    """
    if illegal := [(name, each.because[0]) for name, each in zip("AB", sides, strict=True) if not each.predicted]:
        return [_("{name} is illegal: {reason}", name=name, reason=reason) for name, reason in illegal]
    if seconds is None:
        return [_("at least one time is unknown")]
    sources = {candidate_report.PREDICTED: _("predicted"), candidate_report.CORRECTED: expected_text((a, b))}
    causes = b.causes_against(a, "A", seconds, sources.get(certainty, _("measured")))
    return [causes] if _unit(a) == _unit(b) else []


MAX_DIFFERENCES = 12
