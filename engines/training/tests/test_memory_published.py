"""Memory against what others printed and measured. Nothing here is fitted."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from flagcore_training.layout import Options, Training
from flagcore_training.memory.training import component_table

from engines.training.tests.candidates import DEEPSEEK_16B, layout, public, state_bytes, train, training_memory
from flagcore.domain.model import Model
from flagcore.physics.roofline import PlainMemory

MIB, GIB = 2.0**20, 2.0**30

LLAMA_70B = public("meta-llama/Meta-Llama-3-70B", num_layers=12)
LLAMA_405B = public("meta-llama/Meta-Llama-3.1-405B", num_layers=4, num_query_groups=16)
"""With twice the published model's key and value heads, as the run was."""
DEEPSEEK_V2 = public("deepseek-ai/DeepSeek-V2", num_layers=4)
DEEPSEEK_V3 = public("deepseek-ai/DeepSeek-V3", num_layers=4, moe_first_dense_layers=1, mtp_num_layers=0)

MEASURED: list[tuple[Model, dict[str, Any], int, float]] = [
    (LLAMA_70B, {"pipeline": 2, "data": 4, "microbatches": 4}, 4096, 66.55),
    (LLAMA_70B, {"tensor": 2, "data": 4, "microbatches": 4}, 4096, 60.68),
    (LLAMA_70B, {"tensor": 4, "data": 2, "microbatches": 4}, 4096, 39.07),
    (LLAMA_70B, {"tensor": 8, "microbatches": 4}, 4096, 28.29),
    (LLAMA_70B, {"context": 8, "microbatches": 4}, 32768, 104.51),
    (LLAMA_405B, {"pipeline": 2, "data": 4, "microbatches": 4}, 4096, 87.08),
    (LLAMA_405B, {"tensor": 8, "microbatches": 4}, 4096, 38.57),
    (DEEPSEEK_V2, {"data": 8, "expert": 8, "microbatches": 4}, 4096, 45.63),
    (DEEPSEEK_V2, {"pipeline": 2, "data": 4, "expert": 4, "microbatches": 4}, 4096, 44.70),
    (DEEPSEEK_V3, {"data": 8, "expert": 8, "microbatches": 4}, 4096, 104.30),
    (DEEPSEEK_V3, {"pipeline": 2, "data": 4, "expert": 4, "microbatches": 4}, 4096, 114.00),
]
"""Peaks of torch's allocator in GiB on 8 devices: release v1.2 of SimuMax, which prints what it compares with."""


def engine(model: Model, sequence: int, **options: Any) -> Training:
    """Return a step of transformer-engine's layers."""
    fused = {"fused_activation": True, "transformer_engine": True}
    return train(model, sequence=sequence, **fused, options=Options(**options))


@pytest.mark.parametrize(("model", "split", "sequence", "measured"), MEASURED)
def test_measured_peaks_with_transformer_engine_are_predicted(
    model: Model, split: dict[str, Any], sequence: int, measured: float
) -> None:
    work = engine(model, sequence, cross_entropy_fusion=True, cp_comm="a2a")
    candidate = layout(**split, sharded_optimizer=1, sequence_parallel=1)
    found = training_memory(work, candidate, workspace_bytes=32 * MIB)
    assert found.peak[0] / GIB == pytest.approx(measured, rel=0.005)


EIGHT = layout(data=8, expert=8, sharded_optimizer=1, microbatches=32)
"""The layout behind the printed figures of DeepSeek-V3-16B-A3B (27 layers, 64 experts).

FlagScale's own formula (`flagscale/train/theoretical_memory_usage.py`) prints 41,733.77 MB of weights and optimizer for
one layout of all that divide 1 to 64 devices, to the last digit: 8 devices, no tensor or pipeline parallelism, experts
over all 8, distributed optimizer, no multi-token prediction, a norm of compressed keys and values, vocabulary filled up
to 151,872. The printed activations, 18,653.03 MB, are what that formula gives for micro-batches of one sequence of 4096
tokens, 16,989.03 MB, and 64 MiB a layer with experts more, which says that they come from another version of it: sure
of the split, less so of the lengths of sequence and micro-batch. Implementation and grouped products are
FlagScale's defaults.
"""

NORMED = dataclasses.replace(DEEPSEEK_16B, qk_layernorm=True, vocab_size=151872)


def test_printed_parameters_of_a_16b_mixture() -> None:
    one = layout(expert=1)
    table = component_table(engine(DEEPSEEK_16B, 4096), one, np.zeros(1))
    count = {name: float(part["params"][0]) for name, part in table.items()}
    assert (count["qkv_proj"] + count["out_proj"]) / 27 == 13_762_560
    assert (count["router"] + count["experts"] + count["shared_experts"]) / 26 == 571_080_704
    assert count["ffn"] == 69_206_016
    assert count["embedding"] == count["output_head"] == pytest.approx(0.3111e9, rel=3e-4)
    assert sum(count.values()) == pytest.approx(15.91e9, rel=1e-3)


def test_printed_states_of_a_16b_mixture() -> None:
    table = component_table(engine(NORMED, 4096), EIGHT, np.zeros(1))
    states = sum(float(state_bytes(part)[0]) for name, part in table.items() if name != "buffers")
    assert states / MIB == pytest.approx(41_733.77, rel=1e-4)


def test_measured_memory_of_a_16b_mixture() -> None:
    """65,123,222,165 bytes (60.65 GiB) is read as what a device showed in use, allocator and context included."""
    found = training_memory(engine(NORMED, 4096), EIGHT, workspace_bytes=8.125 * MIB)
    model = PlainMemory(capacity=None)
    used = model.device_used_bytes(model.reserved_bytes(found.peak))
    assert used[0] == pytest.approx(65_123_222_165, rel=0.02)
