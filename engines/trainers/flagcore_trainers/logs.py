"""Reads the log of a training program: step times, losses, memory, and the values in use.

The formats of known programs are facts of their sources: Megatron-LM core_v0.16 `training/training.py` (MindSpeed-LLM
prints the same line), DeepSpeed 0.19 `runtime/engine.py` and `utils/timer.py`, torchtitan 0.3 `components/metrics.py`,
and transformers 5 `trainer_callback.py` (`PrinterCallback`).
"""

import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone

import regex
from flagcore_training.reading import MAX_MIB, LogFiles, finite_number

from flagcore.domain.spec import Task
from flagcore_trainers.program import UNITS

TIMESTAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d{3}"
NUMBER = r"[\d.,]+(?:[eE][-+]?\d+)?"
FORMATS: Mapping[str, str] = {
    "megatron": (
        rf"iteration\s+(?P<step>\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\):\s*(?P<ms>{NUMBER})"
        r"(?:.*?lm loss:\s*(?P<loss>[^\s|]+))?(?:.*?grad norm:\s*(?P<norm>[^\s|]+))?"
    ),
    "deepspeed": rf"\[(?P<at>{TIMESTAMP})\].*?\[Rank 0\] step=(?P<step>\d+), skipped=",
    "torchtitan": (
        r"step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)(?:\s+grad_norm:\s*(?P<norm>\S+))?"
        rf"(?:\s+memory:\s*(?P<gib>{NUMBER})GiB\(\S+\))?\s+tps:\s*(?P<tokens_per_s_per_device>{NUMBER})"
    ),
    "huggingface": r"\{'loss': '?(?P<loss>[^,'}]+)'?.*?'epoch':",
}
"""The pattern of a line per step of each known program, with the groups of `LogSection.step`, or `at`.

`at` is the time of the line. DeepSpeed also prints samples per second, which are too high on an accelerator: with a
global batch of 256, a log states 74.8 where a step took 16.07 s. HF Trainer does not number its lines.
"""
MEMORY_GIB = rf"MaxMemAllocated=({NUMBER})GB"
"""The pattern of DeepSpeed's line with the peak of allocated memory."""
TIMED = tuple(name for name, pattern in FORMATS.items() if re.compile(pattern).groupindex.keys() & {*UNITS})
"""The formats whose lines have times. The lines of other formats are timed by `flagcore_trainers.clock`."""
ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\ufeff")
"""Colours of a terminal."""
ARRIVAL = re.compile(r"^\[at (\d+\.\d{6})\] ?")
"""The prefix that `flagcore_trainers.clock` adds to a line: the seconds at which the line arrived."""
GIB = 1 << 30
SEARCH_SECONDS, SLOW_SECONDS, MAX_SLOW_SECONDS = 1.0, 0.02, 20.0
"""The longest time of a pattern on one line, the time from which a line is slow, and the longest time of all slow
lines. Patterns of users may go back and forth without end."""


class TooSlow(Exception):
    """The error for a pattern that exceeds its time limit on a line."""


def _search(pattern: str, line: str) -> "regex.Match[str] | None":
    """Return the first match in a line, or None. The standard library has no time limit. Raises TooSlow."""
    try:
        return regex.search(pattern, line, timeout=SEARCH_SECONDS)
    except TimeoutError:
        problem = f"the pattern {pattern} takes more than {SEARCH_SECONDS:g} s on the line {line[:200]!r}"
        raise TooSlow(f"{problem}; repeat no group that contains a repeat") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """The patterns of one program.

    `steps`: alternatives for a line per step. `printed`: the pattern of the line with each knob's value.
    """

    steps: Sequence[str]
    loss: str | None = None
    memory_gib: str = MEMORY_GIB
    printed: Mapping[str, str] = field(default_factory=dict)


class Log:
    """What the log files of one trial state so far. The global batch of the task converts rates to seconds.

    `times`: the seconds of each step by its number, in the order of the lines. If several ranks print a step, its first
    line counts. `unusable`: stated times and rates that are no finite numbers above 0. `values`: the values in use by
    knob, as text. `last`: the last line that is not empty. `too_slow`: the message about a pattern that exceeds its
    time limit, after which no line is read; empty if there is none.
    """

    def __init__(self, folder: str, task: Task, patterns: Patterns) -> None:
        self.patterns, self.devices, self.steps = patterns, task.cluster.devices, task.spec.control.train_iters
        self.samples = task.spec.train.global_batch_size
        self.tokens = self.samples * task.spec.train.seq_length
        self.times: dict[str, float] = {}
        self.unusable: list[str] = []
        self.losses: list[float | None] = []
        self.norms: list[float | None] = []
        self.peak_bytes: int | None = None
        self.values: dict[str, str] = {}
        self.last = self.too_slow = ""
        self._slow_s = 0.0
        self._used: str | None = None
        self._arrived: tuple[float, str] | None = None
        self._seen: set[str] = set()
        self._files = LogFiles(folder, self.add)

    def __call__(self, *, unfinished: bool = False) -> tuple[float, ...]:
        """Read what was added since the last call, and return the step times.

        If none of several stated times is usable, they are infinite, so that the trial ends after its steps. If a
        pattern is too slow, it ends at once. `unfinished`: whether to read a last line without a line break, too.
        """
        self._files.read(unfinished=unfinished)
        if self.too_slow:
            return (math.inf,) * self.steps
        unusable = len(self.unusable)
        return tuple(self.times.values()) or (math.inf,) * (unusable if unusable > 1 else 0)

    @property
    def note(self) -> str:
        """The log whose end was not read, if any, to be added to a message."""
        return self._files.note

    def add(self, line: str) -> None:
        """Read one line. The first format that matches a line is the format of the whole log."""
        if self.too_slow:
            return
        start = time.monotonic()
        try:
            self._add(line)
        except TooSlow as error:
            self.too_slow = str(error)
        seconds = time.monotonic() - start
        self._slow_s += seconds if seconds > SLOW_SECONDS else 0.0
        if self._slow_s > MAX_SLOW_SECONDS and not self.too_slow:
            problem = f"the patterns take {seconds:.2g} s on the line {line[:200]!r}, and {self._slow_s:.0f} s in total"
            self.too_slow = f"{problem}; repeat no group that contains a repeat"

    def _add(self, line: str) -> None:
        line = line.strip("\0")
        if 3 * line.count("\0") > len(line):  # UTF-16
            line = line.replace("\0", "")
        if "\0" in line:  # a damaged line: its numbers may be parts of others
            return
        line = ANSI.sub("", line)
        at = ARRIVAL.match(line)
        text = line[at.end() :] if at else line
        self.last = text.strip() or self.last
        for pattern in [self._used] if self._used else self.patterns.steps:
            if match := _search(pattern, text):
                self._used = pattern
                self._add_step(match.groupdict(), float(at[1]) if at else None)
                break
        if self.patterns.loss and (found := _search(self.patterns.loss, text)):
            self.losses.append(_number(found[1]))
        if found := _search(self.patterns.memory_gib, text):
            self._add_memory(found[1])
        for knob, pattern in self.patterns.printed.items():
            if knob not in self.values and (found := _search(pattern, text)):
                self.values[knob] = found[1]

    @property
    def matched(self) -> bool:
        """Whether a line of a step was read."""
        return self._used is not None

    def _add_step(self, groups: Mapping[str, str | None], at: float | None) -> None:
        self._add_memory(groups.get("gib"))
        number = groups.get("step") or f"line {len(self._seen)}"
        if number in self._seen:
            return
        self._seen.add(number)
        seconds, before = self._seconds(groups), self._arrived
        at = _clock_seconds(groups.get("at")) or at
        if at is not None:
            self._arrived = (at, number)
            if seconds is None and before is not None:
                seconds = (at - before[0]) / _steps_between(before[1], number)
        if seconds is not None and seconds > 0:
            self.times[number] = seconds
        elif _number(groups.get("s")) and _number(groups.get("ms")):
            self.unusable.append(f"{groups['s']} s and {groups['ms']} ms")
        elif stated := next((text for unit in UNITS[1:] if (text := groups.get(unit))), None):
            self.unusable.append(stated)
        if (loss := groups.get("loss")) is not None:
            self.losses.append(_number(loss))
            self.norms.append(_number(groups.get("norm")))

    def _seconds(self, groups: Mapping[str, str | None]) -> float | None:
        amounts = {"s": 1.0, "ms": 1e-3}
        found = [number * amounts[unit] for unit in amounts if (number := _number(groups.get(unit))) is not None]
        if found:
            return found[0] if math.isclose(min(found), max(found), rel_tol=0.1) else None
        sizes = {"samples_per_s": self.samples, "tokens_per_s": self.tokens}
        for unit, size in {**sizes, "tokens_per_s_per_device": self.tokens / self.devices}.items():
            if rate := _number(groups.get(unit)):
                return size / rate
        return None

    def _add_memory(self, gib: str | None) -> None:
        number = _number(gib)
        if number and number * 1024 < MAX_MIB:
            self.peak_bytes = max(self.peak_bytes or 0, int(number * GIB))


def _steps_between(before: str, number: str) -> int:
    """Return the number of steps from one line to the next. It is 1 if the lines do not number their steps."""
    if not (before.isdecimal() and number.isdecimal()):
        return 1
    return max(int(number) - int(before), 1)


def _clock_seconds(text: str | None) -> float | None:
    """Return the seconds of a timestamp on the axis of `datetime.timestamp`, or None if it is none."""
    with suppress(ValueError):
        return datetime.fromisoformat((text or "").replace(",", ".")).replace(tzinfo=timezone.utc).timestamp()
    return None


THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?([eE][-+]?\d+)?")
"""A number whose commas separate thousands. A comma in others is a decimal one."""


def _number(text: str | None) -> float | None:
    text = (text or "").strip(" ,")
    return finite_number(text.replace(",", "" if THOUSANDS.fullmatch(text) else "."))
