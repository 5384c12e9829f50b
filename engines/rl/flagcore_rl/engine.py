"""Frameworks of reinforcement learning as engines of the core. They differ in a row of `frameworks.yaml`.

Trials are the user's command with the settings of a candidate, for a few steps, whose times are read from its log.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_importers.dialect import Key, name_of
from flagcore_importers.programs import check_version, find_program, package_version, unknown_release
from flagcore_serving.advice import spec_warnings
from flagcore_serving.engine import ServingEngine
from flagcore_training.commands import NO_COMMAND
from flagcore_training.knobs import divisors, read_knobs
from flagcore_training.reading import FAILURES, LogFiles, warmup_of_fewer
from flagcore_vendorkit.metrics import NoMetrics, interquartile_range
from flagcore_vendorkit.settings import UNKNOWN_TIME

from flagcore.contracts import Commands, Costs, Engine, Plans, Platform, Published, Steps, differs_only
from flagcore.domain.engine import UNKNOWN, Unmodelled
from flagcore.domain.knob import ANSWERS, Knob
from flagcore.domain.launch import Launch, Start
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Axis, BoolArray, Candidate, Columns, KnobValue, Rule
from flagcore.domain.spec import AUTO, ImportNote, Spec, Task
from flagcore.domain.trial import Answers, Measurement
from flagcore.errors import FlagError, LaunchError, SpecError
from flagcore.i18n import N_, _
from flagcore.spec.plain_data import Notes, package_yaml
from flagcore_rl import commands, importing
from flagcore_rl.commands import dialect_of
from flagcore_rl.importing import Reading
from flagcore_rl.job import RlSpec, job_of, tokens_of
from flagcore_rl.predict import Framework, predict
from flagcore_rl.roles import (
    DEVICES,
    MOST_STEPS,
    ROLLOUT,
    STALENESS,
    THREADS,
    engine_of,
    keys_of,
    serve_task,
    train_task,
)
from flagcore_rl.rules import EP, PP, RDP, RTP, TP, rules

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
ITSELF = N_(
    "it is planned as a server of vLLM, with vLLM's share of the memory; it generates with the trainer's weights, more "
    "slowly, and stores only the cache of its batch"
)
"""What differs where the trainer generates answers itself."""
LONG = 0.8
"""The share of the longest sample below which the mean one is named as shorter. A choice."""
LONGEST_LINE = 1 << 16
"""Characters of a line that are read: verl and slime print all figures of a step in one line."""
NUMBER = r"'?[:=]? *'?([\d.]+(?:e[+-]?\d+)?)"
"""What follows the name of a time in a log, in the words of any of the frameworks."""


class Log:
    """The times of the steps in the log of a trial, in seconds. `updates`: the number of lines of a step."""

    def __init__(self, folder: str, step: str, parts: Mapping[str, str], updates: int) -> None:
        self.parts: dict[str, list[float]] = {}
        self.last = ""
        self._step, self._updates = re.compile(step), updates
        self._names = {name: re.compile(rf"(?:{names}){NUMBER}") for name, names in parts.items()}
        self._times: list[float] = []
        self._seen: set[str] = set()
        self._files = LogFiles(folder, self._add, LONGEST_LINE)

    def __call__(self, *, unfinished: bool = False) -> tuple[float, ...]:
        """Read on. `unfinished`: whether to read a last line without a line break, too."""
        self._files.read(unfinished=unfinished)
        whole = len(self._times) // self._updates * self._updates
        return tuple(sum(self._times[place : place + self._updates]) for place in range(0, whole, self._updates))

    def _add(self, line: str) -> None:
        text = ANSI.sub("", line)
        self.last = text.strip() or self.last
        for name, pattern in self._names.items():
            if found := pattern.findall(text):
                self.parts.setdefault(name, []).append(sum(map(float, found)))
        if match := self._step.search(text):
            number = match.groupdict().get("step") or f"line {len(self._seen)}"
            if number not in self._seen and float(match["s"]) > 0:
                self._seen.add(number)
                self._times.append(float(match["s"]))


def _tokens(work: RlSpec, *times: int) -> tuple[KnobValue, ...]:
    """Return tokens of micro-batches that hold the longest sample so many times, or None without packing."""
    return tuple(each * work.longest for each in times) if work.packing else (None,)


def _rollout_devices(task: Task) -> tuple[KnobValue, ...]:
    """Return `None` and numbers of devices with which both roles have whole nodes, or powers of 2 within a node."""
    devices, node = task.cluster.devices, task.cluster.groups[0].devices_per_node
    unit = node if devices > node else 1
    parts = {devices * share // 8 // unit * unit for share in (1, 2, 3, 4, 5, 6)}
    return (None, *sorted(parts - {0, devices}))


AUTOS: Mapping[str, Callable[[Task], Sequence[KnobValue]]] = {
    DEVICES: _rollout_devices,
    STALENESS: lambda task: tuple(dict.fromkeys((0, job_of(task).staleness))),
    RTP: lambda task: [size for size in divisors(task.cluster.devices) if size <= task.cluster.linked_devices],
    f"{ROLLOUT}memory_share": lambda task: (None, "0.7", "0.85"),
    "micro_batch_tokens": lambda task: _tokens(job_of(task), 1, 2, 4),
    "micro_batch_size": lambda task: (1,) if job_of(task).packing else (1, 2, 4, 8),
}
KNOBS = tuple(
    replace(knob, auto=AUTOS.get(knob.name, knob.auto)) for knob in read_knobs(__package__, scope=["space"], flag="")
)
RECOMPUTE = "activation_checkpointing"
LEAST_MISMATCH, MOST_MISMATCHES = 1e-3, 2.0
"""The least difference between trainer and rollout that counts as the baseline's own noise, and how many times this
noise a trial may add to it. Chosen by hand: correct runs in bf16 state KL divergences of 0.0006 to 0.004 (NeMo-RL) and
absolute differences of 0.020 to 0.029 (slime), and vary by less than half within a run; wrong weights state 0.8."""
MORE_MEMORY = {RECOMPUTE: -1} | {knob.name: knob.memory_order for knob in KNOBS if knob.memory_order}
"""The knobs whose larger values need more memory, or less for -1."""


class RlCommands(Commands):
    """Reads commands of the framework `name`."""

    def __init__(self, name: str, knobs: Sequence[Knob]) -> None:
        self.name, self.knobs = name, knobs

    def role(self, command: Sequence[str], directory: str) -> str | None:
        return "" if importing.starts(self.name, command) else None

    def read(self, start: Start, directory: Path, model: str | None) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        return importing.spec_of(self.name, start, directory, model, self.knobs)


class RlPlans(Plans):
    """Plans of steps, which predict training and rollout."""

    most_candidates = 1 << 17


class RlEngine(Engine):
    """A framework of reinforcement learning."""

    kind = "rl"
    failures = FAILURES
    knobs: tuple[Knob, ...] = KNOBS
    plans = RlPlans()

    def __init__(self, name: str) -> None:
        self.name = name
        rows = package_yaml(__package__, "frameworks.yaml")
        self.framework = Framework(**{**next(iter(rows.values())), **rows[name]})
        self.distribution = self.framework.distribution
        self.modules: Mapping[str, str] = {name.replace("-", "_"): self.distribution}
        self.commands = RlCommands(name, self.knobs)

    def reading(self, work: RlSpec) -> Reading:
        """Return the command of a job, as it is read. Raises SpecError."""
        if work.command is None:
            problem, fix = _("is missing"), "write the command that starts your job, as a list of words"
            raise SpecError(key="rl.command", problem=problem, fix=fix)
        return Reading(self.name, work.command, Path(work.directory or "."))

    # The search space

    def fixed(self, task: Task) -> Mapping[str, tuple[KnobValue, ...]]:
        """Return the values of the knobs that the framework's command cannot set, or that do nothing. They stay."""
        work = job_of(task)
        if work.command is None:
            return {}
        read, own = self.reading(work), task.spec.baseline or {}
        idle = {"micro_batch_size", "logprob_batch_size"} if work.packing else set(importing.TOKENS)
        if read.generates_itself or read.outside:
            idle |= {name for name in read.keys if name.startswith(ROLLOUT)}
        settable = {*read.keys, *([THREADS] if "processes" in read.keys else [])} - idle
        return {knob.name: (own.get(knob.name, knob.neutral),) for knob in self.knobs if knob.name not in settable}

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the axes. The default of a command's setting is the value in the command, or the framework's.

        Raises SpecError for values that the command cannot set.
        """
        fixed, work, space = self.fixed(task), job_of(task), task.spec.space
        own = {} if work.command is None else self.reading(work).baseline(self.knobs)
        axes = list[Axis]()
        for knob in (each for each in self.knobs if each.searchable):
            listed = task.listed_values(knob, AUTO)
            if knob.name in fixed:
                if not isinstance(space.get(knob.name, AUTO), str) and {*listed} - {*fixed[knob.name]}:
                    problem = _("is not what a command of {engine} can set", engine=self.name)
                    fix = "remove it, or compare placements without rl.command, by predictions"
                    raise SpecError(key=f"auto_tuner.space.{knob.name}", value=[*listed], problem=problem, fix=fix)
                listed = fixed[knob.name]
            axes.append(knob.axis(tuple(dict.fromkeys(own.get(knob.name) if v is None else v for v in listed))))
        return tuple(axes)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        return rules(task)

    def needs_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        return differs_only(self.knobs, columns, candidate, MORE_MEMORY)

    def takes_at_least(self, columns: Columns, candidate: Candidate) -> BoolArray:
        """Return which of `columns` differ from `candidate` only by more recompute."""
        return differs_only(self.knobs, columns, candidate, {RECOMPUTE: 1})

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return colocated, on-policy layouts with full recompute and micro-batches of the longest sample."""
        neutral: dict[str, str | tuple[KnobValue, ...]] = {knob.name: (knob.neutral,) for knob in self.knobs}
        layout = dict.fromkeys((RTP, TP, PP, EP), AUTO)
        return {**neutral, **layout, RECOMPUTE: ("full",), "micro_batch_tokens": _tokens(job_of(task), 1)}

    def rule_of_thumb(self, task: Task, columns: Columns, predictions: Predictions) -> int:
        """Return the row with the smallest TP x PP of the trainer that fits, then PP and EP, then TP of the rollout."""
        missing_bytes = np.where(predictions.fits, 0.0, predictions.device_used_bytes)
        size = columns[TP] * columns[PP]
        return int(np.lexsort((columns[RTP], columns[EP], columns[PP], size, missing_bytes))[0])

    def columns(self, task: Task, values: Mapping[str, KnobValue]) -> dict[str, np.ndarray]:
        return {
            knob.name: np.array([knob.axis(()).encode(values.get(knob.name, knob.neutral))], dtype=np.int64)
            for knob in self.knobs
        }

    def warnings(self, task: Task) -> Sequence[str]:
        """Return warnings of unknown releases, and of staleness and lengths that do not mean what they say."""
        work = job_of(task)
        lines = unknown_release("rl.engine_version", self.name, work.engine_version, self.framework.releases)
        role, rollout = serve_task(task, task.cluster.devices), engine_of(work.rollout.engine, "rl.rollout.engine")
        own = spec_warnings(role.spec, rollout.program) if isinstance(rollout, ServingEngine) else ()
        lines += [each.replace("serve.", "rl.rollout.") for each in own if each.startswith("serve.engine_version")]
        lines += [] if work.command else [_(NO_COMMAND, key="rl.command")]
        if (steps := work.staleness) > MOST_STEPS:
            text = _(
                "rl.staleness = {steps} is predicted as {n}: with more, the rollout hardly gets faster",
                steps=steps,
                n=MOST_STEPS,
            )
            lines.append(text)
        if work.context and work.longest > work.context:
            text = _(
                "the longest prompt and answer have {longest} tokens, more than the model's context of {context}: "
                "the rollout ends such answers before; shorten rl.answer_len, unless your command extends the context",
                longest=work.longest,
                context=work.context,
            )
            lines.append(text)
        if not work.packing and (mean := float(tokens_of(work.drawn).mean())) < LONG * work.longest:
            text = _(
                "without packing, training is predicted for samples of the mean length, {mean:,.0f} tokens: a "
                "micro-batch of the longest has {longest:,} tokens a sample, and needs as much more time and memory",
                mean=mean,
                longest=work.longest,
            )
            lines.append(text)
        return lines

    def unmodelled(self, task: Task) -> Sequence[Unmodelled]:
        """Return the settings of both roles that their engines do not predict, and a rollout without an engine."""
        work, devices = job_of(task), task.cluster.devices
        trainer = engine_of(work.trainer.engine, "rl.trainer.engine")
        settings = {knob.name for knob in trainer.knobs}
        unknown = [
            Unmodelled(name=f"rl.trainer.settings.{name}", why=UNKNOWN, time=UNKNOWN_TIME)
            for name in work.trainer.settings
            if name not in settings
        ]
        roles = {
            "rl.trainer.": train_task(task, trainer, devices, work.longest, work.optimizer_samples),
            "rl.rollout.": serve_task(task, devices),
        }
        for prefix, role in roles.items():
            engine = engine_of(role.spec.work.engine, f"{prefix}engine")
            with keys_of(prefix):
                found = engine.unmodelled(role)
            unknown += [replace(each, name=re.sub(r"\b(train|serve)\.", prefix, each.name)) for each in found]
        itself = work.command is not None and self.reading(work).generates_itself
        return (
            [*unknown, Unmodelled(name="rl.rollout by transformers", why=ITSELF, time=UNKNOWN_TIME)]
            if itself
            else unknown
        )

    # Predictions

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        axes = {knob.name: knob.axis(()) for knob in self.knobs}
        return predict(task, columns, costs, self.framework, lambda name, code: axes[name].decode(code))

    def published(self, task: Task, values: Mapping[str, KnobValue], notes: str) -> Published:
        return Published(task, dict(values))

    # Trials

    def ready(self, spec: Spec) -> None:
        work: Any = spec.work
        words = self.reading(work).command.words
        if self.distribution and (path := find_program(words[0], work.directory or ".")):
            check_version(spec, package_version(path, self.distribution))

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        task, values = platform.task, candidate.as_dict()
        work = job_of(task)
        read = self.reading(work)
        settings = {} if for_real else self._of_trial(task, folder)
        before: dict[str, Any] = {}
        neutral = {knob.name: knob.neutral for knob in self.knobs}
        for name, value in self._values(task, values, read).items():
            key, now = read.keys[name], read.value(name)
            if value != (neutral.get(name) if now is None else now):
                (before if key.before_program else settings).update(_named(key, value, read.given))
        argv = read.command.changed(settings, before)
        if dialect_of(self.name).ray and (nodes := sum(each.nodes for each in task.cluster.groups)) > 1:
            argv = commands.on_all_nodes(argv, nodes)
        threads = int(values.get(THREADS) or 1)
        environment = {f"{name}_NUM_THREADS": f"{threads}" for name in ("OMP", "MKL")} if threads > 1 else {}
        return Launch(argv=(*argv, *work.flags), folder=folder, environment=environment, directory=work.directory)

    def _values(self, task: Task, values: Mapping[str, KnobValue], read: Reading) -> dict[str, Any]:
        """Return the values of the command's settings for those of a candidate."""
        work, context = job_of(task), int(values.get("context_parallel_size") or 1)
        free = set(values) & read.keys.keys() - self.fixed(task).keys()
        found: dict[str, Any] = {name: values[name] for name in free if values[name] is not None}
        for name in found.keys() & {*importing.TOKENS}:
            found[name] //= context if read.keys[name].per_rank else 1
        if dialect_of(self.name).nested and RTP in found:
            found[RTP] *= int(values.get(RDP) or 1)
        if "memory_share" in "".join(found):
            found["rollout_memory_share"] = float(found["rollout_memory_share"])
        if "processes" in read.keys:
            ranks = task.cluster.devices // int(values.get(THREADS) or 1)
            each = ranks * int(values.get("micro_batch_size") or 1)
            found |= {"processes": ranks, "accumulated": work.optimizer_samples // each}
            if read.value("steps_per_generation"):
                found["steps_per_generation"] = work.step_samples // each
            return found
        own, apart = importing.cluster_of(read, Notes())
        groups = task.cluster.groups
        now = {"nodes": sum(each.nodes for each in groups), "devices_per_node": groups[0].devices_per_node}
        if own["devices_per_node"] not in (AUTO, now["devices_per_node"]) or own["nodes"] != now["nodes"]:
            if apart or "more_instances" in read.keys:  # other numbers of the command depend on them
                sizes = [" x ".join(str(each[name]) for name in now) for each in (own, now)]
                text = f"the command is for {sizes[0]} devices, and the plan for {sizes[1]}"
                raise LaunchError(f"{text}: change the command, and import it again")
            found |= now
        return found

    def _of_trial(self, task: Task, folder: str) -> dict[str, Any]:
        steps, work = task.spec.control.train_iters, job_of(task)
        numbers = {"steps": steps, "updates": steps * self._updates(work), "samples": steps * work.prompts}
        return {
            key: value.format(**numbers, folder=folder) if isinstance(value, str) else value
            for key, value in dialect_of(self.name).trial.items()
        }

    def _updates(self, work: RlSpec) -> int:
        """Return the number of optimizer steps in a step."""
        return work.epochs * -(-work.step_samples // work.optimizer_samples)

    def trial_notes(self, platform: Platform, candidate: Candidate | None) -> Sequence[str]:
        if candidate is None:
            return ()
        keys = ", ".join(self._of_trial(platform.task, ""))
        return (_("trials set in {key}: {words}", key="rl.command", words=keys),)

    def steps(self, task: Task, folder: str) -> Steps:
        return Steps(self._log(task, folder), limit=task.spec.control.train_iters)

    def _log(self, task: Task, folder: str) -> Log:
        dialect, work = dialect_of(self.name), job_of(task)
        return Log(folder, dialect.step, dialect.parts, self._updates(work) if dialect.per_update else 1)

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        log, control = self._log(task, folder), task.spec.control
        times = log(unfinished=True)
        warmup = warmup_of_fewer(len(times), control.warmup_iters)
        if not times[warmup:]:
            last = f"; its last line is {log.last[:200]!r}" if log.last else ""
            raise NoMetrics(f"the log of {self.name} states the times of {len(times)} steps: too few{last}")
        median = statistics.median(times[warmup:])
        parts = {name: statistics.median(each[warmup:] or each) for name, each in log.parts.items()}
        return Measurement(
            step_times_s=times[warmup:],
            step_time_s=median,
            spread_s=interquartile_range(times[warmup:]),
            tokens_per_second_per_device=job_of(task).step_tokens / median / task.cluster.devices,
            figures=parts,
            warmup_steps=warmup if len(times) < control.train_iters else None,
        )

    def answers(self, task: Task, change: str, folder: str, baseline: str) -> Answers | None:
        """Compare how far trainer and rollout are apart: in log-probabilities of the tokens of the same trial."""
        own, base = map(self._mismatch, (folder, baseline))
        if own is None or base is None:
            if change == ANSWERS[-1]:
                raise FlagError("its knobs change answers, and a log states no difference between trainer and rollout")
            return None
        text = f"log-probabilities of trainer and rollout differ by {own:.3g} instead of {base:.3g}"
        noise, unit = max(base, LEAST_MISMATCH), N_("of the engine's own noise")
        return Answers(difference=max(0.0, own - base) / noise, limit=MOST_MISMATCHES, unit=unit, text=text)

    def _mismatch(self, folder: str) -> float | None:
        """Return the mean difference between trainer and rollout that a trial's log states, or None."""
        log = Log(folder, dialect_of(self.name).step, {"mismatch": dialect_of(self.name).mismatch}, 1)
        log(unfinished=True)
        return statistics.fmean(log.parts["mismatch"]) if log.parts else None


def _named(key: Key, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of a setting with a new value: those that the command has, or else the first."""
    theirs = key.words.get(str(value), value) if key.words else value
    if isinstance(theirs, list):
        return dict(zip(key.names, theirs, strict=True))
    own = [name for name in key.names if name_of(name) in given]
    first = () if any(not name.startswith("critic.") for name in own) else key.names[:1]  # of the policy
    return dict.fromkeys((*first, *own), theirs)


NEMO_RL, OPENRLHF, SLIME, TRL, VERL = (RlEngine(name) for name in ("nemo-rl", "openrlhf", "slime", "trl", "verl"))
