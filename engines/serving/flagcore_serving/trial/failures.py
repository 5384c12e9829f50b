"""Classifies the failures of a trial, and finds the first error in the engine's log.

Explains why a load did not end in the time of its trial, and which settings would let it end."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flagcore.domain.files import open_regular
from flagcore.domain.launch import LONGEST_REASON, FailurePattern, first_match
from flagcore.domain.trial import TrialState
from flagcore_serving.job import Load
from flagcore_serving.load.result import FEWEST_ANSWERS, Progress

PREFIXES = {
    TrialState.OUT_OF_MEMORY: "out of memory",
    TrialState.INVALID: "invalid configuration",
    TrialState.TIMED_OUT: "timed out",
    TrialState.FAILED: "failed",
}
"""The beginning of the last line on stderr, by the state of the trial."""
PATTERNS = tuple(FailurePattern(pattern=rf"^{words}:", state=state) for state, words in PREFIXES.items())

HEAD_BYTES, TAIL_BYTES = 4 << 20, 1 << 20
"""Maximum number of bytes that are read at the start of a log and at its end."""
MAX_LINE = 2000
QUIET_SECONDS, LONGEST_SECONDS = 0.5, 5.0
NAMED_ERROR = re.compile(r"(?<![A-Za-z_.])[A-Za-z_.]*(Error|Exception)\b(: |$)")
ANY_ERROR = re.compile(r"\b(error|fatal|abort(ed)?|terminate called|failed|core dumped)\b", re.IGNORECASE)
HARMLESS = re.compile(
    r"\b(WARNING|WARN|INFO|DEBUG)\b|Warning: |^\s*(File \"|raise |at /)"
    r"|(?i:\b(falling back|ignored|ignoring|deprecated|skipping|retrying|no errors)\b)"
)
"""Lines that look like errors but are harmless, or only locate an error."""


class TrialFailure(Exception):
    """The trial ended without metrics. `state`: the class of the failure. The exception's text is one line."""

    def __init__(self, state: TrialState, message: str) -> None:
        self.state = state
        super().__init__(message)

    def __str__(self) -> str:
        return f"{PREFIXES[self.state]}: {one_line(self.args[0])}"


def one_line(text: str) -> str:
    """Return `text` as one line, truncated to the maximum length of a reason."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())[: LONGEST_REASON - 30]


def log_text(file: Path, begin: int = 0) -> str:
    """Return a log after its first `begin` bytes, or "" if there is no file. The middle of a long log is removed."""
    try:
        with open_regular(file) as log:
            log.seek(begin)
            text = log.read(HEAD_BYTES)
            skipped = os.fstat(log.fileno()).st_size - begin - HEAD_BYTES
            if skipped > 0:
                log.seek(begin + HEAD_BYTES + max(0, skipped - TAIL_BYTES))
                text += b"\n" + log.read(TAIL_BYTES)
            return text.decode("utf-8", errors="replace")
    except OSError:
        return ""


def wait_until_quiet(file: Path) -> None:
    """Wait until nothing has been written to a log for QUIET_SECONDS, but at most LONGEST_SECONDS.

    Some engines (llama.cpp) write their log in a separate thread: when they answer, lines may still be missing.
    """
    end = time.monotonic() + LONGEST_SECONDS
    while file.exists() and time.time() - file.stat().st_mtime < QUIET_SECONDS and time.monotonic() < end:
        time.sleep(0.05)


def first_error(log: str, patterns: Sequence[FailurePattern]) -> tuple[TrialState | None, str]:
    """Return the state and the line of the first error in a log.

    The line is, in order of preference: a match of a pattern, out-of-memory patterns first; the first line with an
    exception; a match of a weak pattern; the first line that mentions an error; the last line. The state is None if no
    pattern matches.
    """
    lines = [line[:MAX_LINE] for line in filter(None, map(str.strip, log.splitlines()))]
    weak_patterns = [each for each in patterns if each.weak]
    suspects = [line for line in lines if not HARMLESS.search(line)]
    causes = [line for line in suspects if not first_match([line], weak_patterns)]
    for tried, searched, error_pattern in (
        ([each for each in patterns if not each.weak], causes, NAMED_ERROR),
        (weak_patterns, suspects, ANY_ERROR),
    ):
        if found := first_match(lines, tried):
            pattern, match = found
            return pattern.state, match.string + (f" ({pattern.advice})" if pattern.advice else "")
        if named := next(filter(error_pattern.search, searched), None):
            return None, named
    return None, suspects[-1] if suspects else ""


def server_failure(
    server: str, ending: str, log: Path, patterns: Sequence[FailurePattern], since: int = 0
) -> TrialFailure:
    """Return the failure of a server that ended, classified by its log.

    `ending`: how it ended, with its exit code or signal. `since`: the length of the log when the server became healthy;
    errors after it take precedence over errors during the start.
    """
    state, line = None, ""
    for begin in dict.fromkeys((since, 0)):
        text = log_text(log, begin)
        state, line = first_error(text, patterns)
        if state is not None or NAMED_ERROR.search(line) or ANY_ERROR.search(line):
            break
    has_error = state is not None or NAMED_ERROR.search(line) or ANY_ERROR.search(line)
    quote = f"; its log{'' if has_error else ' names no error, and ends'}: {line}" if line else f"; {log.name} is empty"
    if state is None and ending.endswith("signal 9"):
        return TrialFailure(TrialState.OUT_OF_MEMORY, f"{server} {ending}: probably killed by the system{quote}")
    return TrialFailure(state if state in PREFIXES else TrialState.FAILED, f"{server} {ending}{quote}")


CODES = {TrialState.FAILED: 1, TrialState.INVALID: 2, TrialState.OUT_OF_MEMORY: 3, TrialState.TIMED_OUT: 4}


def report(failure: TrialFailure) -> int:
    """Print a failure as the last line on stderr, and return the program's exit code."""
    print(failure, file=sys.stderr, flush=True)
    return CODES[failure.state]


END_SECONDS = 5.0
"""Maximum seconds of a trial's time limit that are reserved to stop its servers and to report."""
END_SHARE = 0.1
"""Maximum share of a trial's time limit that is reserved for its end. Chosen by hand: repeats at the end of a search
have limits of seconds."""
RESERVE = 1.25
"""Ratio of the time that messages advise to the estimated time."""
LIMIT = re.compile(r"(auto_tuner\.control\.max_time\w*) = (\S+) s")
"""Matches the key and the value of a setting in the reason for a trial's time limit."""
FEWEST_ADVISED = 4
"""Minimum number of requests that messages advise."""
LONG_START = 0.5
"""Messages mention the start of the servers if it took more than this share of the trial's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The time limit of a trial.

    - `seconds`: the time that the trial had.
    - `start_s`: the seconds that its servers took to start.
    - `key`, `value_s`: the setting that limits the time, and its value in seconds. `seconds` may be only the rest of
      this time.
    """

    seconds: float
    start_s: float
    key: str = "auto_tuner.control.max_time_per_task"
    value_s: float

    @classmethod
    def of(cls, folder: Path, seconds: float, start_s: float) -> Limit:
        """Return the time limit of the trial in `folder`. The reason for the limit is read from launch.json."""
        try:
            because = str(json.loads((folder / "launch.json").read_text("utf-8"))["timeout_because"])
        except (OSError, ValueError, LookupError, TypeError):
            because = ""
        limit_match = LIMIT.search(because)
        if limit_match is None:
            return cls(seconds=seconds, start_s=start_s, value_s=seconds)
        return cls(seconds=seconds, start_s=start_s, key=limit_match[1], value_s=float(limit_match[2]))

    def no_time(self, name: str) -> str:
        """Return a message that no time is left for the load `name`."""
        return f"no time left for {name}{self._long_start}; set a higher {self.key}"

    @property
    def _long_start(self) -> str:
        is_long = self.start_s > LONG_START * self.seconds
        return f"; the start took {self.start_s:.0f} s of {self.seconds:.0f} s" if is_long else ""

    def short_of_time(
        self, progress: Progress, name: str, loads: Sequence[Load], left_s: float, predicted_s: float | None
    ) -> str:
        """Return a message about the load `name`, which did not end within its time.

        The message contains the progress, the time that all requests need, and settings with which the load would end.
        `loads`: this load and the loads after it, for which `left_s` seconds were left in total. `predicted_s`: the
        predicted mean time of an answer.
        """
        text = f"{progress.answered or 'none'} of {progress.requests} requests of {name} in {progress.seconds:.0f} s"
        if progress.each_s is not None:
            text += f", {progress.each_s:.3g} s each"
            text += f" (predicted {predicted_s:.2g} s)" if predicted_s else ""
        text += self._long_start if progress.has_tokens else f": no token arrived{self._long_start}"
        if progress.all_s is None:
            return text + (f"; set a higher {self.key}" if progress.answered else "")
        tokens = [(each.num_prompts or progress.requests) * each.output_len for each in loads]
        needed_s = progress.all_s * sum(tokens) / tokens[0]
        text += f"; all need ~{needed_s:.0f} s of {left_s:.0f} s; set {self._raised_by(RESERVE * needed_s - left_s)}"
        count = math.floor(progress.requests * left_s / (RESERVE * needed_s))
        at_once = loads[0].concurrency or 1
        count -= count % at_once if count > at_once else 0
        return text + (f" or serve.profile.num_prompts: {count}" if FEWEST_ADVISED <= count < progress.requests else "")

    def _raised_by(self, seconds: float) -> str:
        """Return the setting that gives a trial `seconds` more, with its value rounded up to two digits."""
        value = self.value_s + max(seconds, 1.0)
        unit = 10.0 ** max(0, math.floor(math.log10(value)) - 1)
        return f"{self.key}: {math.ceil(value / unit) * unit:.0f}"


def end_seconds(limit_s: float) -> float:
    """Return the seconds of a trial's time limit that are reserved to stop its servers and to report."""
    return min(END_SECONDS, END_SHARE * limit_s)


def fewest_answers(load: Load) -> int:
    """Return the minimum number of answers that a load needs for metrics.

    This is FEWEST_ANSWERS, or the number of requests in flight if that is more.
    """
    at_once = load.num_prompts if load.request_rate == math.inf else 0
    return max(FEWEST_ANSWERS, load.concurrency or at_once or 0)
