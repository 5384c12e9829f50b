"""Predicts job records in groups that share a task.

It also reads measurements of earlier runs in this format, and published runs that resemble a training job, with their
measured and predicted speeds.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from flagcore import plugins
from flagcore.api.inputs import loaded_plugins
from flagcore.contracts import Costs, Engine, Platform, Problem, probes_of
from flagcore.domain.chip import Chip, unknown_chip_hint, with_network
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.engine import TaskAdvice
from flagcore.domain.features import Observations, PastMeasurements, features
from flagcore.domain.knob import Knob
from flagcore.domain.prediction import Prediction, Predictions, components_of_row
from flagcore.domain.records import GIB, prediction_record, rank_record
from flagcore.domain.space import Columns, KnobValue, Rule
from flagcore.domain.spec import ClusterSpec, JobRecord, Spec, Task
from flagcore.errors import FlagError, NotModelled, SpecError, UsageError
from flagcore.i18n import N_, _
from flagcore.plugins import LoadedPlugins
from flagcore.report.estimate import SHOWN_RUNS, PublishedRun
from flagcore.tuner.experience import Experience
from flagcore.tuner.feasibility import no_time
from flagcore.tuner.problem import candidate_columns, nearest_runs
from flagcore.tuner.stages.build import canonical, legality
from flagcore.tuner.stages.complete import unmodelled
from flagcore.tuner.stages.predict import predict_columns, predict_components, predict_stage_layers, with_figures

AT_ONCE = 1024

OFF = (None, False, 0, 1)
"""The values of knobs that messages leave out."""

Answer = dict[str, Any]
Line = Mapping[str, Any] | SpecError
"""A job record, or the error of a line that has none."""


def estimate_jobs(lines: Iterable[Line], *, without: Collection[str] = (), at_once: int = AT_ONCE) -> Iterator[Answer]:
    """Yield the prediction of each job record, in order. An invalid record or line yields a status and a reason.

    Records are predicted in batches of `at_once` lines.
    """
    with loaded_plugins(without) as loaded:
        jobs, remaining_lines, seen_ids, invalid = _Jobs(loaded), iter(lines), set[str](), 0
        while batch := list(islice(remaining_lines, at_once)):
            for line, answer in zip(batch, jobs.answers(batch), strict=True):
                given = line.get("id") if isinstance(line, Mapping) else None
                name = given.encode("utf-8", errors="replace").decode() if isinstance(given, str) else None
                if name in seen_ids:
                    duplicate_warning = f"an earlier record has the id {name}"
                    answer = {**answer, "warnings": [*answer.get("warnings", ()), duplicate_warning]}
                seen_ids |= {name} if name is not None else set()
                yield {"id": name, **answer}
                if (invalid := invalid + 1 if answer["status"] == "invalid" else 0) >= AT_ONCE:
                    raise UsageError(_("{count} records in a row are invalid; correct them", count=invalid))


def predict_records(records: Sequence[Mapping[str, Any]], loaded: LoadedPlugins) -> list[Answer]:
    """Return the prediction of each job record, without details. An invalid record has a status and a reason."""
    return _Jobs(loaded, details=False).answers(records)


def _rejection(error: FlagError) -> Answer:
    if isinstance(error, SpecError):
        return {"status": "invalid", "reason": "; ".join(map(str, error.problems))}
    return {"status": "unknown", "reason": str(error)}


class _Row(NamedTuple):
    """One valid job. `noted` are the settings that the notes in its source mention."""

    place: int
    values: Mapping[str, KnobValue]
    columns: Columns
    warnings: tuple[str, ...]
    noted: frozenset[str]
    rank: int | None


class _Jobs:
    """Predicts job records. Plugins are asked for their facts only once per cluster."""

    def __init__(self, loaded: LoadedPlugins, *, details: bool = True) -> None:
        self._loaded, self._engines, self._details = loaded, plugins.engines(), details
        self._hardware: dict[Hashable, tuple[NodeGroup, Costs]] = {}
        self._advice: dict[Hashable, TaskAdvice] = {}

    def answers(self, lines: Sequence[Line]) -> list[Answer]:
        """Return one answer per line: a status, and the predicted metrics or the reason for an error."""
        from flagcore.spec.jobs import read_job  # takes long to import, and only job files need it

        answers: dict[int, Answer] = {}
        groups: dict[Hashable, tuple[Platform, list[_Row]]] = {}
        for place, line in enumerate(lines):
            try:
                if isinstance(line, SpecError):
                    raise line
                self._group_jobs(place, read_job(line, self._engines), groups)
            except FlagError as error:
                answers[place] = _rejection(error)
        for platform, rows in groups.values():
            try:
                answers |= _predicted(platform, rows, details=self._details)
            except FlagError as error:
                answers |= {row.place: _rejection(error) for row in rows}
        return [answers[place] for place in range(len(lines))]

    def _group_jobs(self, place: int, job: JobRecord, groups: dict[Hashable, tuple[Platform, list[_Row]]]) -> None:
        """Add a job to the group with the same task. Raises FlagError if the job is invalid."""
        chip = self._loaded.find_chip(job.chip)
        if chip is None:
            hint = unknown_chip_hint(job.chip, self._loaded.chips())
            raise NotModelled(_("no installed plugin lists the chip {chip!r}; {hint}", chip=job.chip, hint=hint))
        devices = min(job.devices_per_node, job.devices)
        if job.devices % devices:
            problem = f"is not a multiple of cluster.devices_per_node = {job.devices_per_node}"
            fix = f"use {job.devices - job.devices % devices} or {job.devices + devices - job.devices % devices}"
            raise SpecError(key="cluster.devices", value=job.devices, problem=problem, fix=fix)
        nodes, software = job.devices // devices, (job.work.engine, job.work.engine_version)
        cluster = (chip.name, nodes, devices, job.nic_bytes_per_second, job.cpus_per_node, *software)
        if cluster not in self._hardware:
            chip = with_network(chip, job.nic_bytes_per_second)
            group = NodeGroup(chip=chip, nodes=nodes, devices_per_node=devices, cpus_per_node=job.cpus_per_node)
            self._hardware[cluster] = group, self._loaded.costs(Cluster(groups=(group,)), *software)
        (group, group_costs), engine = self._hardware[cluster], self._engines[job.work.engine]
        if job.rank is not None and engine.probes is None:
            raise SpecError(
                key="rank", value=job.rank, problem=f"is not predicted by {engine.name}", fix="leave it out"
            )
        cluster_spec, objective = ClusterSpec(chip=chip.name), job.work.default_objective
        spec = Spec(model=job.model, cluster=cluster_spec, work=job.work, objective=objective)
        plan_task = Task(spec=spec, cluster=Cluster(groups=(group,)))
        if cluster not in self._advice:
            self._advice[cluster] = self._loaded.check_task(plan_task)
        found = engine.published(plan_task, job.candidate, job.notes)
        advice = self._advice[cluster]
        not_predicted = unmodelled(plan_task, engine, self._loaded, advice)
        (task, values, noted), warnings = found[:3], (*found.warnings, *map(str, not_predicted))
        row = _Row(place, values, engine.columns(task, values), warnings, noted, job.rank)
        key = cluster, job.model, repr((task.spec.work, task.spec.space))
        platform = Platform(
            task=task, engine=engine, costs=group_costs, value_rules=advice.rules, unmodelled=not_predicted
        )
        groups.setdefault(key, (platform, []))[1].append(row)


def _predicted(platform: Platform, rows: Sequence[_Row], *, details: bool) -> dict[int, Answer]:
    """Predict jobs with the same task. The keys of the result are the numbers of their lines."""
    task, engine = platform.task, platform.engine
    columns = {knob: np.concatenate([row.columns[knob] for row in rows]) for knob in rows[0].columns}
    broken: list[list[Rule]] = [[] for _ in rows]
    for rule in legality(platform).rules:
        for number in np.flatnonzero(rule.broken(columns)).tolist():
            if rule.name not in rows[number].noted:
                broken[number].append(rule)
    answers: dict[int, Answer] = {
        row.place: {"status": "invalid", "reason": _illegal_reason(rules, row.values, columns, number)}
        for number, (row, rules) in enumerate(zip(rows, broken, strict=True))
        if rules
    }
    legal = [number for number, rules in enumerate(broken) if not rules]
    if not legal:
        return answers
    columns = canonical(_take(columns, legal), engine.merges(task))
    for number, found in enumerate(detailed_predictions(platform, columns, details=details)):
        row = rows[legal[number]]
        warnings = {"warnings": list(row.warnings)} if row.warnings else {}
        answers[row.place] = {"status": "ok", **warnings, **prediction_record(found)}
        if row.rank is not None:
            rank = probes_of(engine).predict(task, _take(columns, [number]), row.rank, platform.costs)
            answers[row.place]["rank"] = rank_record(rank)
    return answers


def _take(columns: Columns, rows: list[int]) -> Columns:
    return {knob: values[rows] for knob, values in columns.items()}


def _illegal_reason(rules: Sequence[Rule], values: Mapping[str, KnobValue], columns: Columns, row: int) -> str:
    """Return the messages of the rules that a row breaks, with the values of their knobs that are not off or 1."""
    knob_values: dict[str, KnobValue] = {}
    for knob in (each for rule in rules for each in (*rule.knobs, *(knob for knob in values if knob in rule.message))):
        value, is_column = values.get(knob), knob in columns
        knob_values[knob] = int(columns[knob][row]) if is_column and not isinstance(value, (str, bool)) else value
    known = {knob: value for knob, value in knob_values.items() if value is True or value not in OFF}
    values_text = ", ".join(f"{knob} = {value}" for knob, value in known.items())
    return "; ".join(rule.message for rule in rules) + (f" (here {values_text})" if values_text else "")


MAX_PAST = 300
"""Maximum number of earlier measurements. Chosen to limit the run time of the model, which is cubic in this number."""
MAX_LOG_RATIO = 3.0
"""A record is skipped if the logarithm of measured over predicted exceeds this (a factor of 20). Chosen by hand: such a
factor is not a model error."""


def past_of_problem(problem: Problem, loaded: LoadedPlugins, run: str) -> PastMeasurements:
    """Return the measurements of earlier runs, except `run`, on the chip of a problem.

    The result is empty if the spec disables them.
    """
    spec, chip = problem.task.spec, problem.task.cluster.groups[0].chip
    if not spec.control.use_experience:
        return PastMeasurements.empty()
    records = Experience.of_user().records(chip, spec.work.engine, exclude_run=run)
    return past(records, chip, loaded, problem.engine, spec.objective, problem.platform.knobs)


def past(
    records: Iterable[Mapping[str, Any]],
    chip: Chip,
    loaded: LoadedPlugins,
    engine: Engine,
    objective: str,
    knobs: Sequence[Knob] = (),
) -> PastMeasurements:
    """Return observations from the measured records of `chip`.

    Records that cannot be read or predicted, and records of servers with another `objective`, are skipped. `knobs` are
    the plugins' knobs that a record may contain.
    """
    from flagcore.spec.jobs import read_job

    tasks: dict[str, list[tuple[Task, Mapping[str, Any], Mapping[str, Any]]]] = defaultdict(list)
    installed = plugins.engines()
    for job_record in islice(records, MAX_PAST):
        with suppress(FlagError, KeyError, TypeError, ValueError):
            kind = job_record["kind"]
            if not installed.kinds[kind].has_steps and job_record["measured"]["objective"] != objective:
                continue
            engine_values = dict(job_record["candidate"])
            own_knobs = tuple(knob for knob in knobs if knob.name in engine_values)
            plugin_values = {knob.name: engine_values.pop(knob.name) for knob in own_knobs}
            for knob in own_knobs:
                knob.parse(plugin_values[knob.name], knob.name)
            job = read_job({**job_record, "candidate": engine_values}, installed)
            nodes = job.devices // job.devices_per_node
            group = NodeGroup(chip=chip, nodes=nodes, devices_per_node=job.devices_per_node)
            spec = Spec(model=job.model, cluster=ClusterSpec(chip=chip.name), work=job.work, objective=objective)
            task = Task(spec=spec, cluster=Cluster(groups=(group,)), knobs=own_knobs)
            key = repr((job.model, job.work, group, sorted(plugin_values)))
            tasks[key].append((task, {**job.candidate, **plugin_values}, job_record["measured"]))
    past_points = []
    for number, members in enumerate(tasks.values(), start=1):
        with suppress(FlagError, TypeError, ValueError, ArithmeticError):
            past_points.append(_observations(number, members, loaded, engine))
    return PastMeasurements(
        time=Observations.join([time for time, _ in past_points]),
        memory=Observations.join([memory for _, memory in past_points]),
    )


def _observations(
    number: int, members: list[tuple[Task, Mapping[str, Any], Mapping[str, Any]]], loaded: LoadedPlugins, engine: Engine
) -> tuple[Observations, Observations]:
    """Return the observed step times and memory of the records `members`, which are runs of task `number`."""
    from flagcore.tuner.learning import MEMORY_NOISE, MIN_NOISE  # what plans without records need not import

    task = members[0][0]
    platform = Platform(task=task, engine=engine, costs=loaded.costs(task.cluster, task.spec.work.engine))
    legal = legality(platform)
    encoded = [candidate_columns(platform, candidate) for _, candidate, _ in members]
    columns = {knob: np.concatenate([one_row[knob] for one_row in encoded]) for knob in encoded[0]}
    columns = canonical(columns, legal.merges)
    predictions = predict_columns(platform, columns)
    sizes = engine.sizes(task.for_engine(), columns)
    known_features = features(legal.axes, columns, predictions, sizes)
    figures = (("step_time_s", predictions.step_time_s, 1.0), ("device_used_gib", predictions.device_used_bytes, GIB))
    pairs = []
    for name, expected, unit in figures:
        measured_values = np.array([float(each.get(name) or math.nan) * unit for _, _, each in members])
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.log(measured_values) - np.log(expected)
        rows = np.flatnonzero(np.abs(ratio) < MAX_LOG_RATIO)
        noise, numbers = np.full(rows.size, MIN_NOISE if unit == 1.0 else MEMORY_NOISE), np.full(rows.size, number)
        pairs.append(Observations(known_features.take(rows), ratio[rows], noise, numbers))
    return pairs[0], pairs[1]


def detailed_predictions(
    platform: Platform, columns: Columns, predictions: Predictions | None = None, *, details: bool = True
) -> list[Prediction]:
    """Return the prediction of each row, with `details` with the layers of each stage, and with the memory of the model
    components on the stage that needs the most, which take as long again.

    `predictions`: those of the rows, if they are known. If a row has no predicted time, its prediction contains the
    reason.
    """
    predictions = predictions or predict_columns(platform, columns)
    components = predict_components(platform, columns, predictions.worst_stage) if details else {}
    layers = predict_stage_layers(platform, columns) if details else {}
    found = []
    for row in range(len(predictions.step_time_s)):
        figures = replace(predictions.row(row), components=components_of_row(components, row))
        if figures.step_time_s is None:
            figures = replace(figures, reason=f"no time: {no_time(platform.task, platform.costs)}")
        found.append(with_figures(platform.task, figures, layers.get(row, ())))
    return found


NEAREST = 8
"""How many of the nearest runs a plan is compared with. Each prediction of a run takes about 50 ms."""


CHOSEN = {False: (1.08, 0.90, 1.27), True: (1.17, 0.82, 1.56)}
"""Measured over planned seconds of the fastest published runs of 89 dense jobs, and of 55 with experts (True): the
geometric mean (of 38 dense jobs that no fit has used), and an interval that contains 80%. `benchmarks/chosen.py`
measures those of the table, `benchmarks/LOG.md` has all."""


def expected_seconds(
    problem: Problem, planned_s: float, loaded: LoadedPlugins
) -> tuple[tuple[float, float, float] | None, str]:
    """Return the seconds that a step of the plan is expected to take with an 80% interval, and why they differ from the
    predicted `planned_s`, as text.

    None if no run of this engine and such a model (dense, or with experts) is published, and with unmodelled settings.
    """
    spec = problem.task.spec
    has_experts = spec.model.experts > 0

    def is_like(job: JobRecord) -> bool:
        is_same_engine = job.work.engine == spec.work.engine
        return job.work.is_plain_training and is_same_engine and (job.model.experts > 0) == has_experts

    here = any(is_like(job) for job, _ in problem.published)
    known = all(each.time == (1.0, 1.0) for each in problem.platform.unmodelled) and spec.work.is_plain_training
    known = known and (here or any(is_like(job) for job, _ in nearest_runs(problem.task, loaded, others=True)))
    if not known or not math.isfinite(planned_s):
        return None, ""
    factor, mean, low, high = (CHOSEN[has_experts][0], *(each * planned_s for each in CHOSEN[has_experts]))
    text = N_("Expected: ~{mean} s/step (80% of plans: {low} to {high}), {ratio}x the predicted ~{planned}, as {runs}.")
    runs = _("published runs took") if here else _("published runs on other chips took")
    figures = {"mean": f"{mean:.4g}", "low": f"{low:.4g}", "high": f"{high:.4g}", "planned": f"{planned_s:.4g}"}
    return (mean, low, high), _(text, ratio=f"{factor:.2f}", runs=runs, **figures)


class PublishedRuns(Sequence[PublishedRun]):
    """The published training runs on the task's kinds of chips, at most `limit` of them, the nearest first.

    Those that a table shows, and the others, are predicted once one of them is read.
    """

    def __init__(self, problem: Problem, loaded: LoadedPlugins, limit: int | None = NEAREST) -> None:
        self._spec, self._loaded, self._found = problem.task.spec, loaded, list[PublishedRun]()
        self._left = [problem.published[SHOWN_RUNS:limit], problem.published[:SHOWN_RUNS]]

    def __getitem__(self, place: Any) -> Any:
        wanted = (place.stop or 0) if isinstance(place, slice) else place + 1
        while self._left and not 0 < wanted <= len(self._found):
            pairs, engines = self._left.pop(), plugins.engines()
            answers = predict_records([record for _, record in pairs], self._loaded)
            both = [(*pair, each) for pair, each in zip(pairs, answers, strict=True) if "step_time_s" in each]
            self._found += [_run(self._spec, *each, engines) for each in both]
        return self._found[place]

    def __len__(self) -> int:
        return len(self[:])


def published_job(problem: Problem, loaded: LoadedPlugins, name: str) -> tuple[str, JobRecord]:
    """Return the nearest published run whose id or source contains all words of `name`, and its id and source.

    Runs on the task's kinds of chips come first. Raises UsageError if there is no such run.
    """
    words, runs = name.casefold().split(), [*problem.published, *nearest_runs(problem.task, loaded, others=True)]
    for job, record in runs:
        title = f"{job.id} ({record['source']})"
        if words and all(word in title.casefold() for word in words):
            return title, job
    text = N_("--like {name!r}: no published run contains these words; the nearest runs: {known}")
    raise UsageError(_(text, name=name, known="; ".join(job.id for job, _record in runs[:3]) or _("none")))


def predicted_like(problem: Problem, job: JobRecord) -> Prediction | None:
    """Return the prediction with the layout and all settings of a published job, or None if they are illegal."""
    train, engine = problem.task.spec.train, problem.engine
    lengths = {key: getattr(train, key) for key in ("seq_length", "global_batch_size", "precision")}
    values = {key: value for key, value in job.candidate.items() if key != engine.replicas}
    with suppress(FlagError):
        task = replace(problem.task, spec=replace(problem.task.spec, work=replace(job.work, **lengths)), knobs=())
        task, values = engine.published(task, values, job.notes)[:2]
        platform, columns = replace(problem.platform, task=task), engine.columns(task, values)
        if not any(rule.broken(columns).any() for rule in legality(platform).rules):
            return predict_columns(platform, columns).row(0)
    return None


def _run(
    spec: Spec, job: JobRecord, record: Mapping[str, Any], answer: Mapping[str, Any], engines: Mapping[str, Engine]
) -> PublishedRun:
    measured_s, speedup = record["measured"]["step_time_s"], answer["step_time_s"]["value"]
    speedup /= measured_s
    predicted, has_experts = answer["tokens_per_second_per_device"]["value"], job.model.experts > 0
    return PublishedRun(
        run=job.id,
        precision=job.work.precision,
        candidate=job.candidate,
        measured=predicted * speedup,
        predicted=predicted,
        mfu=answer["mfu"] * speedup if "mfu" in answer else None,
        source=record["source"],
        is_bound=job.work.precision == spec.work.precision and not (has_experts and not spec.model.experts),
        knobs={knob.name: knob for knob in engines[job.work.engine].knobs},
    )
