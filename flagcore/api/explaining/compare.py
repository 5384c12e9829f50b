"""Comparison of two candidates: knobs, predicted and measured figures, and the reasons of the gap."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flagcore.api.explaining.candidate_report import candidate_report
from flagcore.api.explaining.neighbors import differing
from flagcore.api.inputs import SpecLike
from flagcore.api.snapshot import Snapshot, load_snapshot
from flagcore.domain.candidate import Candidate
from flagcore.domain.objective import SERVING
from flagcore.domain.search_state import noise, significant
from flagcore.domain.serving import LATENCIES, ServeSpec
from flagcore.domain.trial import Trial
from flagcore.errors import UsageError
from flagcore.i18n import N_, _
from flagcore.report.candidate_report import (
    CORRECTED,
    NOT_SIGNIFICANT,
    PREDICTED,
    SIGNIFICANT,
    UNKNOWN,
    CandidateReport,
    Comparison,
    figure_pairs,
    largest_differences,
    parts_text,
)
from flagcore.report.explanation import memory_parts
from flagcore.report.formats import lookup
from flagcore.tuner.store.directory import differences

MAX_DIFFERENCES = 12


@dataclass(frozen=True, slots=True)
class _Side:
    snapshot: Snapshot
    report: CandidateReport

    @property
    def runs(self) -> tuple[Trial, ...]:
        return self.snapshot.search_state.runs_of(Candidate.of(self.report.candidate))

    @property
    def unit(self) -> float:
        """The tokens per device of a step, by which step times of two tasks are divided; 1 for a server."""
        spec = self.snapshot.task.spec
        if isinstance(spec.work, ServeSpec):
            return 1.0
        return spec.train.global_batch_size * spec.train.seq_length / self.snapshot.task.cluster.devices

    @property
    def steps_s(self) -> list[float]:
        """The seconds of a step of each run."""
        return [run.measurement.step_time_s for run in self.runs if run.measurement]

    @property
    def measured_s(self) -> float | None:
        speed = self.snapshot.search_state.speed_of(Candidate.of(self.report.candidate))
        return 1.0 / speed if speed else None

    @property
    def predicted_s(self) -> float | None:
        step = lookup(self.report.predicted or {}, "step_time_s.value")
        return step if isinstance(step, float) else None

    def data(self) -> dict[str, Any]:
        shown_fields = ("name", "where", "candidate", "chip", "devices", "state", "because", "predicted", "believed")
        return {name: getattr(self.report, name) for name in shown_fields} | {"measured": self._measured()}

    def _measured(self) -> dict[str, Any] | None:
        figures = [run.measurement for run in self.runs if run.measurement]
        if not figures:
            return None
        used = max(each.device_used_bytes or each.peak_reserved_bytes or 0 for each in figures)
        return {
            "step_time_s": self.measured_s,
            "spread_s": median(each.spread_s for each in figures),
            "between_s": max(self.steps_s) - min(self.steps_s) if len(figures) > 1 else None,
            "runs": len(figures),
            "noise": noise(self.runs),
            "fidelity": self.runs[0].fidelity,
            **({"device_used_gib": used / 2**30} if used else {}),
        }


def compare(
    a: str, b: str, *, spec: SpecLike | None = None, chip: str | None = None, without: Collection[str] = ()
) -> Comparison:
    """Compare two candidates.

    A candidate is `RUN:CANDIDATE`, or `RUN` for its best; RUN may also be a spec file. `b` may be CANDIDATE alone, for
    the same run. With `spec` both are candidates of that file. CANDIDATE is as in `explain_candidate`; `chip` requires
    a spec. Raises the errors of `flagcore.errors`.
    """
    run_a, name = _split_name(a) if spec is None else (spec, a)
    run_b, other = _split_name(b, run_a) if spec is None else (spec, b)
    snapshot = load_snapshot(run_a, chip, without)
    other_snapshot = snapshot if run_a == run_b else load_snapshot(run_b, chip, without)
    first = _Side(snapshot, candidate_report(snapshot, name))
    b_side = _Side(other_snapshot, candidate_report(other_snapshot, other))
    return _compare_sides(first, b_side)


def _split_name(text: str, of: SpecLike | None = None) -> tuple[SpecLike, str]:
    """Return the run or spec of a candidate, by default `of`, and the name of the candidate."""
    run, colon, name = text.rpartition(":")
    if not Path(text).exists() and colon and Path(run).exists():
        return Path(run), name
    if Path(text).exists():
        return Path(text), "best"
    if of is not None and not colon and os.sep not in text:
        return of, text
    raise UsageError(_("{text} is not a run: give RUN or RUN:CANDIDATE, or --spec SPEC and two candidates", text=text))


def _compare_sides(a: _Side, b: _Side) -> Comparison:
    specs = [side.snapshot.task.spec for side in (a, b)]
    if isinstance(specs[0].work, ServeSpec) != isinstance(specs[1].work, ServeSpec):
        places = {"a": a.snapshot.where, "b": b.snapshot.where}
        raise UsageError(_("{a} and {b} cannot be compared: one is a training job, the other a server", **places))
    gap, certainty = _gap(a, b)
    both_predicted = a.report.predicted and b.report.predicted
    predictions = [(side.report.predicted if both_predicted else None) or {} for side in (a, b)]
    time = figure_pairs(*(each.get("time", {}) for each in predictions))
    memory = figure_pairs(*(memory_parts(each["memory"]) if each else {} for each in predictions))
    figures = [{f"{name}.p50": lookup(each, f"{name}.p50") for name in LATENCIES} for each in predictions]
    return Comparison(
        a=a.data(),
        b=b.data(),
        objective=specs[0].objective,
        differs=differing(a.report.candidate, b.report.candidate),
        tasks=_task_differences(a.snapshot, b.snapshot),
        time=time,
        memory=memory,
        figures=figure_pairs(*figures),
        gap=gap,
        certainty=certainty,
        because=tuple(_reasons(a, b, time, gap, certainty)),
        knobs={**b.snapshot.problem.knobs, **a.snapshot.problem.knobs},
    )


def _gap(a: _Side, b: _Side) -> tuple[float | None, str]:
    """Return the time of `b` over the time of `a`, minus one, and its certainty."""
    if a.snapshot.task.spec.objective != b.snapshot.task.spec.objective and a.unit == b.unit == 1.0:
        return None, UNKNOWN
    if a.measured_s and b.measured_s:
        gap = b.measured_s / b.unit / (a.measured_s / a.unit) - 1.0
        longer = max(gap, 1.0 / (1.0 + gap) - 1.0)
        return gap, SIGNIFICANT if significant(longer, a.runs, b.runs) and not _overlap(a, b) else NOT_SIGNIFICANT
    has_trials = all(side.snapshot.search_state.trials or side.snapshot.search_state.probes for side in (a, b))
    if has_trials and a.report.expected_s and b.report.expected_s:
        return b.report.expected_s / b.unit / (a.report.expected_s / a.unit) - 1.0, CORRECTED
    if a.predicted_s and b.predicted_s:
        return b.predicted_s / b.unit / (a.predicted_s / a.unit) - 1.0, PREDICTED
    return None, UNKNOWN


def _overlap(a: _Side, b: _Side) -> bool:
    """Return whether a run of the slower candidate was as fast as a run of the faster candidate."""
    first, second = ([step / side.unit for step in side.steps_s] for side in (a, b))
    return max(first) >= min(second) and max(second) >= min(first)


def _task_differences(a: Snapshot, b: Snapshot) -> tuple[str, ...]:
    """Return the differences of two tasks, without the candidates, as `key: a -> b`."""
    if a is b:
        return ()
    tasks: list[object] = []
    for task in (a.task, b.task):
        spec, cluster = task.spec, task.cluster
        place = {"chip": cluster.chips, "devices": cluster.devices, "objective": spec.objective}
        tasks.append(place | {"model": _side_data(spec.model), "work": _side_data(spec.work)})
    all_differences = list(differences(tasks[0], tasks[1]))
    remainder = (
        [_("and {count} more", count=len(all_differences) - MAX_DIFFERENCES)]
        if len(all_differences) > MAX_DIFFERENCES
        else []
    )
    return (*all_differences[:MAX_DIFFERENCES], *remainder)


def _side_data(record: Any) -> Any:
    return json.loads(json.dumps(asdict(record), default=str))


def _reasons(
    a: _Side, b: _Side, time: Mapping[str, tuple[float, float]], gap: float | None, certainty: str
) -> list[str]:
    illegal = [
        _("{name} is illegal: {reason}", name=name, reason=side.report.because[0])
        for name, side in (("A", a), ("B", b))
        if not side.report.predicted
    ]
    if illegal or gap is None:
        return illegal
    first, second = a.predicted_s, b.predicted_s
    if not first or not second:
        return [_("at least one time is unknown")]
    expected_gap = second / b.unit / (first / a.unit) - 1.0
    lines = []
    if certainty != PREDICTED:
        source = _("expected after trials") if certainty == CORRECTED else _("measured")
        text = _(
            "{source} {gap:+.1%} in time, predicted {expected:+.1%}", source=source, gap=gap, expected=expected_gap
        )
        lines.append(text)
    if certainty in (SIGNIFICANT, CORRECTED) and gap * expected_gap < 0:
        return [*lines, _("the prediction has the opposite sign, so its parts do not explain the gap")]
    pairs = {name: (x, y / b.unit * a.unit) for name, (x, y) in time.items()}
    if shares := largest_differences(pairs):
        total = sum(y - x for x, y in pairs.values())
        time_name = _("time of a request") if a.snapshot.task.spec.objective in SERVING else _("step")
        text = N_("predicted: {total:+.3g} s ({whose}), mostly {parts}")
        lines.append(_(text, total=total, whose=time_name, parts=parts_text(shares)))
    return lines
