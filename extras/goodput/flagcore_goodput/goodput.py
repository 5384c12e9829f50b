"""The progress of the whole job of each candidate, for each way to save.

The bytes of a checkpoint are those in sum, and of the rank that writes most.

What saves, failures and restarts take: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22 (2006); failures are a Poisson process. J. W. Young,
Communications of the ACM 17 (1974).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, factorial
from statistics import median
from typing import Any

import numpy as np
from flagcore_training.weights import ADAPTER_PARTS, EXPERT_PARTS

from flagcore.api.runs import Snapshot
from flagcore.contracts import Problem
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.errors import NothingFits, UsageError
from flagcore.i18n import N_, _
from flagcore.tuner.feasibility import require_candidate
from flagcore.tuner.problem import rows_by_time
from flagcore.tuner.stages.predict import predict_components
from flagcore_goodput.job import DAY, FORMATS, PUBLISHED, Job

HOUR = 3_600.0
BLOCK = 64
"""The number of candidates whose checkpoints are computed at a time."""
Figures = Mapping[str, FloatArray]
"""The figures of `WholeJob.figures`, with one element per candidate. NaN is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeJob:
    """What all candidates have in common: the job of a spec, and its hardware. `devices` are on `nodes`."""

    job: Job
    problem: Problem
    spares: int
    devices: int
    nodes: int

    @classmethod
    def of(cls, job: Job, problem: Problem) -> WholeJob:
        """Return the whole job of a problem."""
        cluster, spares = problem.task.cluster, problem.task.spec.cluster.spares
        nodes = sum(group.nodes for group in cluster.groups)
        spares = spares if job.spare_nodes is None else job.spare_nodes
        return cls(job=job, problem=problem, spares=spares, devices=cluster.devices, nodes=nodes)

    @property
    def ways(self) -> list[str]:
        """The ways to save to choose from."""
        known, given = FORMATS[self.problem.engine.name]["ways"], self.job.saves
        return list(given or (each for each in known if each != "memory" or self.job.process_failures is not None))

    @property
    def mtbf_s(self) -> float | None:
        """Seconds between two failures of the whole job, or None if unknown."""
        given = self.job.device_mtbf
        device_s = PUBLISHED[given]["hours"] * HOUR if isinstance(given, str) else given
        return device_s and device_s / self.devices

    def figures(self, name: str, size: Checkpoint, step_s: FloatArray) -> Figures:
        """Return the figures of candidates that save in the way `name`.

        `hold_s`: what a save takes from training. `write_s`: until it is complete. `pinned_bytes`: the memory of a host
        that it needs. `steps`: the steps between saves, `interval_s` their seconds. `goodput`: the share of the time
        with progress, the largest that unknown inputs allow.
        """
        job, way = self.job, FORMATS[self.problem.engine.name]["ways"][name]
        is_background, rank = way.get("background", False), size.equal if way.get("parallel") else size.first
        storage, mtbf_s = job.storage_bytes_per_second or np.nan, self.mtbf_s
        rate = job.copy_bytes_per_second
        copy_s = rank / rate if rate else self.problem.costs.kernels.host_copy_seconds(rank)
        write_s = size.write_s(self.devices, way.get("parallel", False), storage, job.rank_bytes_per_second or np.inf)
        hold_s = copy_s if is_background else copy_s + write_s
        unknown = np.full(step_s.shape, np.nan)
        young_s = young_interval(hold_s, mtbf_s) if mtbf_s else unknown
        daly_s = best_interval(hold_s, mtbf_s) if mtbf_s else unknown
        best = np.fmax(np.rint(daly_s / step_s), np.ceil(write_s / step_s) if is_background else unknown)
        steps = np.maximum(best, 1.0) if job.save_interval is None else 0 * step_s + job.save_interval
        from_storage = 1.0 - (job.process_failures or 0.0) * way.get("memory", False)
        late_s = np.nan_to_num(size.total / storage + write_s * is_background) * from_storage
        share = share_of_work(steps * step_s, hold_s, mtbf_s, (job.restart_time or 0.0) + late_s)
        waiting = waiting_share(self.spares, 1.0 / mtbf_s, job.repair_time) if mtbf_s and job.repair_time else 0.0
        return {
            "total_bytes": size.total,
            "rank_bytes": rank,
            "pinned_bytes": rank * self.devices / self.nodes * is_background,
            "hold_s": hold_s,
            "write_s": write_s,
            "young_s": young_s,
            "daly_s": daly_s,
            "steps": steps,
            "interval_s": steps * step_s,
            "goodput": share * (1.0 - waiting),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A candidate of a plan or a run: its number by speed, its row in the space, and the figures of each way to save by
    name, the best first. The arrays have one element."""

    number: int
    row: int
    step_s: float
    size: Checkpoint
    ways: Mapping[str, Figures]

    def record(self, whole: WholeJob) -> dict[str, Any]:
        """Return plain data: seconds, bytes and tokens; unknown figures are None."""
        task, job = whole.problem.task, whole.job
        rate = task.spec.work.step_tokens / self.step_s
        data = dict[str, dict[str, Any]]()
        for name, each in self.ways.items():
            figures = {key: float(value[0]) if np.isfinite(value[0]) else None for key, value in each.items()}
            daily = rate * DAY * figures["goodput"] if figures["goodput"] else None
            data[name] = {
                **figures,
                "tokens_per_day": daily,
                "days": job.tokens / daily if job.tokens and daily else None,
                "tokens": job.days * daily if job.days and daily else None,
                "settings": settings_text(whole, name, figures["steps"]),
            }
        return {
            "number": self.number,
            "candidate": whole.problem.space.candidate(self.row).as_dict(),
            "step_time_s": self.step_s,
            "tokens_per_second": rate,
            "way": next(iter(data)),
            "ways": data,
        }


def settings_text(whole: WholeJob, way: str, steps: float | None) -> str:
    """Return the settings that turn a way to save on."""
    text: str = FORMATS[whole.problem.engine.name]["ways"][way]["set"]
    return text.format(steps=int(steps) if steps else "N")


def ranked(snapshot: Snapshot, whole: WholeJob, top: int) -> list[Planned]:
    """Return the `top` candidates with the most tokens per day, with their numbers by speed.

    A run has those that it measured. Of those with the same layout and checkpoint, only the fastest is listed. Those
    whose speed without any loss is lower than what others reach are not computed. Raises NothingFits.
    """
    times, state = snapshot.problem.predictions.step_time_s, snapshot.search_state
    rows = rows_by_time(snapshot.problem)
    if snapshot.run:
        measured = {
            snapshot.problem.space.find(each.candidate): state.speed_of(each.candidate) for each in state.trials
        }
        times = np.array([1.0 / (measured.get(row) or np.nan) for row in range(times.size)])
        rows = rows[np.argsort(times[rows], kind="stable")]
    rows = rows[np.isfinite(times[rows])]
    if not rows.size:
        require_candidate(snapshot.problem)
        raise NothingFits("no candidate was measured, or has a predicted time")
    layout = [name for name, knob in snapshot.problem.knobs.items() if knob.layout]
    found, seen = list[tuple[float, Planned]](), set[tuple[Any, ...]]()
    for start in range(0, rows.size, BLOCK):
        block = rows[start : start + BLOCK]
        if len(found) >= top and 1.0 / times[block[0]] <= sorted((each[0] for each in found), reverse=True)[top - 1]:
            break
        sizes, columns = checkpoints(snapshot.problem, block), snapshot.problem.space.columns(block)
        for place, row in enumerate(block.tolist()):
            key = (
                *(columns[name][place] for name in layout if name in columns),
                sizes.first[place],
                sizes.equal[place],
            )
            if key in seen:
                continue
            seen.add(key)
            planned = _planned(whole, start + place + 1, row, float(times[row]), sizes.take(place))
            found.append((_best(planned) / planned.step_s, planned))
        if max(speed * planned.step_s for speed, planned in found) < NO_PROGRESS:
            raise NothingFits(_no_progress(whole, found[0][1].step_s))
    found.sort(key=lambda each: (-each[0], each[1].step_s))
    return [each for _speed, each in found[:top]]


NO_PROGRESS = 0.001
"""The share of the time below which a job is said to make no progress."""


def _no_progress(whole: WholeJob, step_s: float) -> str:
    """Return why a job with steps of `step_s` seconds makes no progress."""
    text = N_(
        "the job makes no progress: it fails every {mtbf:.3g} s (job.device_mtbf / {devices} devices), a step takes "
        "{step:.3g} s, and a restart {restart:.3g} s (job.restart_time)"
    )
    restart_s = whole.job.restart_time or 0.0
    return _(text, mtbf=whole.mtbf_s or np.nan, devices=whole.devices, step=step_s, restart=restart_s)


def _planned(whole: WholeJob, number: int, row: int, step_s: float, size: Checkpoint) -> Planned:
    ways = {name: whole.figures(name, size, np.array([step_s])) for name in whole.ways}
    order = sorted(ways, key=lambda name: (-np.nan_to_num(ways[name]["goodput"][0]), ways[name]["hold_s"][0]))
    return Planned(number=number, row=row, step_s=step_s, size=size, ways={name: ways[name] for name in order})


def _best(planned: Planned) -> float:
    return float(np.nan_to_num(next(iter(planned.ways.values()))["goodput"][0], nan=1.0))


def started_s(snapshot: Snapshot) -> float | None:
    """Return the median start of the trials of a run in seconds, without those of a warm process. None if unknown."""
    control, trials = snapshot.task.spec.control, snapshot.search_state.trials
    starts = [each.overhead_s(control.train_iters, control.warmup_iters) for each in trials if not each.warm]
    return median(known) if (known := [each for each in starts if each is not None]) else None


def break_evens(whole: WholeJob, best: Planned) -> Iterator[str]:
    """Yield what depends on the unknown inputs of a job, for one candidate: from which value on it matters."""
    job, least = whole.job, 1.0 + whole.problem.task.spec.control.indifference
    gain = {"gain": least - 1.0}

    def ahead(first: str, second: str, key: str, low: float, high: float) -> float | None:
        """Return the value of `key` from which on the way `first` gains `least` over `second`."""

        def difference(value: float) -> float:
            changed = replace(whole, job=job.model_copy(update={key: value}))
            shares = (
                changed.figures(each, best.size, np.array([best.step_s]))["goodput"][0] for each in (first, second)
            )
            with np.errstate(invalid="ignore", divide="ignore"):  # neither makes progress
                return float(np.nan_to_num(next(shares) / next(shares) - least))

        return crossing(difference, low, high) if {first, second} <= {*whole.ways} else None

    slow = "parallel" if "parallel" in whole.ways else "sync"
    if whole.mtbf_s is None:
        if (found := ahead("async", slow, "device_mtbf", 1.0, 1e12)) is not None:
            days = found * whole.nodes / whole.devices / DAY
            text = N_("saves in the background gain over {gain:.0%} if a node fails more than once in {days:.3g} days")
            yield _(text, days=days, **gain)
        return
    if job.storage_bytes_per_second is None:
        if (found := ahead("async", slow, "storage_bytes_per_second", 1e6, 1e15)) is not None:
            text = N_("saves in the background gain over {gain:.0%} if the storage writes less than {rate:.3g} GB/s")
            yield _(text, rate=found / 1e9, **gain)
    elif job.rank_bytes_per_second is None and (found := ahead(slow, "sync", "rank_bytes_per_second", 1e6, 1e15)):
        text = N_("saves of all replicas gain over {gain:.0%} if a rank writes less than {rate:.3g} GB/s")
        yield _(text, rate=found / 1e9, **gain)
    if job.restart_time is None:
        text = N_("goodput is at most this: each minute of job.restart_time takes another {share:.2%}")
        yield _(text, share=-np.expm1(-60.0 / whole.mtbf_s))
    if job.repair_time is None and whole.spares:
        mtbf_s = whole.mtbf_s

        def waits(repair_s: float) -> float:
            return waiting_share(whole.spares, 1.0 / mtbf_s, repair_s) - gain["gain"]

        if (found := crossing(waits, 1.0, 1e10)) is not None:
            text = N_("{spares} spare nodes keep waits below {gain:.0%} if repairs take less than {hours:.3g} h")
            yield _(text, spares=whole.spares, hours=found / HOUR, **gain)


def young_interval(hold_s: FloatArray, mtbf_s: float) -> FloatArray:
    """Return Young's interval between saves in seconds, for saves that hold the job for `hold_s`."""
    return np.sqrt(2.0 * hold_s * mtbf_s)


def best_interval(hold_s: FloatArray, mtbf_s: float) -> FloatArray:
    """Return Daly's interval of work between two saves in seconds (equation 37)."""
    root = np.sqrt(hold_s / (2.0 * mtbf_s))
    interval = 2.0 * mtbf_s * root * (1.0 + root / 3.0 + root**2 / 9.0) - hold_s
    return np.where(root >= 1.0, mtbf_s, interval)  # unknown stays unknown


def share_of_work(
    interval_s: FloatArray, hold_s: FloatArray, mtbf_s: float | None, restart_s: FloatArray
) -> FloatArray:
    """Return the share of the time in which a job makes progress (the inverse of equation 20 of Daly).

    `interval_s`: work between two saves, each of which holds the job for `hold_s`. `restart_s`: seconds from a failure
    until work goes on, plus the time that a save in the background takes, in which work is lost that was saved before.
    `mtbf_s`: seconds between failures; None without any.
    """
    if mtbf_s is None:
        return interval_s / (interval_s + hold_s)
    with np.errstate(over="ignore"):
        spent = mtbf_s * np.exp(restart_s / mtbf_s) * np.expm1((interval_s + hold_s) / mtbf_s)
    return interval_s / spent


def waiting_share(spares: int, failures_per_s: float, repair_s: float) -> float:
    """Return the share of the time in which more nodes are in repair than there are spares.

    The number in repair has a Poisson distribution, whatever the distribution of the repairs (M/G/infinity).
    """
    mean = failures_per_s * repair_s
    if mean > 700.0 or spares > 150:  # beyond the range of doubles; the distribution is narrow
        return float(mean > spares)
    return max(0.0, 1.0 - exp(-mean) * sum(mean**count / factorial(count) for count in range(spares + 1)))


def crossing(gain: Callable[[float], float], low: float, high: float) -> float | None:
    """Return the largest value between `low` and `high` at which `gain` changes its sign, or None if there is none."""
    values = np.geomspace(high, low, 200).tolist()
    for above, below in pairwise(values):
        if gain(above) <= 0.0 < gain(below) or gain(above) > 0.0 >= gain(below):
            is_up = gain(above) > 0.0
            for _step in range(40):
                middle = (above * below) ** 0.5
                above, below = (middle, below) if (gain(middle) > 0.0) == is_up else (above, middle)
            return float(above)
    return None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Bytes of the checkpoint of each candidate, with one element per candidate.

    `first`: of the rank that writes most if the first replica, of `writers` ranks, writes what the ranks do not share.
    `equal`: the same if all replicas write equal parts. Adam's states are saved in fp32.
    """

    total: FloatArray
    first: FloatArray
    equal: FloatArray
    writers: FloatArray

    def write_s(self, devices: int, parallel: bool, storage: float, rank: float) -> FloatArray:
        """Return the seconds until all is written.

        `storage`: bytes per second of all ranks, which share it equally. `rank`: those of one rank at most. Without
        `parallel`, the first replica goes on alone after the others.
        """
        most = self.equal if parallel else self.first
        writers = np.full(most.shape, float(devices)) if parallel else self.writers
        others = np.clip((self.total - writers * most) / np.maximum(devices - writers, 1.0), 0.0, most)
        together = np.where(writers < devices, others, 0.0)
        alone = np.maximum((most - together) / rank, (self.total - devices * together) / storage)
        return np.asarray(together / np.minimum(rank, storage / devices) + alone, dtype=np.float64)

    def take(self, place: int) -> Checkpoint:
        """Return the checkpoint of one candidate, in arrays with one element."""
        return Checkpoint(*(each[place : place + 1] for each in (self.total, self.first, self.equal, self.writers)))


def checkpoints(problem: Problem, rows: IntArray) -> Checkpoint:
    """Return the checkpoints of the candidates in `rows` of the space. Raises UsageError if their bytes are unknown."""
    task, engine, columns = problem.task, problem.engine, problem.space.columns(rows)
    train, form = task.spec.train, FORMATS.get(engine.name)
    if form is None or len(task.cluster.groups) > 1:
        what, fix = f"the engine {engine.name}", f"use one of {', '.join(FORMATS)}"
        if form:
            what, fix = "several node groups", "give one kind of chip, without cluster.groups"
        raise UsageError(f"checkpoints of jobs on {what} are not known; {fix}")
    stages = columns.get("pipeline_model_parallel_size", np.ones(rows.shape, dtype=np.int64))
    knob, least = form.get("sharded", ("", 0))
    level = columns.get(knob, np.ones(rows.shape, dtype=np.int64))
    is_shared = level >= least
    weights = np.full(rows.shape, float(form.get("weights") or (4.0 if train.precision == "fp32" else 2.0)))
    optimizer = np.where(weights == 4.0, 8.0, 12.0) + 4.0 * (form.get("repeated", False) & is_shared & (weights == 4.0))
    weights[level >= form.get("no_weights", np.inf)] = 0.0

    devices, count = task.cluster.devices, sum(part.params * part.layers for part in engine.plans.model(task))
    owners, expert_owners = (_owners(devices, columns, stages, is_expert=each) for each in (False, True))
    even = {} if train.adapter else {"": {"params": count * owners / devices}}

    def of_stage(stage: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        total, first, equal = np.zeros(rows.shape), np.zeros(rows.shape), np.zeros(rows.shape)
        for name, part in (predict_components(problem.platform, columns, stage) or even).items():
            if train.adapter is None or name in ADAPTER_PARTS:
                size, shares = part["params"], expert_owners if name in EXPERT_PARTS else owners
                total += size * (weights + optimizer) * devices / stages / shares
                first += size * (weights + optimizer / np.where(is_shared, shares, 1.0))
                equal += size * (weights + optimizer) / shares
        return total, first, equal

    found = [of_stage(each) for each in (0 * stages, stages - 1, problem.predictions.worst_stage[rows])]
    total, first, equal = (np.max(each, axis=0) for each in zip(*found, strict=True))
    if not total.any():
        raise UsageError(f"checkpoints of adapters are not known for the engine {engine.name}")
    is_whole = bool(count) and train.adapter is None
    return Checkpoint(count * (weights + optimizer) if is_whole else total * stages, first, equal, devices / owners)


def _owners(devices: int, columns: Columns, stages: IntArray, *, is_expert: bool) -> FloatArray:
    """Return the number of ranks that hold, or share, the same weights."""
    tensor = columns.get("tensor_model_parallel_size", 0 * stages + 1)
    if is_expert:
        own = columns.get("expert_tensor_parallel_size", 0 * stages)
        tensor = np.where(own > 0, own, tensor) * columns.get("expert_model_parallel_size", 0 * stages + 1)
    return np.asarray(devices / (stages * tensor), dtype=np.float64)
