"""The pydantic models of a spec file for training: one class per section, with a docstring for each key.

Validation replaces each section with a record of `flagcore.domain`.
"""

from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, JsonValue, create_model

from flagcore.contracts import Engine
from flagcore.domain.files import read_regular
from flagcore.domain.knob import Knob
from flagcore.domain.model import Model
from flagcore.domain.spec import Adapter, Control, Precision, Target, TrainSpec
from flagcore.domain.units import Word
from flagcore.domain.work import Lengths, Work
from flagcore.i18n import _
from flagcore.spec.clusters import ClusterSection, cluster_of
from flagcore.spec.knobs import baseline_section, candidate_of, settings_of, settings_section, space_of, space_section
from flagcore.spec.models import ModelInput
from flagcore.spec.plain_data import load_json, spec_error
from flagcore.spec.validate import Command, Context, Envs, Folder, M, RecordSection, Section, keys_of_record, rule

MOST, MOST_LENGTHS = 2**31, 500_000
Length = Annotated[int, Field(le=MOST, strict=False)]
Count = Annotated[float, Field(gt=0, le=10**12)]


class LengthsSection(Section):
    """Lengths of the samples in tokens: a mean, a histogram or a file. Longer samples are cut at seq_length."""

    mean: Annotated[float, Field(ge=1, le=10_000_000)] | None = None
    """Mean of a log-normal distribution, before samples are cut."""
    spread: Annotated[float, Field(ge=0, le=5)] = 1.0
    """Standard deviation of the logarithm of the lengths with a mean; 0: all are equal."""
    histogram: Annotated[dict[Length, Count], Field(min_length=1, examples=[{"512": 60, "8192": 3}])] | None = None
    """Counts or shares of samples by their length in tokens."""
    file: Folder | None = None
    """File with a length on each line, or JSON Lines with the key length, relative to the spec; 500,000 may differ."""
    batching: Literal["packed", "longest", "seq_length"] = "packed"
    """Packed: global_batch_size counts sequences of seq_length that hold several samples; otherwise it counts samples,
    padded to the longest one of a micro-batch, or to seq_length."""
    balanced: bool = False
    """Whether each step divides samples between replicas so that all take about as long."""


def _counted(path: Path, section: LengthsSection) -> Mapping[int, float]:
    """Return how often each length is in a file. Raises SpecError."""
    counts, line, problem = Counter[int](), b"", _("has no lengths")
    try:
        lines = BytesIO(data := read_regular(path).removeprefix(BOM_UTF8))
        while part := Counter(islice(lines, MOST_LENGTHS)):  # at once: files may have millions of equal lines
            for line, count in part.items():
                if line.strip():
                    row = load_json(line.decode())
                    length = row["length"] if isinstance(row, dict) else row
                    if type(length) is not int or not 1 <= length <= MOST:
                        raise ValueError
                    counts[length] += count
            if len(counts) > MOST_LENGTHS:
                problem = _("has more than {most:,} different lengths", most=MOST_LENGTHS)
                raise spec_error("file", problem, value=section.file, fix=_("give a histogram"))
        if counts:
            return counts
    except OSError as error:
        problem = _("cannot be read ({why})", why=error.strerror)
    except (ValueError, LookupError):
        number = [*BytesIO(data)].index(line) + 1
        problem = _("has no whole number from 1 to {most} in line {number}", most=MOST, number=number)
    fix = _("give a number, or an object with length, on each line")
    raise spec_error("file", problem, value=section.file, fix=fix)


QUANTILES = 256
"""The maximum number of lengths that stand for a distribution."""


def lengths_of(section: LengthsSection, context: Context, number: int = QUANTILES) -> Lengths:
    """Return `number` lengths for those of a section. Raises SpecError for an unreadable file, or several sources."""
    given = [name for name in ("mean", "histogram", "file") if getattr(section, name) is not None]
    if len(given) != 1:
        names = ", ".join(given) or _("none")
        problem = _("needs exactly one of mean, histogram and file, but has {names}", names=names)
        raise spec_error("", problem, fix=_("give one of them"))
    if section.histogram and (least := min(section.histogram)) < 1:
        raise spec_error("histogram", _("has a length of {least}, but lengths are at least 1", least=least))
    if section.mean is None and "spread" in section.model_fields_set:
        raise spec_error("spread", _("is only for a mean"), value=section.spread, fix=_("remove it"))
    places = (np.arange(number) + 0.5) / number
    if section.mean:
        found = np.exp([section.spread * NormalDist().inv_cdf(each) for each in places])
        found *= section.mean / found.mean()
    else:
        counts = section.histogram or _counted(context.base / str(section.file), section)
        lengths, numbers = zip(*sorted(counts.items()), strict=True)
        found = np.array(lengths)[np.searchsorted(np.cumsum(numbers) / np.sum(numbers), places)]
    values = tuple(np.maximum(np.rint(found), 1).astype(np.int64).tolist())
    return Lengths(values=values, batching=section.batching, balanced=section.balanced)


@keys_of_record(Adapter)
class AdapterSection(RecordSection):
    """Low-rank adapters, which are trained instead of the weights."""

    targets: Literal["all-linear"] | Annotated[list[Target], Field(min_length=1)] = "all-linear"


def adapter_of(section: Section, _context: Context) -> Adapter:
    """Return the adapters that a section describes. Raises SpecError for quantized weights without QLoRA."""
    adapter = Adapter(**dict(section))
    if adapter.base not in (None, "fp32") and adapter.kind == "lora":
        raise spec_error("base", _("is for quantized weights"), value=adapter.base, fix="use kind: qlora, or remove it")
    targets = adapter.targets if isinstance(adapter.targets, str) else tuple(adapter.targets)
    return replace(adapter, targets=targets, base=adapter.base or ("nf4" if adapter.kind == "qlora" else None))


@keys_of_record(
    TrainSpec,
    *("engine", "seq_length", "global_batch_size", "lengths", "precision", "attention", "implementation", "adapter"),
    "mtp_num_layers",
)
class TrainJob(RecordSection):
    """Keys of a training job in specs and job records."""

    engine: Word
    """Name of the training engine."""
    lengths: Annotated[LengthsSection, rule(lengths_of)] | None = None
    precision: Literal["auto"] | Precision
    """Number format of the matrix products; auto: the fastest in which all chips train, of bf16, fp16 and fp32."""
    adapter: Annotated[AdapterSection, rule(adapter_of)] | None = None


class TrainSection(TrainJob):
    """The training job."""

    command: Command | None = None
    """Your launch command as a list of words, run without a shell; null: flagcore's trial program."""
    directory: Folder | None = None
    """Working directory of `command`; null: the folder of the spec file."""
    engine_version: Word | None = None
    """Version of the engine that `command` starts, such as 0.12.0; null: the installed one."""
    settings: Any = Field(default={})
    """Settings of the engine that are the same for all candidates."""
    program: Any = None
    """What the engine must know about the program that `command` starts; only for engines for any program."""


BUDGET = (
    *("max_time_per_task", "max_time", "disk_limit", "device_wait", "max_trials", "parallel_trials", "repeats"),
    *("indifference", "answers", "run_best", "use_experience"),
)
"""The keys of the budget of a search for a job of any kind."""


@keys_of_record(Control)
class ControlSection(RecordSection):
    """Budgets of the search."""


class SearchSection(Section):
    """Settings of every search."""

    strategy: Word = "learned"
    """Name of the search strategy: learned, predicted, random, or an installed one."""
    launcher: Word = "local"
    """Name of the launcher that starts trials; absent: local, or with several nodes the launcher of the allocation."""


def control_of(section: Section, _context: Context) -> Control:
    """Return the budgets and options that a section describes. Raises SpecError if they contradict each other."""
    control = Control(**dict(section))
    if control.warmup_iters >= control.train_iters:
        problem = _("must be below {name} = {value}", name="train_iters", value=control.train_iters)
        fix = _("use {number} or fewer", number=control.train_iters - 1)
        raise spec_error("warmup_iters", problem, value=control.warmup_iters, fix=fix)
    return control


def train_of(train: TrainSection, context: Context) -> TrainSpec:
    """Return the training job that a section describes. By default, the user's command runs in the spec's folder."""
    job = TrainSpec(**{**dict(train), **command_of(train.command, train.directory, context)})
    if job.adapter and job.adapter.base and job.precision in ("fp8", "mxfp8", "nvfp4"):
        problem = _("does not apply to quantized weights: their products have 16 bits")
        raise spec_error("precision", problem, value=job.precision, fix=_("use bf16"))
    return job


def command_of(command: list[str] | None, directory: str | None, context: Context) -> dict[str, Any]:
    """Return the fields `command` and `directory` of a job. A command without a directory runs in the spec's folder."""
    if not command:
        return {"command": None, "directory": None}
    return {"command": tuple(command), "directory": str((context.base / (directory or ".")).resolve())}


def with_depths(model: Model, train: Work, source: object, engine: Engine | None) -> tuple[Model, Work]:
    """Return the model with the depths of multi-token prediction that a job trains, and the job with those assumed.

    Jobs that do not train are not changed. `source`: the model as plain data. An inline shape states its depths. Files
    and public names state those of the checkpoint, which programs for fine-tuning drop unless they are asked to train
    them. Raises SpecError for two different numbers.
    """
    if not isinstance(train, TrainSpec):
        return model, train
    given, own = train.mtp_num_layers, model.mtp_num_layers
    is_shape = isinstance(source, Mapping) and "model_type" not in source
    stated = source.get("mtp_num_layers") if isinstance(source, Mapping) and is_shape else None
    if given is not None:
        if stated not in (None, given):
            problem, fix = (
                _("contradicts {key} = {value}", key="model.mtp_num_layers", value=stated),
                _("remove one of the two"),
            )
            raise spec_error("train.mtp_num_layers", problem, value=given, fix=fix)
        return replace(model, mtp_num_layers=given), train
    if is_shape or not own:
        return model, train
    depths = 0 if train.adapter or (engine and not engine.plans.trains_depths) else own
    return replace(model, mtp_num_layers=depths), replace(train, untrained_depths=own - depths)


class TunerSection(SearchSection):
    """The search."""

    space: Any = Field(default={})
    """The search space."""
    baseline: Any = None
    """The configuration to which the gain is relative; null: an expert's rule of thumb."""
    control: Annotated[ControlSection, rule(control_of)] = ControlSection.model_construct()
    """Budget of the search."""
    objective: Literal["tokens_per_second_per_device", "step_time_s", "cost"] = "tokens_per_second_per_device"
    """The metric to optimize: tokens per second and device (maximized), seconds per step (minimized), or cost. All
    candidates use all devices, so the one with the most tokens per second has the lowest cost of tokens."""


class CommonSection(Section):
    """Sections of all specs."""

    model: ModelInput
    """Path of a directory with a config.json, of that file or of a GGUF file, relative to the spec; or the name of a
    public model; or an inline shape; or the keys of a config.json, with its model_type."""
    cluster: Annotated[Literal["auto"] | ClusterSection, rule(cluster_of)] = ClusterSection.model_construct()
    """The hardware; absent: detected on this machine; auto: all hosts of the allocation that flagcore runs in."""
    envs: Envs = Field(default={})
    """Environment variables of each trial, in addition to those of plugins."""
    action: Literal["auto_tune"] | None = None
    """Optional; the only value is auto_tune."""


class Document(CommonSection):
    """A tuning task: model, cluster, training job and search."""

    train: Annotated[TrainSection, rule(train_of)]
    """The training job, which is the same in all trials."""
    auto_tuner: TunerSection = TunerSection.model_construct()
    """The search; absent: all legal candidates within the default budgets."""


@lru_cache(maxsize=64)
def document_of(engine: str, knobs: tuple[Knob, ...]) -> type[Document]:
    """Return the pydantic model of a spec for a training engine with these knobs."""
    suffix = f"_{engine}"  # names in the JSON Schema differ between engines
    space, baseline = space_section(knobs, suffix), baseline_section(knobs, suffix)
    settings = settings_section(knobs, suffix)
    set_values = rule(lambda section, _context: settings_of(section, knobs))
    listed = rule(lambda section, _context: space_of(section, knobs))
    given = rule(lambda section, _context: section and candidate_of(section, knobs, settings=True))
    train = with_fields(TrainSection, suffix, settings=(Annotated[settings, set_values], settings))
    tuner = with_fields(
        TunerSection,
        suffix,
        space=(Annotated[space, listed], space),
        baseline=(Annotated[baseline | None, given], None),
    )
    return with_fields(Document, suffix, train=(Annotated[train, rule(train_of)], ...), auto_tuner=(tuner, tuner))


def document_for(engines: Sequence[tuple[str, tuple[Knob, ...]]]) -> type[Document]:
    """Return the pydantic model of a spec for the first of these engines, or for any engine if there are none."""
    return document_of(*engines[0]) if engines else Document


def with_fields(section: type[M], suffix: str = "", **fields: Any) -> type[M]:
    """Return a copy of the model `section` in which some fields, if any, have other types, but the same descriptions.

    `suffix`: added to the name of the model.
    `fields`: the type and the default of each changed field. A section stands for its defaults, without validation.
    """
    for name, (kind, default) in fields.items():
        extra: dict[str, JsonValue] | None = {"default": {}} if name == "settings" else None
        default = default.model_construct() if isinstance(default, type) and issubclass(default, Section) else default
        fields[name] = (kind, Field(default, json_schema_extra=extra))
    name = section.__name__ + suffix
    return create_model(name, __base__=section, __doc__=section.__doc__, **fields) if fields else section


DEFAULTS: Mapping[str, Any] = {"seq_length": 4096, "global_batch_size": 512, "precision": "auto"}
"""The values that a new spec needs, with their defaults."""
PARTS: Mapping[str, type[Section]] = {"train": TrainSection}
"""The sections of a new spec. The last one has the values in DEFAULTS."""
