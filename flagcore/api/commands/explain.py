"""Reports on the combinations of a space, on one candidate with the reasons for its state, and on two candidates."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from flagcore import plugins
from flagcore.api.candidate_parser import values_of
from flagcore.api.commands.estimate import knob_record, plugin_notes
from flagcore.api.inputs import SpecLike, changed_spec, read_spec
from flagcore.api.jobs import expected_seconds, predicted_like, published_job
from flagcore.api.runs import Snapshot, all_trials, load_snapshot, no_best_error
from flagcore.api.subject import Subject, best_of, expected_text
from flagcore.domain.plan import failed_repeats
from flagcore.domain.prediction import Prediction
from flagcore.domain.space import DOES_NOT_FIT, Candidate, ExcludingRule
from flagcore.domain.trial import ESTIMATE, PROBE, Role, Trial, TrialState, is_disturbed
from flagcore.errors import NothingFits, SpecError
from flagcore.i18n import N_, _
from flagcore.report import candidate_report as reports
from flagcore.report.explanation import Explanation, needs_text, used_text
from flagcore.report.formats import NAMES, shown
from flagcore.report.result import TrialResult, stop_reason
from flagcore.report.text import answers_text, candidate_text, knob_of, reason_text, scaled_text, state_name
from flagcore.tuner.feasibility import require_candidate
from flagcore.tuner.problem import lacks_margin, recommended_row, rows_by_time
from flagcore.tuner.search_state import count
from flagcore.tuner.stages.build import PLANNED_SHARE
from flagcore.tuner.stages.predict import predict_columns, with_figures
from flagcore.tuner.stages.prune import needed_share

ILLEGAL, OUTSIDE, REMOVED = N_("illegal"), N_("not in the space"), N_("removed")
RAN, OPEN = N_("ran"), N_("open")
"""States of a candidate. ILLEGAL: a rule of the engine forbids it. OUTSIDE: the spec does not list it. REMOVED: a rule
removed it. RAN: it has a trial. OPEN: it may be tried."""


def state_of(subject: Subject) -> tuple[str, list[str], Sequence[ExcludingRule]]:
    """Return the state of a candidate, the reasons for it, and the rules that caused it."""
    snapshot, predicted = subject.snapshot, subject.predicted
    if predicted is None:
        return ILLEGAL, [*map(_broken_rule, subject.broken), *_values_outside_space(subject)], subject.broken
    if subject.row is None:
        return _state_outside(subject, predicted)
    rules = _pruning_rules(snapshot, subject.row)
    own = (trial for trial in subject.trials if trial.role is not Role.IMPORTED)
    if any(trial.fidelity == snapshot.fidelity != ESTIMATE for trial in own):
        return RAN, [*[_end_of_trial(snapshot, trial) for trial in subject.trials], *_all_runs(subject)], rules
    probes = [_end_of_trial(snapshot, trial) for trial in subject.trials if trial.fidelity != ESTIMATE]
    if rules:
        return REMOVED, [*probes, *(_removal(subject, each) for each in rules)], rules
    return OPEN, [*probes, *_why_open(subject)], []


def _state_outside(subject: Subject, predicted: Prediction) -> tuple[str, list[str], Sequence[ExcludingRule]]:
    """Return the same as `state_of` for a legal candidate that is not in the space."""
    snapshot, outside = subject.snapshot, list(_values_outside_space(subject))
    bounds = (each for each in snapshot.problem.legality.bounds if each.broken(subject.columns).any())
    messages = {each.name: each.message for each in bounds}
    rules = [reports.PruningRule(rule=name, message=message, trial=None) for name, message in messages.items()]
    if rules and not outside:
        return REMOVED, [*map(str, rules), needs_text(predicted)], rules
    not_listed = [_("not in the space: the values in auto_tuner.space cannot be combined to this candidate")]
    pruned_by = snapshot.pruned_by(subject.columns)
    lines = [*(outside or not_listed), _(NAMES["legal"][str(predicted.fits)]), needs_text(predicted)]
    return OUTSIDE, [*lines, *(_("it would be removed: {rule}", rule=each) for each in pruned_by)], []


def _broken_rule(rule: ExcludingRule) -> str:
    values = ", ".join(f"{knob} = {value}" for knob, value in rule.values.items())
    return f"{rule} ({values})" if values else str(rule)


def _values_outside_space(subject: Subject) -> Iterator[str]:
    values = subject.candidate.as_dict()
    for axis in subject.snapshot.problem.space.axes:
        if (value := values[axis.knob]) not in (*axis.values, axis.neutral, *axis.extra_values):
            listed = {"knob": axis.knob, "value": value, "values": values_of(axis)}
            yield _("not in the space: {knob} = {value}; {values}", **listed)


def _end_of_trial(snapshot: Snapshot, trial: Trial) -> str:
    """Return a sentence on how a trial ended: its measurement compared with the best, or the reason for its failure."""
    state, objective = snapshot.search_state, snapshot.task.spec.objective
    measured, shortened_step = trial.measurement, trial.shortened
    kind, role = _("probe") if trial.fidelity == PROBE else _("trial"), "imported" if trial.source else trial.role.value
    line = f"{kind} {trial.number} ({_(role)}) {state_name(trial.state.value)}"
    if measured is None or trial.state.failed:
        return line + (f": {reason_text(trial.reason)}" if trial.reason else "")
    line += f": {reports.seconds_text(objective, measured.step_time_s)}"
    if measured.scaled_from is not None and shortened_step:
        bounds = {"low": shown(measured.low_s), "high": shown(measured.high_s)}
        line += f", {scaled_text(measured.scaled_from, shortened_step)} "
        samples, whole_samples = shortened_step.global_batch_size, shortened_step.whole
        line += _("({part} of {whole} samples; 80%: {low} to {high} s)", part=samples, whole=whole_samples, **bounds)
    if trial.role is Role.IMPORTED:
        return line + ", " + _("on another machine ({source})", source=trial.source)
    line += "".join(f"; {each}" for each in [answers_text(trial, state.baseline)] if each)
    if measured.broken:
        line += "; " + _("over a limit: {limits}", limits=", ".join(measured.broken))
    runs = state.all_runs(trial.candidate)
    if trial.state is TrialState.MEASURED and trial.number in runs.left_out:
        line += "; " + _("not counted: {why}", why=_(runs.left_out[trial.number]))
    elif len(runs.counted) < 2:
        line += _against_best(snapshot, trial.candidate, measured.step_time_s)
    if not (reason := reason_text(trial.reason)):
        return line
    was_stopped = trial.state is TrialState.STOPPED
    return line + "; " + (_("stopped early: {reason}", reason=reason) if was_stopped else reason)


def _against_best(snapshot: Snapshot, candidate: Candidate, seconds: float) -> str:
    """Return how a candidate's time compares with the best, to be appended to a line. Empty if there is no best."""
    state, objective = snapshot.search_state, snapshot.task.spec.objective
    if state.best is None or state.best.candidate == candidate:
        return "; " + _("it is the best") if state.best else ""
    runs, best_s = len(state.runs_of(state.best.candidate)), 1.0 / state.speed_of(state.best.candidate)
    best = f"{_('trial')} {state.best.number}: {reports.seconds_text(objective, best_s)}"
    best += "" if runs == 1 else ", " + _("median of {count} runs", count=runs)
    return ", " + _("{share:+.1%} in time vs the best ({trial})", share=seconds / best_s - 1.0, trial=best)


def _all_runs(subject: Subject) -> Iterator[str]:
    """Yield the median time over the candidate's runs that count, as text. If the best was repeated, also yield whether
    the candidate may be as fast as the best."""
    state, best = subject.snapshot.search_state, subject.snapshot.search_state.best
    if len(subject.runs) > 1 and subject.measured_s:
        seconds = reports.seconds_text(subject.snapshot.task.spec.objective, subject.measured_s)
        line = _("the median of its {count} runs: {value}", count=len(subject.runs), value=seconds)
        yield line + _against_best(subject.snapshot, subject.candidate, subject.measured_s)
    has_repeats = best is not None and len(state.runs_of(best.candidate)) > 1
    if has_repeats and any(trial.candidate == subject.candidate for trial in state.rivals):
        yield _("not significantly slower than the best")


def _pruning_rules(snapshot: Snapshot, row: int) -> list[reports.PruningRule]:
    """Return a list with the rule that pruned `row`, or an empty list if the row was not pruned."""
    code, trial = int(snapshot.pruned.rule[row]), int(snapshot.pruned.trial[row])
    if not code:
        return []
    name = snapshot.pruned.rules[code - 1]
    message = snapshot.problem.messages.get(name, "")
    return [reports.PruningRule(rule=name, message=message, trial=trial if trial >= 0 else None)]


def _removal(subject: Subject, rule: reports.PruningRule) -> str:
    """Return why `rule` removed a candidate: the memory that it needs, or the trial from which the rule was learned."""
    snapshot, state, predictions = subject.snapshot, subject.snapshot.search_state, subject.snapshot.problem.predictions
    if rule.rule == DOES_NOT_FIT:
        assert subject.predicted is not None
        line = f"{DOES_NOT_FIT}: {needs_text(subject.predicted)}"
        least_share = needed_share(snapshot.problem.space, predictions, (*state.trials, *state.probes))
        needed_gib = float(predictions.device_used_bytes[subject.row]) * least_share / 2**30
        return line if least_share == 1.0 else line + "; " + _("after trials at least {gib:.2f} GiB", gib=needed_gib)
    if rule.trial is None:
        return str(rule)
    trial = next(each for each in all_trials(snapshot.run) if each.number == rule.trial)
    differences = reports.differs_text(subject.differing(trial.candidate), snapshot.problem.knobs)
    return f"{rule}: {_('trial')} {trial.number} ({differences}) {state_name(trial.state.value)}"


def _why_open(subject: Subject) -> list[str]:
    order, run = rows_by_time(subject.snapshot.problem), subject.snapshot.run
    places = (np.flatnonzero(order == subject.row) + 1).tolist()
    lines = [_("number {place:,} of {count:,} in `flag estimate`", place=place, count=order.size) for place in places]
    if subject.row is not None and subject.row == recommended_row(subject.snapshot.problem):
        lines.append(_("recommended") if run is None else _("recommended by `flag estimate`"))
        planned_s = float(subject.snapshot.problem.predictions.step_time_s[subject.row])
        lines += filter(None, [expected_seconds(subject.snapshot.problem, planned_s, subject.snapshot.plugins)[1]])
    if places and lacks_margin(subject.snapshot.task, subject.snapshot.problem.predictions)[subject.row]:
        text = N_("plans list it last, because it leaves less than {share:.1%} of the memory free")
        lines.append(_(text, share=1.0 - PLANNED_SHARE))
    if run is None:
        return lines or [_("no rule removed it")]
    if run.stopped_because:
        return [_("untried: the search stopped: {reason}", reason=stop_reason(run.data)), *lines]
    return [_("untried: the run has not ended"), *lines]


def explain(where: SpecLike, *, chip: str | None = None, without: Collection[str] = ()) -> Explanation:
    """Explain how rules and trials reduced the search space of a spec, or of the run in a folder.

    Raises the errors of `flagcore.errors`.
    """
    snapshot = load_snapshot(where, chip, without)
    problem, run, nothing_fits = snapshot.problem, snapshot.run, None
    try:
        require_candidate(problem)
    except NothingFits as error:
        nothing_fits = str(error)
    return Explanation(
        counts=count(problem.space, snapshot.pruned, snapshot.search_state),
        messages=problem.messages,
        ended_because=stop_reason(run.data) if run and run.stopped_because else None,
        nothing_fits=nothing_fits,
        knobs=tuple(knob_record(snapshot.task, knob) for knob in problem.platform.knobs),
        notes=plugin_notes(problem.platform),
        lost_repeats=failed_repeats(run.repeats) if run else {},
        fidelity=snapshot.fidelity,
        causes=_causes_of_best(snapshot),
        no_best=str(no_best_error(run)) if run and not run.best else None,
    )


def _causes_of_best(snapshot: Snapshot) -> str:
    """Return why the best candidate is faster than the baseline, or an empty string if there is no best candidate."""
    best = best_of(snapshot)
    row = None if best is None else snapshot.problem.space.find(best)
    if best is None or row is None or not (text := Subject.of_row(snapshot, row).causes):
        return ""
    return f"{_('Best')}: {candidate_text(best, snapshot.problem.knobs)}. {text}"


def explain_candidate(
    where: SpecLike, candidate: str, *, chip: str | None = None, without: Collection[str] = ()
) -> reports.CandidateReport:
    """Explain one candidate of a spec, or of the run in a folder.

    `candidate` is one of: `best` (of a spec: `recommended`); `baseline`; a number; knobs with values, such as `tp=2,
    pp=4`, which mean the fastest candidate that has them. In a run, the number is of a trial. In a spec, it is the
    position in the list of `estimate`, from 1. Raises the errors of `flagcore.errors`.
    """
    return candidate_report(load_snapshot(where, chip, without), candidate)


def explain_like(
    spec: SpecLike, name: str, *, chip: str | None = None, without: Collection[str] = ()
) -> reports.CandidateReport:
    """Explain the candidate of a spec with the layout of a published run, like `explain_candidate`.

    `name`: words of the run's id or source, or knobs. Of several runs, the nearest to the job is used. Knobs that the
    space does not have are ignored, and the data-parallel size follows from the devices. For a run, `published` is the
    prediction with its own settings, such as its schedule. Raises the errors of `flagcore.errors`.
    """
    if "--" in name:
        return _explain_flags(spec, name, chip, without)
    snapshot = load_snapshot(spec, chip, without)
    if "=" in name:
        return candidate_report(snapshot, name)
    problem, plan_row = snapshot.problem, recommended_row(snapshot.problem)
    title, job = published_job(problem, snapshot.plugins, name)
    layout = problem.engine.plans.in_space(job.candidate, job.model)
    axes = [axis for axis in problem.space.axes if axis.knob != problem.engine.replicas]
    sizes = {axis.knob: axis.neutral for axis in axes if knob_of(axis.knob, problem.knobs).layout}
    known = {axis.knob: layout.get(axis.knob, sizes.get(axis.knob)) for axis in axes}
    values = {knob: value for knob, value in known.items() if value is not None}
    report = candidate_report(snapshot, ", ".join(f"{knob}={value}" for knob, value in values.items()))
    prediction = predicted_like(problem, job)
    if prediction is None or prediction.step_time_s is None or plan_row is None:
        return replace(report, name=title)
    published = with_figures(problem.task, prediction)
    best_s = float(problem.predictions.step_time_s[plan_row])
    figures = {"seconds": prediction.step_time_s, "used": used_text(published, ".4g")}
    text = N_(
        "with the settings of the published run: ~{seconds:.4g} s/step, {gain:+.1%} against the recommended "
        "candidate, ~{used} GiB"
    )
    line = _(text, gain=prediction.step_time_s / best_s - 1.0, **figures)
    line += ", " + _("does not fit") if prediction.fits is False else ""
    return replace(report, name=title, because=(line, *report.because), published=published)


def _explain_flags(spec: SpecLike, flags: str, chip: str | None, without: Collection[str]) -> reports.CandidateReport:
    """Explain the candidate of a spec with the flags of a command. Its other settings apply to the job."""
    parsed_spec = read_spec(spec, chip, without)
    engine = plugins.engine_of(parsed_spec.work)
    name, settings, unused = engine.plans.read_flags(flags, parsed_spec)
    changes = {f"{engine.kind}.settings.{key}": value for key, value in settings.items()}
    report = candidate_report(load_snapshot(changed_spec(spec, changes), chip, without), name)
    lines = [_("with {settings}", settings=", ".join(f"{k}={v}" for k, v in settings.items()))] if settings else []
    lines += [_("not used, as they are part of the job: {flags}", flags=", ".join(unused))] if unused else []
    return replace(report, because=(*lines, *report.because))


def candidate_report(snapshot: Snapshot, name: str) -> reports.CandidateReport:
    """Return the report on the candidate `name`, in a form that `explain_candidate` accepts. Raises UsageError."""
    subject = Subject.of(snapshot, name)
    (state, because, rules), changes, cluster = state_of(subject), subject.changes(), snapshot.task.cluster
    if state in (OPEN, RAN):
        changes.pop("allowed", None)
    is_equivalent = subject.named & subject.differing(subject.requested).keys()
    return reports.CandidateReport(
        name=subject.name,
        where=str(snapshot.where),
        chip=cluster.chips,
        devices=cluster.devices,
        candidate=subject.candidate.as_dict(),
        state=state,
        because=(*because, *_fits_without(subject)),
        rules=tuple(rules),
        predicted=subject.predicted,
        believed=None if state == RAN and not is_disturbed(subject.runs) else subject.believed,
        objective=snapshot.task.spec.objective,
        requested=subject.requested.as_dict() if is_equivalent else None,
        known_s=subject.known_s,
        known_by=expected_text((subject, *(Subject.of_row(snapshot, row) for row in changes.values()))),
        trials=tuple(TrialResult.write(trial) for trial in subject.trials),
        changes={kind: _change(subject, row) for kind, row in changes.items()},
        causes=subject.causes,
        matches=tuple(_change(subject, row) for row in subject.others),
        limits=snapshot.task.spec.work.slo,
        knobs=snapshot.problem.knobs,
    )


def _fits_without(subject: Subject) -> Iterator[str]:
    """Yield each assumed setting without which a candidate that does not fit would fit."""
    platform, predicted = subject.snapshot.problem.platform, subject.predicted
    if predicted is None or predicted.fits is not False:
        return
    for name, value in platform.engine.plans.assumed(platform.task, subject.candidate).items():
        train = platform.task.spec.train
        train = replace(train, assumed={key: each for key, each in train.assumed.items() if key != name})
        task = replace(platform.task, spec=replace(platform.task.spec, work=train))
        with suppress(SpecError):  # without it, another assumed setting may be invalid
            if predict_columns(replace(platform, task=task), subject.columns).fits.all():
                yield _("it would fit without the assumed {setting}", setting=f"{name}={value}")


def _change(subject: Subject, row: int) -> reports.Alternative:
    snapshot, other = subject.snapshot, Subject.of_row(subject.snapshot, row)
    trials = (trial.number for trial in snapshot.search_state.trials if trial.candidate == other.candidate)
    return reports.Alternative(
        candidate=other.candidate.as_dict(),
        differs=subject.differing(other.candidate),
        predicted=with_figures(snapshot.task, snapshot.problem.predictions.row(row)),
        known_s=other.known_s,
        trial=next(trials, None),
        measured=other.comparable_s is not None,
    )
