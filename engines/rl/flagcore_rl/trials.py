"""Trials: the user's command with the settings of a candidate, for a few steps whose times its log states."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_importers.dialect import Key, name_of
from flagcore_importers.programs import check_version, find_program, package_version
from flagcore_training.reading import FAILURES, LogFiles
from flagcore_vendorkit.metrics import NoMetrics, interquartile_range

from flagcore.contracts import Commands, Engine, Platform, Steps
from flagcore.domain.knob import Knob
from flagcore.domain.launch import Launch, Start
from flagcore.domain.space import BoolArray, Candidate, Columns, KnobValue, Rule
from flagcore.domain.spec import ImportNote, Spec, Task
from flagcore.domain.steps import warmup_of_fewer
from flagcore.domain.trial import Measurement
from flagcore.errors import SpecError
from flagcore.i18n import Message, _
from flagcore_rl import importing
from flagcore_rl.commands import dialect_of
from flagcore_rl.importing import Reading
from flagcore_rl.job import RlSpec, job_of
from flagcore_rl.roles import DEVICES, ROLLOUT, THREADS
from flagcore_rl.rules import RDP, RTP

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
LONGEST_LINE = 1 << 16
"""Characters of a line that are read: verl and slime print all figures of a step in one line."""
NUMBER = r"'?[:=]? *'?([\d.]+(?:e[+-]?\d+)?)"
"""What follows the name of a time in a log, in the words of any of the frameworks."""


class RlCommands(Commands):
    """Reads commands of the framework `name`."""

    def __init__(self, name: str, knobs: Sequence[Knob]) -> None:
        self.name, self.knobs = name, knobs

    def role(self, command: Sequence[str], directory: str) -> str | None:
        return "" if importing.starts(self.name, command) else None

    def read(self, start: Start, directory: Path, model: str | None) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        return importing.spec_of(self.name, start, directory, model, self.knobs)


class UserCommand(Engine):
    """Changes and runs commands of a framework."""

    kind = "rl"
    failures = FAILURES

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
        if read.generates_itself:
            idle |= {name for name in read.keys if name.startswith(ROLLOUT)}
        settable = {*read.keys, *([THREADS] if "processes" in read.keys else [])} - idle
        return {knob.name: (own.get(knob.name, knob.neutral),) for knob in self.knobs if knob.name not in settable}

    def rules(self, task: Task) -> tuple[Rule, ...]:
        work = job_of(task)
        if work.packing:
            return ()

        def broken(columns: Columns) -> BoolArray:
            shared = np.ones_like(columns["micro_batch_size"])
            for name in (
                "tensor_model_parallel_size",
                "context_parallel_size",
                "pipeline_model_parallel_size",
                THREADS,
            ):
                shared = shared * np.maximum(columns.get(name, shared), 1)
            trainers = task.cluster.devices - np.maximum(columns.get(DEVICES, 0), 0)
            ranks = np.maximum(trainers // shared, 1)
            return np.asarray(work.optimizer_samples % (columns["micro_batch_size"] * ranks) != 0)

        text = "{micro_batch_size} times the replicas must divide the {samples} samples of an optimizer step"
        message = Message(text, micro_batch_size="micro_batch_size", samples=work.optimizer_samples)
        return (Rule(name="whole_micro_batches", knobs=("micro_batch_size",), message=message, broken=broken),)

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


def _named(key: Key, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of a setting with a new value: those that the command has, or else the first."""
    theirs = key.words.get(str(value), value) if key.words else value
    if isinstance(theirs, list):
        return dict(zip(key.names, theirs, strict=True))
    own = [name for name in key.names if name_of(name) in given]
    first = () if any(not name.startswith("critic.") for name in own) else key.names[:1]  # of the policy
    return dict.fromkeys((*first, *own), theirs)


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
