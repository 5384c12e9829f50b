"""The user's measured choices of variables as files, and the knobs that they become."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flagcore.domain.chip import Source, normalize_name
from flagcore.domain.files import data_folder, save
from flagcore.domain.knob import WHOLE_STEP, Effect, Factor, Knob, Requirement
from flagcore.errors import RunError
from flagcore_vendorkit.fields import read_record

SCHEMA = 1
CALIBRATED = "calibrated"
"""The value of a knob that sets the choice. Without it, the software's defaults apply."""

LIES = (1.25, 1.03)
"""Bounds of the factor on a step, as the share of the predicted gain, and as a factor: sums of kernels are not steps,
which overlap, and wait for launches. Chosen by hand; trials confirm."""


def predicted(gain: float) -> tuple[float, float, float]:
    """Return the factor on a time of which a share is gained, with its bounds."""
    return 1.0 - gain, max(1.0 - LIES[0] * gain, 0.05), LIES[1]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A measured choice of variables for a job of an engine on a chip.

    `knob` compares it with the defaults. `environment` sets it; it is empty if the defaults are the best. `time` is the
    predicted factor on `part` of a step (`Effect.part`), with its bounds. `rows` are the results, as plain data.
    `file` is the choice in the software's own format; empty if it has none.
    """

    knob: str
    chip: str
    engine: str
    job: str
    date: str
    how: str
    environment: Mapping[str, str]
    time: tuple[float, float, float]
    rows: tuple[Mapping[str, Any], ...]
    part: str = WHOLE_STEP
    file: str = ""

    def save(self) -> Path:
        """Save the choice, and the file of the software beside it. Return the path. Raises RunError."""
        path = _folder() / f"{self.knob}--{normalize_name(self.chip)}--{self.engine}.json"
        if self.file:
            save(path.with_suffix(".yaml"), self.file)
        save(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, ensure_ascii=False) + "\n")
        return path

    def as_knob(self) -> Knob:
        """Return the knob. Knobs that are one of its variables must be neutral where it is set."""
        value, low, high = self.time
        others = {name.lower() for name in self.environment} - {self.knob}
        factor = Factor(value=value, low=low, high=high)
        return Knob(
            name=self.knob,
            kind="word",
            help=f"The defaults, or the choice that {self.how} found fastest.",
            effects={CALIBRATED: Effect(part=self.part, time=factor, environment=dict(self.environment))},
            requires=tuple(Requirement(knob=name, one_of=(None,)) for name in sorted(others)),
            source=Source(kind="measured", detail=f"{self.how}, {self.job}, {self.date}"),
        )


def choices(warn: Callable[[str], object]) -> Iterator[tuple[Path, Choice]]:
    """Yield all saved choices with their paths. `warn`: called with the reason for each file that cannot be read."""
    for path in sorted(_folder().glob("*.json")):
        try:
            yield path, read_record(Choice, path, SCHEMA, "choice", "measure it again")
        except RunError as error:
            warn(str(error))


def _folder() -> Path:
    return data_folder() / "choices"
