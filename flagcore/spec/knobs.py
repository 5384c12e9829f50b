"""The knobs: the 13 keys of a training space, and those that only job records have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from flagcore.domain.candidate import KnobValue
from flagcore.spec.limits import Devices, Layers, NoLayers, Size
from flagcore.spec.settings import SETTINGS
from flagcore.spec.validate import Section

_OFF = "num_layers_per_virtual_pipeline_stage"

SPACE_KNOBS: dict[str, tuple[Any, str]] = {
    "data_parallel_size": (Devices, "Number of model replicas that share the global batch."),
    "use_distributed_optimizer": (bool, "Whether the optimizer state is sharded over the data-parallel devices."),
    "tensor_model_parallel_size": (Devices, "Number of devices that split each layer's matrices."),
    "sequence_parallel": (bool, "Whether norms and dropouts are split along the sequence over the tensor devices."),
    "pipeline_model_parallel_size": (Devices, "Number of pipeline stages."),
    _OFF: (NoLayers | None, "Layers of one virtual pipeline stage (interleaved schedule); 0 or null is off."),
    "context_parallel_size": (Devices, "Number of devices that split the sequence of each sample."),
    "expert_model_parallel_size": (Devices, "Number of devices that share the experts of each MoE layer."),
    "micro_batch_size": (Size, "Samples that one device handles at once."),
    "use_recompute": (bool, "Whether activations are computed again in the backward pass instead of kept."),
    "recompute_method": (
        Literal["uniform", "block"] | None,
        "How full recompute picks layers: chunks of equal size, or the first layers of a stage; null is not set.",
    ),
    "recompute_granularity": (
        Literal["full", "selective"] | None,
        "What is recomputed: whole layers, or the core attention; null is not set.",
    ),
    "recompute_num_layers": (
        Layers | None,
        "Layers of one chunk (uniform), or layers of a stage that are recomputed (block); null is not set.",
    ),
}


_JOB_KNOBS: dict[str, tuple[Any, str]] = {
    "virtual_pipeline_model_parallel_size": (Layers | None, "Virtual pipeline stages of one device; null is off."),
    **{
        key: (SETTINGS[key][0] | None, SETTINGS[key][1])
        for key in (
            "expert_tensor_parallel_size",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
        )
    },
}


def _section(name: str, doc: str, knobs: dict[str, tuple[Any, Any, str]]) -> type[Section]:
    fields: dict[str, Any] = {
        key: (kind, Field(default, description=text, json_schema_extra=None if default else _without_default))
        for key, (kind, default, text) in knobs.items()
    }
    return create_model(name, __base__=Section, __doc__=doc, **fields)


def _choice(kind: Any) -> Any:
    return Literal["auto"] | kind | Annotated[list[kind], Field(min_length=1)]


def _without_default(schema: dict[str, Any]) -> None:
    """Leave the knob out of the schema's defaults: absent is not null."""
    schema.pop("default", None)


Space = _section(
    "Space",
    "What may be tried: for each knob a value, a list of values, or auto (every legal value).",
    {key: (_choice(kind), "auto", text) for key, (kind, text) in SPACE_KNOBS.items()},
)
Baseline = _section(
    "Baseline",
    "The configuration to beat: a value for some or all knobs. Absent knobs are off or 1, DP what is left.",
    {key: (kind, None, text) for key, (kind, text) in SPACE_KNOBS.items()},
)
JobKnobs = _section(
    "JobKnobs",
    "One candidate of a job record.",
    {key: (kind, None, text) for key, (kind, text) in (SPACE_KNOBS | _JOB_KNOBS).items()}
    | {key: (kind | None, None, text) for key, (kind, text) in SETTINGS.items() if key not in _JOB_KNOBS},
)


def space_of(section: Section) -> dict[str, str | tuple[KnobValue, ...]]:
    """Return every knob's values without duplicates, or "auto"."""
    return {key: "auto" if value == "auto" else _values(key, value) for key, value in section.model_dump().items()}


def candidate_of(section: Section) -> dict[str, KnobValue]:
    """Return the knobs that were given, without the settings that a job record may have among them."""
    given = section.model_dump(exclude_unset=True)
    return {key: _value(key, value) for key, value in given.items() if key in SPACE_KNOBS or key in _JOB_KNOBS}


def _values(key: str, value: Any) -> tuple[KnobValue, ...]:
    return tuple(dict.fromkeys(_value(key, item) for item in (value if isinstance(value, list) else [value])))


def _value(key: str, value: Any) -> KnobValue:
    if key == _OFF:
        return value or None
    return value  # type: ignore[no-any-return]
