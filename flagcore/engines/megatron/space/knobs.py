"""The knobs and settings of Megatron training, one table entry each, and the columns of a candidate.

Specs and job records use these names. They are the names in Megatron-core, except for knobs without a flag, which only
flagcore has.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np
import yaml

from flagcore.domain.knob import Flag, Knob, Requirement
from flagcore.domain.space import Axis, IntArray, KnobValue
from flagcore.domain.spec import AUTO, Task
from flagcore.engines.megatron.mixed import meshes
from flagcore.errors import SpecError

SELECTIVE, FULL = 1, 2
UNIFORM, BLOCK = 1, 2
MAX_DEVICES, MAX_LAYERS = 1_000_000, 10_000
"""Upper limits of knob values: the number of devices and of layers."""


def _knob(name: str, label: str, help: str, *, has_flag: bool = True, **changes: Any) -> Knob:
    """Return a knob whose flag is the knob's name with hyphens, in the releases that have the knob."""
    flags = (Flag(name=name.replace("_", "-"), versions=changes.get("versions", "")),) if has_flag else ()
    return Knob(name=name, label=label, help=help, flags=flags, **changes)


def _parallel_size(name: str, label: str, help: str, **changes: Any) -> Knob:
    """Return a knob for a parallel size. Its `auto` values are all divisors of the number of devices."""
    row = {
        "neutral": 1,
        "maximum": MAX_DEVICES,
        "auto": lambda task: divisors(task.cluster.devices),
        "auto_help": "every divisor of the number of devices",
        "passes_neutral": True,
        "layout": True,
    }
    return _knob(name, label, help, **{**row, **changes})


def _switch(name: str, label: str, help: str, **changes: Any) -> Knob:
    return _knob(name, label, help, kind="flag", neutral=False, auto=lambda task: (False, True), **changes)


def _recompute_choice(name: str, label: str, help: str, words: tuple[str, ...]) -> Knob:
    """Return a knob that applies with `use_recompute`. Its value is one of `words`."""
    return _knob(name, label, help, part_of="use_recompute", kind="word", words=words, auto=lambda task: words)


SPACE_KNOBS = (
    _parallel_size("data_parallel_size", "DP", "Number of model replicas that share the global batch.", has_flag=False),
    _parallel_size(
        "tensor_model_parallel_size",
        "TP",
        "Number of devices that split each layer's matrices.",
        auto=lambda task: [n for n in divisors(task.cluster.devices) if n <= task.cluster.linked_devices],
        auto_help="every divisor of the number of devices, within a host",
    ),
    _parallel_size("pipeline_model_parallel_size", "PP", "Number of pipeline stages."),
    _knob(
        "layer_split",
        "split",
        "Split of the layers over pipeline stages: null is even, balanced is derived for each candidate.",
        has_flag=False,
        kind="word",
        words=("balanced",),
        auto=lambda task: ("balanced",),
        auto_help="balanced: each candidate's fastest split that its memory allows, which may be the even one",
    ),
    _parallel_size("context_parallel_size", "CP", "Number of devices that split the sequence of each sample."),
    _parallel_size(
        "micro_batch_size",
        "MBS",
        "Samples that one device processes at once.",
        maximum=2**31,
        auto=lambda task: divisors(task.spec.train.global_batch_size),
        auto_help="every divisor of the global batch size",
        shows_neutral=True,
        layout=False,
        memory_order=1,
    ),
    _parallel_size(
        "expert_model_parallel_size",
        "EP",
        "Number of devices that share the experts of each MoE layer.",
        auto=lambda task: divisors(int(np.gcd(task.spec.model.num_moe_experts or 1, task.cluster.devices))),
        auto_help="every common divisor of experts and devices",
    ),
    _switch(
        "sequence_parallel",
        "SP",
        "Whether norms and dropouts are split along the sequence over the tensor devices.",
        memory_order=-1,
    ),
    _switch(
        "use_distributed_optimizer",
        "dist-opt",
        "Whether the optimizer state is sharded over the data-parallel devices.",
        memory_order=-1,
    ),
    _knob(
        "num_layers_per_virtual_pipeline_stage",
        "layers/virtual stage",
        "Layers of one virtual pipeline stage (interleaved schedule); 0 or null is off.",
        minimum=0,
        maximum=MAX_LAYERS,
        auto=lambda task: (None, *_virtual_stage_lengths(task.spec.model.num_layers)),
        auto_help="off, and every divisor of the number of layers or of the next multiple of 4",
    ),
    _switch(
        "use_recompute",
        "recompute",
        "Whether activations are recomputed in the backward pass instead of stored.",
        has_flag=False,
    ),
    _recompute_choice(
        "recompute_granularity",
        "granularity",
        "Scope of recomputation: whole layers (full) or the core attention (selective); null: not set.",
        ("selective", "full"),
    ),
    _recompute_choice(
        "recompute_method",
        "method",
        "Layers that full recomputation selects: equal chunks, or the first layers of a stage; null: not set.",
        ("uniform", "block"),
    ),
    _knob(
        "recompute_num_layers",
        "layers",
        "Layers of one chunk (uniform), or recomputed layers of a stage (block); null: not set.",
        part_of="use_recompute",
        maximum=MAX_LAYERS,
        auto=lambda task: tuple(range(1, task.spec.model.num_layers + 1)),
        auto_help="every number of layers",
    ),
)
"""The knobs of a space, in the order of enumeration. Knobs that share rules are adjacent, so that rules apply early."""

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _setting(name: str, row: dict[str, Any]) -> Knob:
    """Return the setting of a row of `settings.yaml`, whose keys are fields of Knob, or one of these:

    - `flag`: its flag, by default its name with hyphens; an empty text means that it has none.
    - `since`: the first release with the flag. `others`: alternative flags, as the fields of Flag.
    - `compare`: a space may list values. Then a switch is off by default.
    - `auto`: the values besides the engine's default, by default all words, or both values of a switch.
    """
    kind, compare = row.pop("kind", "flag"), row.pop("compare", False)
    spelled, since = row.pop("flag", name.replace("_", "-")), row.pop("since", "")
    flags = [Flag(name=spelled, versions=f">={since}" if since else "")] if spelled else []
    flags += [Flag(**each) for each in row.pop("others", ())]
    scope = (*row.pop("scope", ("setting",)), *(("space",) if compare else ()))
    requires = tuple(Requirement(knob=each["knob"], one_of=tuple(each["one_of"])) for each in row.pop("requires", ()))
    words = tuple(row.pop("words", ()))
    values = (None, *row.pop("auto", words if compare and kind == "word" else ()))
    if compare and kind == "flag":
        row["neutral"], values = row.get("neutral", False), (False, True)
    auto: dict[str, Any] = {"auto": lambda task: values} if len(values) > 1 else {}
    return Knob(name=name, kind=kind, scope=scope, flags=tuple(flags), words=words, requires=requires, **auto, **row)


SETTINGS = tuple(
    _setting(name, row)
    for name, row in yaml.load(files(__package__).joinpath("settings.yaml").read_text("utf-8"), LOADER).items()
)
"""The settings: knobs that have one value for all candidates of a run."""

KNOBS = (
    *SPACE_KNOBS,
    meshes.KNOB,
    Knob(
        name="virtual_pipeline_model_parallel_size",
        scope=("record",),
        help="Virtual pipeline stages of one device; null is off.",
        flags=(Flag(name="num-virtual-stages-per-pipeline-rank", versions=">=0.11"),),
        maximum=MAX_LAYERS,
    ),
    *SETTINGS,
)
"""All knobs of Megatron."""

BY_NAME: Mapping[str, Knob] = {knob.name: knob for knob in KNOBS}


def axes(task: Task) -> tuple[Axis, ...]:
    """Return the axes of the space. A knob that is missing in the space is `auto`."""
    plain = tuple(knob.axis(task.listed_values(knob, AUTO)) for knob in SPACE_KNOBS)
    listed = task.listed_values(meshes.KNOB, AUTO)
    if len(task.cluster.groups) == 1:
        _require_no_meshes(f"auto_tuner.space.{meshes.MESHES}", next((each for each in listed if each), None))
        return plain
    knob = replace(meshes.KNOB, words=meshes.Meshes.from_task(task).texts)
    return (knob.axis(listed), *plain)


def candidate_columns(values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
    """Encode one candidate's knob values as one-row columns. Missing knobs are neutral. Raises SpecError for an invalid
    value.

    Knobs that only job records have are 0 if they are missing. Meshes are omitted, because they depend on the task.
    """
    knobs = [knob for knob in KNOBS if knob is not meshes.KNOB and (knob.searchable or "record" in knob.scope)]
    return {knob.name: _column(knob, values.get(knob.name, knob.neutral)) for knob in knobs}


def columns(task: Task, values: Mapping[str, KnobValue]) -> dict[str, IntArray]:
    """Encode one candidate as one-row columns. A missing data-parallel size is derived from the number of devices."""
    row = candidate_columns(values)
    if len(task.cluster.groups) > 1:
        row[meshes.MESHES] = meshes.encoded(task, values.get(meshes.MESHES))
    else:
        _require_no_meshes(meshes.MESHES, values.get(meshes.MESHES))
    if values.get("data_parallel_size") is None:
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        used = np.prod([row[name] for name in sizes], axis=0)
        row["data_parallel_size"] = np.maximum(task.cluster.devices // used, 1)
    if values.get("use_recompute") is None:
        row["use_recompute"] = (row["recompute_granularity"] > 0).astype(np.int64)
    return row


def _require_no_meshes(key: str, value: KnobValue) -> None:
    """Raise SpecError if meshes are set although there is only one node group."""
    if value is not None:
        problem, fix = "needs a cluster of several groups", "remove it, or list cluster.groups"
        raise SpecError(key=key, value=value, problem=problem, fix=fix)


def _column(knob: Knob, value: KnobValue) -> IntArray:
    try:
        code = knob.axis(()).encode(value)
    except (ValueError, TypeError):
        raise SpecError(key=knob.name, value=value, problem="is not a valid value of this knob") from None
    return np.array([code], dtype=np.int64)


def _virtual_stage_lengths(layers: int) -> list[int]:
    return sorted({*divisors(layers), *divisors(-(-layers // 4) * 4)})


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number` in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
