"""Explains why a load did not end in the time of its trial, and which settings would let it end."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flagcore_serving.job import Load
from flagcore_serving.load.result import FEWEST_ANSWERS, Progress

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
