"""Reads the times of the steps in the log of a trial."""

import re
from collections.abc import Mapping

from flagcore_training.reading import LogFiles

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
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
