"""The user's choices of operators as files, and the knobs that they become: the plugin `operator_choices`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flagcore_vendorkit.fields import build, read_file

from flagcore.domain.chip import Chip, Source, normalize_name
from flagcore.domain.files import data_folder, read_regular, save
from flagcore.domain.knob import Effect, Factor, Knob
from flagcore.errors import RunError, SpecError
from flagcore.hooks import hookimpl

SCHEMA = 1
CALIBRATED = "calibrated"
"""The value of a knob that sets the choice. Without it, the library's defaults apply."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A measured choice of one library's operators for a job of an engine on a chip.

    `name` is that of the library. `environment` sets it. `time` is the predicted factor on the time of a step, with
    its bounds. `rows` are the results of the operators, as plain data. `file` is the choice in the library's own
    format; empty if it has none.
    """

    name: str
    chip: str
    engine: str
    job: str
    date: str
    how: str
    environment: Mapping[str, str]
    time: tuple[float, float, float]
    rows: tuple[Mapping[str, Any], ...]
    file: str = ""

    @property
    def knob(self) -> str:
        """The name of the knob that compares the choice with the library's defaults."""
        return f"{self.name}_operators"

    def save(self) -> Path:
        """Save the choice, and the file of the library beside it. Return the path. Raises RunError."""
        path = _folder() / f"{self.name}--{normalize_name(self.chip)}--{self.engine}.json"
        if self.file:
            save(path.with_suffix(".yaml"), self.file)
        save(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, ensure_ascii=False) + "\n")
        return path


def choices() -> tuple[tuple[Path, Choice], ...]:
    """Return all saved choices with their paths. Raises RunError if a file cannot be read."""
    return tuple((path, _read(path)) for path in sorted(_folder().glob("*.json")))


def _folder() -> Path:
    return data_folder() / "operators"


def _read(path: Path) -> Choice:
    try:
        data = json.loads(read_regular(path))
        if data.pop("schema") != SCHEMA:
            raise ValueError(f"the schema is not {SCHEMA}")
        choice: Choice = build(Choice, data, str(path))
    except (SpecError, OSError, ValueError, KeyError, AttributeError) as error:
        raise RunError(f"cannot read the choice {path} ({error}); run `flag operators`, or delete the file") from None
    return choice


@hookimpl
def flagcore_knobs(chip: Chip, engine: str) -> Sequence[Knob] | None:
    """Return a knob for each library with a saved choice for this engine and chip."""
    found = [each for _, each in choices() if each.engine == engine and chip.has_name(each.chip)]
    return [_knob(each) for each in found if each.environment] or None


def _knob(choice: Choice) -> Knob:
    value, low, high = choice.time
    effect = Effect(time=Factor(value=value, low=low, high=high), environment=dict(choice.environment))
    return Knob(
        name=choice.knob,
        kind="word",
        help=f"The operators of {choice.name}: its defaults, or those that `flag operators` found fastest.",
        effects={CALIBRATED: effect},
        source=Source(kind="measured", detail=f"{choice.how}, {choice.job}, {choice.date}"),
    )


def avoided(package: str, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return a vendor's reasons against implementations, by operator, from `operators.yaml` of its plugin's package.

    `names`: the libraries whose entries apply. Raises SpecError if the file is not valid.
    """
    content, found = read_file(package, "operators.yaml") or {}, dict[str, dict[str, str]]()
    for entry in build(tuple[Avoided, ...], content.get("avoid") or [], f"{package}/operators.yaml", "avoid"):
        for operator in entry.operators if entry.name in names else ():
            found.setdefault(operator, {})[entry.implementation] = f"{entry.why} ({entry.source.detail})"
    return found


@dataclass(frozen=True, kw_only=True)
class Avoided:
    """An implementation that a vendor, or users of its chips, found wrong, broken or slow for some operators.

    `name`: that of the library.
    """

    name: str
    implementation: str
    operators: tuple[str, ...]
    why: str
    source: Source
