"""The section `job` of a spec: how long a job runs, what interrupts it, and how fast it saves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import Field, ValidationInfo, model_validator

from flagcore.domain.units import SECONDS, Fraction, InUnits, NoDevices, Rate, Size
from flagcore.errors import UsageError
from flagcore.i18n import N_, _
from flagcore.spec.plain_data import package_yaml, spec_error
from flagcore.spec.validate import Context, Section, checked, rule

TABLES: Mapping[str, Mapping[str, Mapping[str, Any]]] = package_yaml(__package__, "tables.yaml")
PUBLISHED = TABLES["failures"]
"""Published failure rates by name."""
FORMATS = TABLES["formats"]
"""The checkpoints of engines, and the ways to save them."""
DAY = 86_400.0
Way = Literal["sync", "parallel", "async", "memory"]


@dataclass(frozen=True, slots=True, eq=False)
class Time(InUnits):
    """Marks a time that a spec gives as a string with one of `units`: publications give hours, minutes or seconds."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        text: dict[str, Any] = InUnits.__get_pydantic_json_schema__(self, schema, handler)["anyOf"][-1]
        return text

    def _number_of(self, value: object) -> object:
        if (number := InUnits._number_of(self, value)) is value:
            raise ValueError("has no unit")
        return number


Duration = Annotated[float, Interval(gt=0, le=100_000_000), Time(SECONDS, "10min")]


class Job(Section):
    """The whole job, for `flag goodput`. Times are in seconds, rates in bytes per second; null is unknown."""

    tokens: Annotated[float, Interval(gt=0, le=1e18)] | None = None
    """Tokens to train."""
    days: Annotated[float, Interval(gt=0, le=36_500)] | None = None
    """Days that the job may take, instead of tokens."""
    device_mtbf: (
        Literal["llama3-405b", "rsc-1", "rsc-2", "bloom", "opt-175b"]
        | Annotated[float, Interval(gt=0, le=10**12), Time(SECONDS, "50000h")]
        | None
    ) = None
    """Mean time between failures of one device that end the job, or the name of a published rate; null: unknown."""
    restart_time: Duration | None = None
    """Time from a failure until training goes on, without reading the checkpoint: until it is noticed, and the start of
    the job; null: unknown, or in a run, the start of its trials."""
    spare_nodes: NoDevices | None = None
    """Nodes that replace nodes that fail; null: cluster.spares."""
    repair_time: Duration | None = None
    """Time until a node that failed can be used again; null: nodes are replaced at once."""
    process_failures: Fraction | None = None
    """Share of failures after which the node has its memory, from which saves to memory restart; null: unknown."""
    storage_bytes_per_second: Rate | None = None
    """Rate at which the storage writes and reads for the whole job; null: unknown."""
    rank_bytes_per_second: Rate | None = None
    """Highest rate of a single rank; null: not limited."""
    copy_bytes_per_second: Rate | None = None
    """Rate of copies from a device to its host; null: that of the chip."""
    saves: Annotated[list[Way], Field(min_length=1)] | None = None
    """Ways to save to choose from: sync (one replica writes), parallel (all replicas), async (in the background),
    memory (also kept in the memory of hosts); null: all of the engine, memory only with process_failures."""
    save_interval: Size | None = None
    """Steps between saves; null: the best number."""

    def about_plan(self, tokens_per_second: Sequence[float]) -> str:
        """Return the days, or the tokens, that a plan takes if nothing interrupts it."""
        if not self.tokens and not self.days:
            return ""
        if self.tokens:
            ends = sorted(self.tokens / each / DAY for each in tokens_per_second)
            text, mean = N_("~{mean} days{interval} for {given:.4g} tokens"), self.tokens / tokens_per_second[0] / DAY
        else:
            seconds = (self.days or 0.0) * DAY
            ends = sorted(seconds * each for each in tokens_per_second)
            text, mean = N_("~{mean} tokens{interval} in {given:.4g} days"), seconds * tokens_per_second[0]
        interval = _(" (80%: {low} to {high})", low=f"{ends[0]:.3g}", high=f"{ends[-1]:.3g}") if len(ends) > 1 else ""
        found = _(text, mean=f"{mean:.3g}", interval=interval, given=self.tokens or self.days)
        return _("{found}, without saves and failures: see `flag goodput`.", found=found)

    @model_validator(mode="after")
    def _is_possible(self, info: ValidationInfo[Any]) -> "Job":
        return rule(_checked).func(self, info)  # type: ignore[call-arg,no-any-return]


def _checked(job: Job, context: Context) -> Job:
    """Return a job whose keys do not contradict each other. Raises SpecError."""
    if context.given("train") is None:
        raise spec_error("", "is for training, but the spec has no section train", fix="remove it")
    if job.tokens and job.days:
        raise spec_error("days", "cannot be combined with tokens", value=job.days, fix="remove one of the two")
    if "memory" in (job.saves or ()) and job.process_failures is None:
        raise spec_error("process_failures", "is missing, but saves lists memory", fix="give a share from 0 to 1")
    engine = context.given("train", "engine")
    ways = FORMATS[engine]["ways"] if isinstance(engine, str) and engine in FORMATS else None
    if ways and (unknown := [each for each in job.saves or () if each not in ways]):
        raise spec_error("saves", f"is not a way of {engine} to save", value=unknown[0], fix=f"use {', '.join(ways)}")
    return job


class JobDocument(Section):
    """The part of a spec that `flag goodput` reads."""

    job: Job


def read_job(file: Path, data: Mapping[str, Any]) -> Job:
    """Return the job of a spec's data; without a section, all is unknown. Raises SpecError, UsageError."""
    if data.get("train") is None:
        text = N_("flag goodput is for training, but {file} has no section {section}")
        raise UsageError(_(text, file=file, section="train"))
    return checked(JobDocument, {"job": data.get("job", {})}, Context(file=str(file), data=data)).job
