"""Reads the files of a plugin that describe engines: `engines.yaml`, `environment.yaml`, `knobs.yaml`, `quirks.yaml`.

`maturity.yaml`, the evidence of the plugin (docs/plugin-data.md), is read here as well.

`engines.yaml` describes how training engines (`train`), serving engines (`serve`) and engines of reinforcement learning
(`rl`, by default as `train`) run on a vendor's chips. The keys of its sections are the fields of
`flagcore.domain.engine.EngineSupport`; `device_type` (torch's name of the devices) and `distributed_backend`
(torch.distributed's name) are required. Facts about single engines are in `quirks.yaml`.

`environment.yaml` contains the environment variables of a vendor's software, `knobs.yaml` the knobs that it adds to an
engine, and `quirks.yaml` known problems. docs/plugin-data.md describes their keys.

Each entry has its `source` and may name its `engine` (or `engines`), `kinds` (`train`, `serve`, `rl`), `chips` and
`versions` of the engine (`">=0.11,<0.13"`); a missing key means all. An unknown release is the newest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated

from annotated_types import Ge, MinLen
from pydantic import Field

from flagcore.domain import engine
from flagcore.domain.chip import Source, Support
from flagcore.domain.engine import EngineSupport
from flagcore.domain.knob import Effect, Factor, Knob
from flagcore.domain.launch import FailurePattern
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore.i18n import N_, Message
from flagcore_vendorkit.fields import KINDS, Content, Scope, build, entries, finish, read_as, read_file

FILE = "engines.yaml"
UNCALIBRATED = "uncalibrated"
OF_WIDTHS = ("compared", UNCALIBRATED)
"""Overheads that are only factors on intervals. A calibration replaces UNCALIBRATED."""
SUPPORT = {True: Support.YES, False: Support.IMPOSSIBLE, None: Support.UNKNOWN}
"""The meaning of the values of `works` in a file."""


@cache
def read_engines(package: str) -> Mapping[str, EngineSupport]:
    """Return the engine support by kind of engine, or none without a file. Raises SpecError for an invalid file."""
    content, file = read_file(package, FILE) or {}, f"{package}/{FILE}"
    support_by_kind = {}
    for kind in KINDS:
        if kind in content:
            section = build(dict[str, object], content.pop(kind), file, kind)
            works = build(bool | None, section.pop("works", None), file, f"{kind}.works")
            support_by_kind[kind] = build(EngineSupport, {"support": SUPPORT[works].value, **section}, file, f"{kind}.")
    finish(content, file, f"the sections are {', '.join(KINDS)}")
    if "train" in support_by_kind:  # no run has been reported of a kind that the file does not have
        support_by_kind.setdefault("rl", replace(support_by_kind["train"], support=Support.UNKNOWN, stack=None))
    return support_by_kind


VariableName = Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")]


@dataclass(frozen=True, kw_only=True)
class Variable(Scope):
    """One environment variable. If `value` is None, the variable is documented but not set for trials."""

    name: VariableName
    meaning: Annotated[str, MinLen(1)]
    source: Source
    value: str | None = None
    used: str = ""
    condition: str = ""
    several_nodes: bool = False
    unless: str = ""
    overridden_by: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) == (self.used == ""):
            raise ValueError("needs `value` or `used`, and not both")

    def applies_to(self, task: Task | None) -> bool:
        """Return whether the variable's conditions hold for a task. None means a task on one node without settings."""
        nodes = sum(group.nodes for group in task.cluster.groups) if task else 1
        settings = task.spec.work.settings if task else {}
        return (nodes > 1 or not self.several_nodes) and not (self.unless and settings.get(self.unless))


@dataclass(frozen=True)
class Variables:
    """The content of an `environment.yaml`."""

    variables: tuple[Variable, ...] = ()


@cache
def read_variables(package: str) -> tuple[Variable, ...]:
    """Return the variables in a plugin's file, or none without a file. Raises SpecError for an invalid file."""
    return read_as(Variables, package, "environment.yaml").variables


KNOBS = "knobs.yaml"
_SAME = ("name", "label", "claim", "answers", "source")
KEYS = {**dict(zip(_SAME, _SAME, strict=True)), "default": "neutral", "says": "help", "effect": "effect_source"}
KEYS |= {"needs": "requires", "of_experts": "experts_only", "choices": "effects"}
"""The fields of a knob by the keys of the file."""
SCOPE = ("engine", "engines", "kinds", "chips", "versions")
GUESS = Factor(low=0.95, high=1.05)


@dataclass(frozen=True, kw_only=True)
class VariableKnob(Scope):
    """An environment variable whose values a space may compare. The knob has its name in lower case.

    Without `time`, a value is assumed to change up to 5% of a step in either direction. `risk` is what it may break.
    A variable with `several_nodes` changes nothing on one node.
    """

    variable: VariableName
    values: Annotated[tuple[int | str, ...], MinLen(1)]
    says: Annotated[str, MinLen(1)]
    risk: Annotated[str, MinLen(1)]
    source: Source
    time: Factor = GUESS
    several_nodes: bool = False

    @property
    def knob(self) -> Knob:
        effects: dict[KnobValue, Effect] = {
            each: Effect(time=self.time, environment={self.variable: str(each)}) for each in self.values
        }
        method = N_("no figure is published; a guess around none, until `flag calibrate --collectives` measures it")
        return Knob(
            name=self.variable.lower(),
            help=self.says,
            effects=effects,
            source=self.source,
            claim=Message("no figure is given; risk: {risk}", risk=Message(self.risk)),
            effect_source=Source(kind="estimated", detail=method),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A knob and its scope: the engine, chips and releases that have it.

    `is_screened`: whether `flag calibrate --collectives` compares its values.
    """

    scope: Scope
    knob: Knob
    is_screened: bool = False


@cache
def all_knobs(package: str) -> tuple[Listed, ...]:
    """Return the knobs in a plugin's file, or none without a file. Raises SpecError for an invalid file."""
    content, file = read_file(package, KNOBS) or {}, f"{package}/{KNOBS}"
    listed = []
    for section in ("collectives", "variables"):
        for row in build(tuple[VariableKnob, ...], content.pop(section, None) or [], file, section):
            is_screened = section == "collectives" and not row.several_nodes
            listed.append(Listed(scope=row, knob=row.knob, is_screened=is_screened))
    for path, entry in entries(content, "knobs", file):
        scope: Scope = build(Scope, {key: entry.pop(key) for key in SCOPE if key in entry}, file, path)
        if not scope.engines:
            raise SpecError(file=file, key=f"{path}engine", problem="is missing")
        effects = dict(_effect(choice, file, path + at) for at, choice in entries(entry, "choices", file))
        knob: Knob = build(Knob, entry, file, path, KEYS)
        listed.append(Listed(scope=scope, knob=replace(knob, effects=effects)))
    finish(content, file)
    return tuple(listed)


def _effect(choice: Content, file: str, path: str) -> tuple[KnobValue, Effect]:
    value: KnobValue = build(bool | int | str, choice.pop("value", None), file, f"{path}value")
    time = choice.get("time")
    if isinstance(time, dict) and "part" in time:
        choice["part"] = time.pop("part")
    return value, build(Effect, choice, file, path)


@dataclass(frozen=True, kw_only=True)
class Quirk(Scope):
    """One entry of a `quirks.yaml`."""

    source: Source


@dataclass(frozen=True, kw_only=True)
class Report(Quirk):
    """A report on whether an engine works. Fields that are None or empty have the value in `engines.yaml`."""

    reason: str = ""
    works: bool | None = None
    install: str = ""
    preload: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ServerOverheads(Quirk):
    """Overheads of a server that differ on a chip: fields of `Overheads` of `flagcore_serving/model/work.py`.

    None is the default of the field.
    """

    values: Mapping[str, float | bool | Mapping[str, float] | None]


@dataclass(frozen=True, kw_only=True)
class RefusedValues(engine.RefusedValues, Quirk):
    """Values of a knob or setting that do not work."""

    def __post_init__(self) -> None:
        if not self.values and self.above is None:
            raise ValueError("has neither `values` nor `above` with a number")


@dataclass(frozen=True, kw_only=True)
class ForcedSetting(engine.ForcedSetting, Quirk):
    """A setting with only one value that works."""


@dataclass(frozen=True, kw_only=True)
class PreferredSetting(engine.PreferredSetting, Quirk):
    """A setting that trials get if the user does not set it."""


@dataclass(frozen=True, kw_only=True)
class Warmup(Quirk):
    """The number of first steps or requests that are not measured."""

    count: Annotated[int, Ge(1)]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Failure(FailurePattern, Quirk):
    """A pattern of a log line that explains why a trial failed, with an `example` of such a line."""

    example: str


@dataclass(frozen=True, kw_only=True)
class Note(Quirk):
    """A sentence for users that no other entry can express."""

    note: str


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """The entries of a `quirks.yaml`."""

    support: tuple[Report, ...] = ()
    overheads: tuple[ServerOverheads, ...] = ()
    refused: tuple[RefusedValues, ...] = ()
    forced: tuple[ForcedSetting, ...] = ()
    preferred: tuple[PreferredSetting, ...] = ()
    warmup: tuple[Warmup, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[Note, ...] = ()


@cache
def read_quirks(package: str) -> Quirks:
    """Return the quirks in a plugin's file, or none without a file. Raises SpecError for an invalid file."""
    return read_as(Quirks, package, "quirks.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement about what works on some chips, and its evidence.

    `by`: the tool that gave the evidence, or the software and the date of the run.
    `files`: transcripts, as file names.
    """

    what: str
    chips: tuple[str, ...]
    by: str = ""
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Maturity:
    """The content of a `maturity.yaml`: a plugin's claims by kind of evidence."""

    run_on_hardware: tuple[Claim, ...] = ()
    checked_on_transcripts: tuple[Claim, ...] = ()
    from_documents: tuple[Claim, ...] = ()
    not_checked: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """The strongest kind of evidence in one word: hardware, transcripts or documents."""
        if self.run_on_hardware:
            return "hardware"
        return "transcripts" if self.checked_on_transcripts else "documents"


EVIDENCE = {"run_on_hardware": ("software", "date"), "checked_on_transcripts": ("tool",), "from_documents": ()}
"""The sections of a `maturity.yaml`, and the keys that their entries require besides `what`, `chips` and `files`."""


@cache
def read_maturity(package: str) -> Maturity | None:
    """Return the content of a `maturity.yaml`, or None without a file. Raises SpecError for an invalid file."""
    content, file = read_file(package, "maturity.yaml"), f"{package}/maturity.yaml"
    if content is None:
        return None
    for section, keys in EVIDENCE.items():
        claims = []
        for path, entry in entries(content, section, file):
            texts = [entry.pop(key, None) for key in keys]
            for key, value in zip(keys, texts, strict=True):
                build(str, value, file, f"{path}{key}")
            claims.append({**entry, "by": ", ".join(texts)})
        content[section] = claims
    maturity: Maturity = build(Maturity, content, file)
    return maturity
