"""The document result.json, which is plain data in seconds and GiB: how it is written, checked and read."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain, repeat
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from flagcore.domain.metrics import HighestLoad, flat_statistics, nest_statistics
from flagcore.domain.plan import Counts, Plan, Speedup
from flagcore.domain.records import GIB, prediction_record, read_prediction
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import SERVING, is_rate, objective_value
from flagcore.domain.trial import FIDELITIES, SEARCH_FIELDS, Answers, Measurement, Role, Trial, TrialState
from flagcore.domain.units import OneOf
from flagcore.errors import SpecError
from flagcore.i18n import Message, _, from_record
from flagcore.report.text import notes
from flagcore.spec.plain_data import KeyPath, load_json, spec_error
from flagcore.spec.validate import Section, checked, keys_of_record, located

SIZES = {f"{name}_gib": f"{name}_bytes" for name in ("peak_allocated", "peak_reserved", "device_used")}
STEPS = {"scaled_from": "scaled_from", "modelled": "modelled_s", "low": "low_s", "high": "high_s"}
"""Fields of a measurement, with their names in JSON. The JSON contains only the fields that are known."""
RUN_FIELDS = ("time_limit", "shortened", "group")
"""The fields of SEARCH_FIELDS that JSON does not store next to the prediction."""
NOISE = ("drift", "drifted")
MAX_VALUE = 2.0**500
"""The maximum value of a number, other than infinity."""
Data: TypeAlias = dict[str, Any]
EMPTY: Any = Field(default_factory=dict)
EMPTY_LIST: Any = Field(default_factory=list)
Numbers: TypeAlias = Annotated[list[float], EMPTY_LIST]
Texts: TypeAlias = Annotated[list[str], EMPTY_LIST]
Records: TypeAlias = Annotated[list[Data], EMPTY_LIST]
Fidelity: TypeAlias = Annotated[str, OneOf(FIDELITIES)]


def number(value: Any) -> float | None:
    """Return a number as float, or None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


class _Object(Section):
    """An object of which only the keys that flagcore reads are checked."""

    model_config = ConfigDict(extra="ignore")


class _Steps(_Object):
    median: Annotated[float, Field(gt=0.0, le=MAX_VALUE)]
    spread: float = 0.0
    steps: Numbers


class Measured(_Object):
    """A measurement. The `figures` of a server contain nested statistics of latencies."""

    step_time_s: _Steps
    tokens_per_second_per_device: float
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    device_used_gib: float | None = None
    losses: Annotated[list[float | None], EMPTY_LIST]
    effective: Annotated[Data, EMPTY]
    versions: Annotated[Data, EMPTY]
    telemetry: Annotated[Data, EMPTY]
    devices: Records
    slow_devices: Texts
    figures: Annotated[Data, EMPTY]
    points: Records
    broken: Texts

    @staticmethod
    def write(measured: Measurement) -> Data:
        """Return a measurement as plain data."""
        steps = {name: value for name, field in STEPS.items() if (value := getattr(measured, field)) is not None}
        sizes = {name: size / GIB for name, field in SIZES.items() if (size := getattr(measured, field)) is not None}
        served: dict[str, Any] = {}
        if measured.figures:
            points = [nest_statistics(point) for point in measured.points]
            served = {"figures": nest_statistics(measured.figures), "points": points, "broken": list(measured.broken)}
            served |= {"highest": asdict(measured.highest)} if measured.highest else {}
        return {
            "step_time_s": {
                "median": measured.step_time_s,
                "spread": measured.spread_s,
                "n": len(measured.step_times_s),
                "steps": list(measured.step_times_s),
                **steps,
            },
            "tokens_per_second_per_device": measured.tokens_per_second_per_device,
            "losses": list(measured.losses),
            "effective": dict(measured.effective),
            "versions": dict(measured.versions),
            "telemetry": dict(measured.telemetry),
            "devices": [dict(each) for each in measured.devices],
            "slow_devices": list(measured.slow),
            **sizes,
            **served,
            **({"answers": asdict(measured.answers)} if measured.answers else {}),
            **{name: True for name in ("few_steps", "partial") if getattr(measured, name)},
        }

    @staticmethod
    def read(data: Mapping[str, Any]) -> Measurement:
        """Convert the result of `write` back to a measurement."""
        step = data["step_time_s"]
        known: Data = {field: int(data[name] * GIB) for name, field in SIZES.items() if name in data}
        known |= {field: step[name] for name, field in STEPS.items() if name in step}
        names = ("effective", "versions", "telemetry", "few_steps", "partial")
        return Measurement(
            step_times_s=tuple(step.get("steps") or ()),
            step_time_s=float(step["median"]),
            spread_s=step.get("spread", 0.0),
            tokens_per_second_per_device=float(data["tokens_per_second_per_device"]),
            losses=tuple(data.get("losses") or ()),
            devices=tuple(data.get("devices") or ()),
            slow=tuple(data.get("slow_devices") or ()),
            figures=flat_statistics(data.get("figures") or {}),
            points=tuple(flat_statistics(point) for point in data.get("points") or ()),
            highest=HighestLoad(**data["highest"]) if data.get("highest") else None,
            answers=Answers(**data["answers"]) if data.get("answers") else None,
            broken=tuple(data.get("broken") or ()),
            **{name: data[name] for name in names if name in data},
            **known,
        )


STATES = tuple(each.value for each in TrialState if each is not TrialState.RUNNING)


class TrialResult(_Object):
    """A trial in the format of result.json. The documentation lists the fields as they are described here.

    - `number`: Its number, and its folder under `trials/`.
    - `role`: `baseline`, `search` or `repeat`; in the journal also `interference`.
    - `candidate`: Each knob with its value; null is not set.
    - `state`: `measured`, `stopped`, `out_of_memory`, `invalid`, `failed`, `timed_out` or `interrupted`. The last five
      count as failed. An estimate has the state `predicted` and is not part of the counts.
    - `reason`: Why the state is not `measured`, or null.
    - `fidelity`: `run`, `probe` or `estimate`.
    - `group`: The number of its group of devices if other trials ran at the same time. Null if it ran alone.
    - `inconclusive`: Whether other processes or trials disturbed it. Such a trial removes no candidate, and its
      candidate may be tried again.
    - `warm`: Whether it was forked from a process that had imported its modules.
    - `time_limit`: `seconds`, `because` (the origin of the limit), and `target_s`, after which the trial ends with
      fewer steps (null: only at its limit). Null for trials that flagcore did not run.
    - `shortened`: `global_batch_size` of a shortened step, `whole` that of a whole step, and `scale`, the predicted
      time of a whole step over that of a shortened step, with its 80% interval `low` to `high`. Null if the steps were
      whole.
    - `predicted`: The prediction before it ran.
    - `cost`: Of `baseline` and `best`: the cost figures of `predicted`, from the measured time if there is one.
    - `measured`: The measurement, or null.
    - `measured_over`: The measured step time over `predicted`, and over `believed` (the corrected prediction when the
      trial was chosen). Null if unknown.
    - `duration_s`: Wall-clock time of the trial.
    - `log`: Its stdout, relative to the run folder.
    - `source`: The file of an imported trial, or null.
    - `finished_steps_s`, `telemetry`: If there is no measurement, the times of the finished steps (on an accelerator
      without the first), and the telemetry, as in `measured`.
    """

    number: Annotated[int, Field(ge=0, le=99_999)]
    candidate: dict[str, KnobValue]
    role: Annotated[str, OneOf(tuple(each.value for each in Role))] = Role.SEARCH.value
    state: Annotated[str, OneOf(STATES)] = TrialState.MEASURED.value
    fidelity: Fidelity = "run"
    reason: str | None = None
    log: str | None = None
    source: str | None = None
    duration_s: float = 0.0
    predicted: Data | None = None
    measured: Measured | None = None
    finished_steps_s: Numbers

    @staticmethod
    def write(each: Trial) -> Data:
        """Return a trial as plain data."""
        search_fields = each.search_fields
        run_fields = {name: search_fields.pop(name, None) for name in RUN_FIELDS}
        return {
            "number": each.number,
            "role": each.role.value,
            "candidate": each.candidate.as_dict(),
            "state": each.state.value,
            "reason": each.reason,
            "fidelity": each.fidelity,
            "inconclusive": each.inconclusive,
            "warm": each.warm,
            **run_fields,
            "predicted": {**(prediction_record(each.predicted) if each.predicted else {}), **search_fields},
            "measured": Measured.write(each.measurement) if each.measurement else None,
            "measured_over": {
                "predicted": each.measured_over(each.predicted),
                "believed": each.measured_over(each.believed),
            },
            "duration_s": each.duration_s,
            "log": each.log,
            "source": each.source,
            **({"finished_steps_s": list(each.finished_steps_s)} if each.finished_steps_s else {}),
            **({"telemetry": dict(each.telemetry)} if each.telemetry else {}),
        }

    @staticmethod
    def read(data: Mapping[str, Any]) -> Trial:
        """Convert the result of `write` back to a trial.

        Raises TypeError, LookupError, ValueError, AttributeError for other data.
        """
        predicted, measured = data.get("predicted") or {}, data.get("measured")
        saved = {**data, **{name: predicted[name] for name in SEARCH_FIELDS if name in predicted}}
        search_fields = {n: parse(saved[n]) for n, parse in SEARCH_FIELDS.items() if saved.get(n) is not None}
        names = ("reason", "fidelity", "inconclusive", "warm", "duration_s", "log", "source", "telemetry")
        return Trial(
            number=int(data["number"]),
            candidate=Candidate.of(data["candidate"]),
            role=Role(data.get("role", Role.SEARCH.value)),
            state=TrialState(data.get("state", TrialState.MEASURED.value)),
            predicted=read_prediction(predicted) if "memory" in predicted else None,
            measurement=Measured.read(measured) if measured else None,
            finished_steps_s=tuple(data.get("finished_steps_s") or ()),
            **{name: data[name] for name in names if name in data},
            **search_fields,
        )


Trials: TypeAlias = Annotated[list[TrialResult], EMPTY_LIST]


@keys_of_record(Counts)
class _Counts(_Object):
    pass


class _Objective(_Object):
    name: str


class Result(_Object):
    """A plan in the format of result.json. The documentation lists the fields as they are described here.

    - `schema_version`: 1.
    - `run_dir`: The run folder.
    - `chip`, `devices`: Name of the chip and number of devices.
    - `objective`: `name`, such as `output_tokens_per_s` or `ttft_s.p99`, and `direction` (`max` or `min`).
    - `fidelity`: The fidelity of `trials`: `estimate`, `probe` or `run`.
    - `stopped_because`: Why the search stopped.
    - `stopped_message`: The same as `template` and `values`, for translation. Absent for a fixed text.
    - `counts`: The number of combinations by outcome. Two sums always balance: `combinations` = `illegal` (by rule)
      + `merged` (equal to another) + `candidates`, and `candidates` = `does_not_fit` + `pruned` (by rule) + `measured`
      + `stopped` + `failed` + `untried`.
    - `baseline`, `best`: Trials, or null: the first trial of the candidate, or its first repeat if the first trial ran
      shortened steps or side by side. `best` is null if no trial met the limits of the SLO.
    - `limits`, `fastest`: The limits of `serve.slo` in seconds, and the number of the trial that is fastest regardless
      of them. Absent without an SLO.
    - `gain`: The median speed of the best over that of the baseline, minus one: 0.25 is 25% more throughput, or for a
      latency, a baseline of 1.25 times the latency of the best. Null if unknown.
    - `speedup`: The same as `value`, and of each of the `rounds` (a run of the baseline and the next run of the best),
      with the range `low` to `high` of these. `conclusive`: whether the range is smaller than the gain. `significant`:
      whether every round is also faster, the difference exceeds the noise, and both ran more than once, not only beside
      other programs. Rates of all devices are compared on equal devices. Null if unknown.
    - `runs`: For each measured candidate, the number of its first `trial`, the numbers of the runs that are `counted`,
      why others are `not_counted`, and the medians of those counted: the objective and, of servers, all `figures`.
    - `noise`: The results of the repeats: `drift` (last run of the baseline over its first, minus one), `drifted`
      (whether it exceeds the noise), `not_told_apart` (numbers of trials that may be as fast as the best).
    - `side_by_side`: The interference of trials that run at once: `slowdown` of a step as a fraction of its time alone,
      `noise` of the run alone, `quiet` (whether trials run at once), `trials` (numbers of both runs), and `text`, with
      `message` for translation. Null if unknown.
    - `predictions_off`: Median error of the predicted step times as a fraction: `before` any trial, and `after`
      learning. Null without corrected predictions.
    - `trials`: One per candidate, in order of execution.
    - `repeats`: Runs of the baseline, the best and its rivals at the end.
    - `probes`: Trials that were probed before the first run. Not part of the counts.
    - `slow_devices`: Slow devices (`device 3 of node 0`, or the name of its host) with the numbers of the trials in
      which they were slow.
    - `notes`: Caveats, such as trials without time for all their steps, a busy machine, or a p99 of fewer than 100
      requests.
    - `note_messages`: The same as `template` and `values`, for translation. Null for a fixed text.
    - `front`: Of servers: the Pareto front of `output_tokens_per_s_per_device` and `output_tokens_per_s_per_user` (the
      inverse of the median time per token) over all load points, highest rate of a device first.
    """

    schema_version: Literal[1]
    chip: str
    devices: Annotated[int, Field(ge=1, le=2**31)]
    objective: _Objective
    fidelity: Fidelity
    counts: _Counts
    stopped_because: str | None = None
    baseline: TrialResult | None = None
    best: TrialResult | None = None
    trials: Trials
    repeats: Trials
    probes: Trials
    speedup: Data | None = None
    noise: Annotated[Data, EMPTY]
    fastest: int | None = None
    limits: Annotated[dict[str, float], EMPTY]
    slow_devices: Annotated[dict[str, list[int]], EMPTY]
    notes: Texts
    note_messages: Annotated[list[Data | None], EMPTY_LIST]
    front: Records
    engine: str = ""
    engines: Annotated[dict[str, Data], EMPTY]

    @staticmethod
    def write(plan: Plan, run_dir: str) -> Data:
        """Return a plan as plain data. `run_dir`: the folder of the run."""
        because, noted = plan.stopped_because, notes(plan)
        fastest = plan.fastest.number if plan.fastest else None
        return {
            "schema_version": 1,
            "run_dir": run_dir,
            "chip": plan.chip,
            "devices": plan.devices,
            "objective": {"name": plan.objective, "direction": "max" if is_rate(plan.objective) else "min"},
            "fidelity": plan.fidelity,
            "stopped_because": because,
            **({"stopped_message": because.record} if isinstance(because, Message) else {}),
            "counts": asdict(plan.counts),
            "baseline": TrialResult.write(plan.baseline) if plan.baseline else None,
            "best": TrialResult.write(plan.best) if plan.best else None,
            **({"limits": dict(plan.limits), "fastest": fastest} if plan.limits else {}),
            "gain": plan.gain,
            "speedup": asdict(plan.speedup) if plan.speedup else None,
            "runs": list(_runs(plan)),
            "noise": {
                **{name: getattr(plan, name) for name in NOISE},
                "not_told_apart": [each.number for each in plan.rivals],
            },
            "side_by_side": _side_by_side(plan),
            "predictions_off": asdict(plan.prediction_error) if plan.prediction_error else None,
            "trials": [TrialResult.write(each) for each in plan.trials],
            "repeats": [TrialResult.write(each) for each in plan.repeats],
            "probes": [TrialResult.write(each) for each in plan.probes],
            "slow_devices": plan.slow_devices,
            "notes": noted,
            "note_messages": [each.record if isinstance(each, Message) else None for each in noted],
            **({"front": [nest_statistics(point) for point in plan.front]} if plan.objective in SERVING else {}),
        }

    @classmethod
    def check(cls, content: bytes) -> Data:
        """Return the data of a result.json. Raises SpecError for the first invalid value, ValueError if it is no JSON.

        Numbers may be infinite, such as the rate of requests that are sent at once, but not NaN.
        """
        data: dict[str, Any] = load_json(content.decode("utf-8-sig"))
        cls._check(data, ())
        for path, value in _numbers(data, ()):
            if not (abs(value) <= MAX_VALUE or value == math.inf):
                raise spec_error(path, _("is too large, or is not a number"), value=value)
        for name, each in data.get("engines", {}).items():
            if "error" not in each:
                cls._check(each, ("engines", name))
        return data

    @classmethod
    def _check(cls, data: object, path: KeyPath) -> None:
        try:
            checked(cls, data)
        except SpecError as error:
            raise located(error.problems[0], path, "") from None

    @staticmethod
    def read(data: Mapping[str, Any]) -> Data:
        """Return the fields of the plan in a result.json, except for `interference` and `knobs`.

        Raises TypeError, LookupError, ValueError, AttributeError for other data.
        """
        lists = {name: tuple(map(TrialResult.read, data.get(name) or ())) for name in ("trials", "repeats", "probes")}
        by_number, noise = {each.number: each for each in lists["trials"]}, data.get("noise") or {}
        speedup = data.get("speedup")
        return {
            **{name: data[name] for name in ("chip", "devices", "fidelity")},
            **{name: TrialResult.read(data[name]) if data.get(name) else None for name in ("best", "baseline")},
            **lists,
            "objective": data["objective"]["name"],
            "counts": Counts(**data["counts"]),
            "stopped_because": data.get("stopped_because") or "",
            "speedup": Speedup(**{**speedup, "rounds": tuple(speedup["rounds"])}) if speedup else None,
            "rivals": tuple(each for each in lists["trials"] if each.number in noise.get("not_told_apart", ())),
            **{name: noise[name] for name in NOISE if name in noise},
            "fastest": by_number.get(data.get("fastest", -1)),
            "limits": data.get("limits") or {},
        }


def _numbers(data: object, path: KeyPath) -> Iterator[tuple[KeyPath, float]]:
    """Yield the numbers in plain data with their keys."""
    if isinstance(data, (int, float)):
        yield path, data
    elif isinstance(data, (dict, list)):
        for key, each in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _numbers(each, (*path, key))


def notes_of(data: Mapping[str, Any]) -> list[str]:
    """Return the notes of a result.json in the selected language."""
    messages = chain(data.get("note_messages") or (), repeat(None))
    return [from_record(text, message) for text, message in zip(data.get("notes") or (), messages, strict=False)]


def stop_reason(data: Mapping[str, Any]) -> str:
    """Return why the run of a result.json stopped, in the selected language.

    It is empty while the run is in progress.
    """
    return from_record(data.get("stopped_because") or "", data.get("stopped_message"))


def _side_by_side(plan: Plan) -> dict[str, Any] | None:
    """Return whether trials may run in parallel, and the slowdown of a parallel trial relative to one that ran alone.

    Returns None if it was not measured.
    """
    if (found := plan.interference) is None:
        return None
    return {**asdict(found), "quiet": found.is_negligible, "text": found.text, "message": found.text.record}


def _runs(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the runs of each measured candidate with their medians."""
    for first in plan.trials:
        runs = plan.runs_of(first.candidate)
        if (median_s := runs.median_s) is None:
            continue
        figures = nest_statistics(runs.figures)
        yield {
            "trial": first.number,
            "counted": [each.number for each in runs.counted],
            "not_counted": {str(number): why for number, why in runs.left_out.items()},
            plan.objective: objective_value(plan.objective, median_s, runs.counted[0].measurement),
            **({"figures": figures} if figures else {}),
        }
