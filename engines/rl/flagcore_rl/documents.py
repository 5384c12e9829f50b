"""The pydantic models of a spec file for reinforcement learning, one class per section, and of job records."""

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from flagcore.domain.knob import Knob
from flagcore.domain.spec import Precision
from flagcore.domain.units import Size, Text, Word
from flagcore.spec import schema
from flagcore.spec.jobs import AnyRecord, ReadRecord, reject_misplaced_keys
from flagcore.spec.knobs import baseline_section, candidate_of, candidate_section, space_of, space_section
from flagcore.spec.models import ModelInput
from flagcore.spec.plain_data import spec_error
from flagcore.spec.validate import Command, Context, Folder, RecordSection, Section, checked, keys_of_record, rule
from flagcore_rl.job import SPREAD, Lengths, RlSpec, RolloutRole, TrainerRole

Scalar = bool | int | float | Text | None


class LengthsSection(Section):
    """Lengths in tokens: a mean of log-normal ones, a histogram or a file. Those above the longest are cut to it."""

    mean: Annotated[float, Field(ge=1, le=10_000_000)] | None = None
    """Mean length after cutting."""
    longest: Size | None = None
    """Length at which prompts or answers are cut; null: the longest of the histogram or file."""
    spread: Annotated[float, Field(ge=0, le=5)] = SPREAD
    """Standard deviation of the logarithm of lengths with a mean, before they are cut; 0: all are equal."""
    histogram: Annotated[dict[schema.Length, schema.Count], Field(min_length=1)] | None = None
    """Counts or shares of prompts or answers by their length."""
    file: Folder | None = None
    """Text file with a length on each line, such as those of a log, relative to the spec."""


MOST_SAMPLES = 1_000_000
"""The limit of the samples of a step. Chosen: the largest published steps have a few thousand."""
QUANTILES = 4096
"""The lengths that stand for a histogram or file: as many as the samples of a large step, so that its tail is kept."""


def lengths_of(section: LengthsSection, context: Context) -> Lengths:
    """Return the lengths that a section describes.

    Raises SpecError for several sources or none, an unreadable file, and a mean without or above the longest.
    """
    given = {
        name: getattr(section, name) for name in {"mean", "histogram", "file"} | section.model_fields_set & {"spread"}
    }
    number = QUANTILES if section.mean is None else 1  # those of a mean are drawn for each number of samples
    values = schema.lengths_of(schema.LengthsSection(**given), context, number).values
    longest = section.longest or (values[-1] if section.mean is None else None)
    if longest is None:
        raise spec_error("longest", "is missing", fix="give the limit of the run")
    if section.mean is None:
        found = np.minimum(values, longest)
        return Lengths(mean=float(found.mean()), longest=longest, values=tuple(found.tolist()))
    if section.mean > longest:
        problem = f"is above longest = {longest}"
        raise spec_error("mean", problem, value=section.mean, fix="give the mean after cutting")
    return Lengths(mean=section.mean, longest=longest, spread=section.spread)


AnyLengths = Annotated[LengthsSection, rule(lengths_of)]


@keys_of_record(TrainerRole)
class TrainerSection(RecordSection):
    """The trainer."""

    engine: Literal["megatron", "fsdp2"]
    settings: dict[str, Scalar] = Field(default={})
    adapter: Annotated[schema.AdapterSection, rule(schema.adapter_of)] | None = None


@keys_of_record(RolloutRole)
class RolloutSection(RecordSection):
    """The rollout, which generates answers."""

    precision: Precision | None = None
    engine_args: dict[str, Scalar] = Field(default={})


class RewardSection(Section):
    """A model that rewards answers."""

    model: ModelInput
    """Path, public name or shape, as in `model`."""


RL_KEYS = (
    *("engine", "precision", "trainer", "rollout", "algorithm", "prompts", "samples", "prompt_len", "answer_len"),
    *("mini_batch", "epochs", "old_logprobs", "reference", "critic", "reward", "staleness", "packing", "reward_s"),
)


@keys_of_record(RlSpec, *RL_KEYS)
class RlJob(RecordSection):
    """Keys of a job of reinforcement learning in specs and job records."""

    engine: Word
    """Name of the framework: nemo-rl, verl, slime, openrlhf or trl."""
    precision: Precision = "bf16"
    """Number format of the matrix products of the trainer."""
    trainer: Annotated[TrainerSection, rule(lambda section, _: TrainerRole(**dict(section)))]
    rollout: Annotated[RolloutSection, rule(lambda section, _: RolloutRole(**dict(section)))]
    prompt_len: AnyLengths
    answer_len: AnyLengths
    critic: bool | None = None
    """Whether a critic of the policy's size is trained; null: with ppo."""
    reward: Annotated[RewardSection, rule(lambda section, _: section.model)] | None = None


class RlSection(RlJob):
    """The job."""

    command: Command | None = None
    """Your launch command as a list of words, run without a shell; null: the job is only predicted."""
    directory: Folder | None = None
    """Working directory of `command`; null: the folder of the spec file."""
    engine_version: Word | None = None
    """Version of the framework; null: the installed one."""


def work_of(section: RlJob, **more: Any) -> RlSpec:
    """Return the job that a validated section describes. Raises SpecError."""
    fields = {name: getattr(section, name) for name in RL_KEYS}
    fields["critic"] = fields["algorithm"] == "ppo" if section.critic is None else section.critic
    job = RlSpec(**{**fields, **more})
    samples = job.step_samples
    if samples > MOST_SAMPLES:
        problem = f"with samples = {job.samples} is a step of more than {MOST_SAMPLES} samples"
        raise spec_error("prompts", problem, value=job.prompts, fix="give the prompts of one step")
    if job.mini_batch and (job.mini_batch > samples or samples % job.mini_batch):
        problem, fix = f"does not divide the {samples} samples of a step", "use a divisor of prompts x samples"
        raise spec_error("mini_batch", problem, value=job.mini_batch, fix=fix)
    return job


def rl_of(section: RlSection, context: Context) -> RlSpec:
    """Return the job that a section describes. By default, the user's command runs in the spec's folder."""
    started = schema.command_of(section.command, section.directory, context)
    return work_of(section, engine_version=section.engine_version, context=_context_of(context), **started)


def _context_of(context: Context) -> int | None:
    """Return the context length of the spec's model in tokens, or None if it is unknown."""
    from flagcore_serving.space.weights import context_at  # late: it loads tables that inline shapes do not need

    model = context.given("model")
    path = context.base / model if isinstance(model, str) else None
    return context_at(str(path if os.path.exists(path) else model)) if path else None


class RlDocument(schema.CommonSection):
    """A tuning task: model, cluster, job and search."""

    rl: Annotated[RlSection, rule(rl_of)]
    """The job of reinforcement learning."""
    auto_tuner: schema.TunerSection = schema.TunerSection.model_construct()
    """The search; absent: placements and layouts within the default budgets."""


@lru_cache(maxsize=64)
def document_for(engines: Sequence[tuple[str, tuple[Knob, ...]]]) -> type[RlDocument]:
    """Return the pydantic model of a spec for the first of these engines, or for any engine if there are none."""
    if not engines:
        return RlDocument
    (name, knobs), suffix = engines[0], f"_{engines[0][0]}"
    space, baseline = space_section(knobs, suffix), baseline_section(knobs, suffix)

    def listed(section: Section, _context: Context) -> dict[str, Any]:
        return {key: value for key, value in space_of(section, knobs).items() if key in section.model_fields_set}

    given = rule(lambda section, _context: section and candidate_of(section, knobs, settings=True))
    tuner = schema.with_fields(
        schema.TunerSection,
        suffix,
        space=(Annotated[space, rule(listed)], space),
        baseline=(Annotated[baseline | None, given], None),
    )
    rl = schema.with_fields(RlSection, suffix, engine=(Literal[name], ...))
    return schema.with_fields(RlDocument, suffix, rl=(Annotated[rl, rule(rl_of)], ...), auto_tuner=(tuner, tuner))


DEFAULTS: Mapping[str, Any] = {
    "trainer": {"engine": "fsdp2"},
    "rollout": {"engine": "vllm"},
    "prompts": 64,
    "samples": 16,
    "prompt_len": {"mean": 256, "longest": 1024},
    "answer_len": {"mean": 1024, "longest": 4096},
}
"""The values that a new spec needs, with their defaults."""
PARTS: Mapping[str, type[Section]] = {"rl": RlSection}
"""The sections of a new spec. The last one has the values in DEFAULTS."""


class _Rl(RlJob):
    engine_version: Word | None = None
    notes: Any = None
    source: Any = None


class Record(AnyRecord):
    """A record of reinforcement learning."""

    rl: Annotated[_Rl, rule(lambda job, _context: work_of(job, engine_version=job.engine_version))]
    candidate: dict[str, Any]


def read_record(
    line: Mapping[str, object], data: dict[str, Any], _section: Mapping[str, Any], knobs: tuple[Knob, ...]
) -> ReadRecord:
    """Return the validated record of a line, and the fields of its `JobRecord`. Raises SpecError."""
    reject_misplaced_keys(line, Record, dict.fromkeys((knob.name for knob in knobs), "candidate"))
    record = checked(Record, data)
    section = candidate_section(knobs)
    candidate = candidate_of(checked(section, record.candidate), knobs, settings=False)
    return record, {"work": record.rl, "candidate": candidate}
