"""Reads the results of a trial: the files of the trial program, or the log of a user's own command.

Sources: Megatron-LM core_v0.16 `training/training.py` (`training_log`), `training/utils.py` (`report_memory`) and
`training/arguments.py` (`_print_args`).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flagcore_training import reading
from flagcore_vendorkit.metrics import NoMetrics

from flagcore.contracts import Steps
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.spec import Task
from flagcore.domain.steps import warmup_steps
from flagcore.domain.trial import Measurement
from flagcore_megatron.mixed.hetero import as_asked, devices_of
from flagcore_megatron.space.knobs import BY_NAME
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL, SPLIT

ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\):\s*([^\s|]+)\s*\|")
LOSS = re.compile(r"lm loss:\s*([^\s|]+)", re.IGNORECASE)
NORM = re.compile(r"grad norm:\s*([^\s|]+)", re.IGNORECASE)
NOT_FINITE = re.compile(r"number of nan iterations:\s*[1-9]|grad norm:\s*[-+]?(nan|inf)", re.IGNORECASE)
SKIPPED = re.compile(r"number of skipped iterations:\s*[1-9]")
MEMORY = re.compile(
    r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \|"
    r".*?max allocated:\s*([0-9.]+) \|.*?max reserved:\s*([0-9.]+)"
)
ARGUMENT = re.compile(r"^(?:\[\w+\]:|\d+:)?\s*([a-z_0-9]+) \.{3,}\s*(\S+|\[.*\])\s*$")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One iteration as logged. `losses` is empty if no loss was logged, and contains None for each loss that is not
    finite.

    `skipped` is whether the step did not update the weights. `norm`: that of the gradients.
    """

    seconds: float
    losses: tuple[float | None, ...]
    skipped: bool
    norm: float | None


class MegatronLog:
    """The metrics of one run: its steps by iteration, the maximum peak bytes of all ranks, and printed arguments.

    `unusable`: the logged times in milliseconds that are no finite numbers above 0, by iteration.
    """

    def __init__(self, folder: str) -> None:
        self.steps: dict[int, LoggedStep] = {}
        self.unusable: dict[int, str] = {}
        self.peak_allocated_bytes: int | None = None
        self.peak_reserved_bytes: int | None = None
        self.arguments: dict[str, str] = {}
        self.files = reading.LogFiles(folder, self._add)

    def __call__(self) -> tuple[float, ...]:
        """Read on, and return `step_times_s`.

        If no time is usable, the times are infinite, so that the trial ends after its steps.
        """
        self.files.read()
        return tuple(self.step_times_s) or (math.inf,) * len(self.unusable)

    @property
    def step_times_s(self) -> list[float]:
        """The seconds of each step, in the order of their first log lines."""
        return [step.seconds for step in self.steps.values()]

    @property
    def losses(self) -> list[float | None]:
        """The logged losses of all steps; None for a loss that is not finite."""
        return [loss for step in self.steps.values() for loss in step.losses]

    def _add(self, line: str) -> None:
        """Read one line. If several ranks print an iteration, it is added only once."""
        if step := ITERATION.search(line):
            milliseconds = reading.finite_number(step[2]) or 0.0
            if step[1].isdecimal() and milliseconds > 0.0:
                self.steps.setdefault(int(step[1]), _step(line, milliseconds / 1000))
            elif step[1].isdecimal():
                self.unusable.setdefault(int(step[1]), step[2])
        elif memory := MEMORY.search(line):
            allocated, reserved = reading.finite_number(memory[2]), reading.finite_number(memory[3])
            if allocated is not None and reserved is not None and max(allocated, reserved) < reading.MAX_MIB:
                self.peak_allocated_bytes = max(self.peak_allocated_bytes or 0, int(allocated * MIB))
                self.peak_reserved_bytes = max(self.peak_reserved_bytes or 0, int(reserved * MIB))
        elif argument := ARGUMENT.match(line):
            self.arguments.setdefault(argument[1], argument[2])


def read_logs(folder: str) -> MegatronLog:
    """Return the metrics in the logs of a trial that has ended."""
    log = MegatronLog(folder)
    log.files.read(unfinished=True)
    return log


def _step(line: str, seconds: float) -> LoggedStep:
    loss, norm, skipped = LOSS.search(line), NORM.search(line), SKIPPED.search(line) is not None
    losses: tuple[float | None, ...] = (reading.finite_number(loss[1]),) if loss else ()
    if NOT_FINITE.search(line) and not skipped:
        losses = (None,)
    return LoggedStep(
        seconds=seconds, losses=losses, skipped=skipped, norm=reading.finite_number(norm[1]) if norm else None
    )


def steps(task: Task, folder: str) -> Steps:
    """Return the steps of a running trial. A user's command is stopped after those of the trial."""
    if task.spec.train.command is None:
        return Steps(partial(reading.program_progress, folder))
    return Steps(MegatronLog(folder), limit=task.spec.control.train_iters)


def read(task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
    """Return the measurement of a trial. Raises NoMetrics if there are no metrics."""
    if task.spec.train.command is not None:
        return _read_command(task, candidate, folder)
    return reading.read_program(
        task,
        folder,
        partial=partial,
        effective=lambda values: as_asked(task, candidate, dict(_program_values(candidate, values))),
        devices=devices_of(task, candidate),
    )


def record(task: Task, folder: str) -> reading.Record:
    """Return the losses and gradient norms of a trial."""
    if task.spec.train.command is None:
        return reading.program_record(folder)
    log = read_logs(folder)
    return reading.Record(log.losses, [step.norm for step in log.steps.values()])


def _read_command(task: Task, candidate: Candidate, folder: str) -> Measurement:
    log = read_logs(folder)
    steps = list(log.steps.values())
    if not steps and (stated := next(iter(log.unusable.values()), None)):
        raise NoMetrics(f"unusable step time: the log states {stated} ms, not a finite number above 0{log.files.note}")
    if not steps:
        raise NoMetrics(f"no line of the log has the time of an iteration{log.files.note}")
    warmup = reading.warmup_of_fewer(len(steps), warmup_steps(log.step_times_s, task.spec.control.warmup_iters))
    counted = [step for step in steps[warmup:] if not step.skipped]
    if len(steps) > warmup and not counted:
        raise NoMetrics(f"all {len(steps) - warmup} steps after the warm-up were skipped: the loss scale overflows")
    return reading.measurement(
        task,
        [step.seconds for step in (*steps[:warmup], *counted)],
        warmup,
        losses=log.losses,
        peak_allocated_bytes=log.peak_allocated_bytes,
        peak_reserved_bytes=log.peak_reserved_bytes,
        effective=_command_values(candidate, log),
    )


def _program_values(candidate: Candidate, effective: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each knob and setting with which the trial program ran. Settings that the candidate
    leaves to the engine are omitted."""
    candidate_values = candidate.as_dict()
    for name, value in effective.items():
        is_setting = name in candidate_values and name in BY_NAME and BY_NAME[name].comparable
        if not is_setting:
            yield name, value
        elif value is not None and candidate_values[name] is not None:
            yield name, ",".join(sorted(value)) if isinstance(value, list) else value


def _command_values(candidate: Candidate, log: MegatronLog) -> dict[str, KnobValue]:
    """Return the values that Megatron printed for the candidate's knobs, with the types of the candidate's values.
    Megatron prints a derived split as a layout, which includes the virtual stages."""
    effective: dict[str, KnobValue] = {}
    derived = (LAYERS_PER_VIRTUAL,) if candidate.as_dict().get(SPLIT) == "balanced" else ()
    for name, candidate_value in candidate.items:
        knob = BY_NAME.get(name)
        printed = log.arguments.get(PRINTED_NAMES.get(name, name), log.arguments.get(name))
        left_open = knob is not None and knob.comparable and (candidate_value is None or knob.kind == "text")
        if printed is None or left_open or name in derived:
            continue
        if isinstance(candidate_value, bool):
            effective[name] = printed == "True"
        elif printed == "None":
            effective[name] = None
        elif not printed.startswith("["):
            effective[name] = int(printed) if printed.isdecimal() else DTYPES.get(printed, printed)
        elif "<" not in printed:  # skips a list of enum members, <CudaGraphScope...>
            effective[name] = ",".join(sorted(re.findall(r"\w+", printed)))
    if (batch := log.arguments.get("global_batch_size", "")).isdecimal():
        effective["global_batch_size"] = int(batch)
    return effective


PRINTED_NAMES = {"fp8_format": "fp8", "cuda_graph_scope": "cuda_graph_modules"}
"""Settings that Megatron prints under another name."""
DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}
