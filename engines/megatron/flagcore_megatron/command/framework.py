"""Starts a candidate with the command of a fine-tuning framework that trains with Megatron-LM, such as ms-swift."""

from collections.abc import Mapping
from typing import Any

from flagcore_training import real_job
from flagcore_training.frameworks import RECOMPUTE, SIZES, Reading, reading

from flagcore.domain.launch import Launch
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Spec
from flagcore_megatron.space.meshes import PP, SP
from flagcore_megatron.space.rules import DIST_OPT
from flagcore_megatron.space.split import LAYERS_PER_VIRTUAL
from flagcore_megatron.space.stages import LAYOUT, VIRTUAL_STAGES

MBS, DP, USES = "micro_batch_size", "data_parallel_size", "use_recompute"


def framework_launch(spec: Spec, values: Mapping[str, KnobValue], folder: str) -> Launch:
    """Return the launch of the framework's own command with a candidate's knob `values`, of which None is unset.

    Raises LaunchError if the framework has no key for a value.
    """
    read, micro_batch_size = reading(spec), int(values[MBS] or 1)
    replicas = micro_batch_size * int(values[DP] or 1)
    return real_job.launch(
        spec,
        folder,
        given=_given(spec, values),
        own=_own(read),
        micro_batch_size=micro_batch_size,
        microbatches=spec.train.global_batch_size // replicas,
    )


def _given(spec: Spec, values: Mapping[str, KnobValue]) -> dict[str, Any]:
    """Return the framework's settings of a candidate by name: frameworks count virtual stages, not their layers."""
    found: dict[str, Any] = {name: values.get(name) or 1 for name in SIZES}
    has_effect = values[DP] != 1 or values.get(DIST_OPT)  # otherwise the user's own stays
    found |= {name: bool(values.get(name)) for name in (SP, *[DIST_OPT] * bool(has_effect))}
    found |= {name: values.get(name) if values.get(USES) else None for name in RECOMPUTE}
    layers = int(values.get(LAYERS_PER_VIRTUAL) or 0) * int(values.get(PP) or 1)
    return found | {VIRTUAL_STAGES: spec.model.num_layers // layers if layers else None, LAYOUT: values.get(LAYOUT)}


def _own(read: Reading) -> dict[str, Any]:
    """Return the settings of the command by name."""
    found: dict[str, Any] = {name: read.size(name) for name in SIZES}
    found |= {name: read.is_on(name) for name in (DIST_OPT, SP)}
    return found | {name: read.value(name) for name in (*RECOMPUTE, VIRTUAL_STAGES, LAYOUT)}
