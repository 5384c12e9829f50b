"""LMDeploy (`lmdeploy serve api_server`), release 0.18; no server was run.

Sources: lmdeploy 0.18.0 `cli/serve.py`, `cli/utils.py` (block sizes, powers of two), `messages.py` (both configs),
`utils.py` (get_max_batch_size), `turbomind/parallel_config.py`, `pytorch/engine/executor/base.py`,
`src/turbomind/turbomind.cc` (cache budget), `docs/en/quantization/kv_quant.md`.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from flagcore_models.layers import head_of, mixer_counts
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_serving.engine import ServingEngine
from flagcore_serving.launch.server import Instance, address
from flagcore_serving.space import knobs
from flagcore_serving.space.hardware import DP, EP, TP, Hardware, count
from flagcore_serving.space.knobs import EAGER, as_words, or_default
from flagcore_serving.space.program import Program
from flagcore_serving.space.rules import context_rules, forbidden, rule, split_rules
from flagcore_serving.space.settings import GRAPH_TOKENS, Settings
from flagcore_serving.space.weights import weight_bytes

from flagcore.domain.launch import PORT
from flagcore.domain.model import Model
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray, KnobValue, Rule
from flagcore.domain.spec import Task
from flagcore.i18n import N_

BACKEND, BATCH, BLOCK = "backend", "max_batch_size", "block_size"
CACHE, PREFILL = "cache_max_entry_count", "max_prefill_token_num"
PER_ITERATION, ITERATIONS = "num_tokens_per_iter", "max_prefill_iters"
DEFAULT_CACHE = 0.8

PROGRAM = Program.read("flagcore_lmdeploy")
PYTORCH = PROGRAM.code(BACKEND, "pytorch")


BATCHES = {"a100": 384, "a800": 384, "h100": 1024, "h800": 1024, "l20y": 1024, "h200": 1024}
"""Defaults of max_batch_size by a part of the device's name (lmdeploy 0.18 `utils.py`). Others have OTHER_BATCH."""
OTHER_BATCH, OTHER_DEVICES_BATCH = 128, 256
"""The default of other chips of the device type `cuda`, and that of all other device types."""


def _default_batch(task: Task) -> int:
    """Return LMDeploy's default of max_batch_size."""
    chip = task.cluster.groups[0].chip
    if chip.architecture and not chip.architecture.startswith("sm_"):
        return OTHER_DEVICES_BATCH
    return next((batch for name, batch in BATCHES.items() if name in chip.name.lower()), OTHER_BATCH)


def _cache_bytes(task: Task, get: Columns, prefill: IntArray, batch: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return the bytes of one device's cache with states, and the share of states.

    States are set aside for the whole batch (0.12 `models/llama/SequenceManager.cc`, `pytorch/engine/executor`), in 16
    bits (`LMDEPLOY_FP32_MAMBA_SSM_DTYPE`). The cache gets a share of the memory that they, weights and, with the
    PyTorch engine, logit buffers leave free.
    """
    model = task.spec.model
    free = Hardware.of(task).memory_bytes - weight_bytes(task) / (get[TP] * get[DP])
    buffers = np.where(get[BACKEND] == PYTORCH, 2.0 * (prefill + 2 * batch) * head_of(model).logits, 0.0)
    states = batch / get[DP].clip(1) * _states(model, element_bytes=2) / get[TP].clip(1)
    cache = states + knobs.shares(get[CACHE], DEFAULT_CACHE) * np.maximum(free - buffers - states, 0.0)
    return cache, states / np.maximum(cache, 1.0)


def _states(model: Model, **stored: int) -> float:
    """Return the bytes of the states of a sequence. `stored`: fields of gated delta rules that differ."""
    found = ((each, number) for each, number in mixer_counts(model).items() if each.recurrent)
    own = ((replace(each, **stored) if isinstance(each, GatedDeltaNet) else each, number) for each, number in found)
    return sum(number * each.state_bytes for each, number in own)


def _splits_experts_unevenly(c: Columns, experts: int) -> BoolArray:
    """Return for which rows experts are split unevenly (the constraints of `turbomind/parallel_config.py`)."""
    shares = c[EP].clip(1)
    uneven: BoolArray = (shares % c[DP].clip(1) != 0) | ((c[TP] * c[DP]) % shares != 0) | (experts % shares != 0)
    return uneven


class Lmdeploy(ServingEngine):
    """LMDeploy."""

    name = "lmdeploy"
    where = "flagcore_lmdeploy:REPORTS"
    program = PROGRAM
    modules: Mapping[str, str] = {"lmdeploy": "lmdeploy>=0.18,<0.19"}
    untested = "support was written from the documentation, and no trial has run; predicted times include only kernels"

    def settings(self, task: Task, columns: Columns) -> Settings:
        """Return LMDeploy's effective settings for each candidate."""
        values = PROGRAM.columns(task, columns)
        pytorch = values[BACKEND] == PYTORCH
        prefill = PROGRAM.values(values, PREFILL)
        batch = or_default(values[BATCH], _default_batch(task))
        cache, states = _cache_bytes(task, values, prefill, batch)
        own = _states(task.spec.model) or 1.0
        return Settings.of(
            task,
            values,
            PROGRAM,
            max_running=np.maximum(batch // values[DP].clip(1), 1),
            max_batched_tokens=prefill,
            pass_tokens=np.where(pytorch, prefill, np.minimum(or_default(values[PER_ITERATION], 1 << 40), prefill)),
            block_size=PROGRAM.values(values, BLOCK),
            graph_tokens=np.where(pytorch & (values[EAGER] == 0), GRAPH_TOKENS, 0),
            cache_bytes=cache,
            state_share=states,
            state_slots=np.full(batch.shape, (_states(task.spec.model, element_bytes=2) or 1.0) / own),
        )

    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
        spec, data = task.spec, count(values, DP)
        if count(values, EP) == 1:  # without EP, tp counts the devices of all attention groups
            values = {**values, TP: count(values, TP) * data}
        argv = [*PROGRAM.start_command(spec), spec.serve.weights or ""]
        argv += ["--server-name", address(task), "--server-port", PORT, "--log-level", "INFO", "--max-log-len", "0"]
        argv += knobs.arguments(PROGRAM.knobs, values)
        argv += as_words(PROGRAM.parse(spec).others, has_negation=False)
        return Instance(argv=tuple(argv), environment={} if spec.serve.elsewhere else {"HF_HUB_OFFLINE": "1"})

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return LMDeploy's legality rules for candidates."""
        experts = task.spec.model.experts or 1
        return (
            *split_rules(task, attention_and_experts=True, pipeline=False),
            *forbidden(task, PROGRAM),
            rule("tensor_power_of_two", (TP,), N_("{TP} must be a power of two"), lambda c: c[TP] & (c[TP] - 1) != 0),
            rule(
                "expert_parallel",
                (TP, DP, EP),
                N_("{EP} must be a multiple of {DP}, and divide {TP} x {DP} and the {experts} experts"),
                lambda c: (c[EP] > 1) & _splits_experts_unevenly(c, experts),
                experts=experts,
            ),
            rule(
                "block_size",
                (BACKEND, BLOCK),
                N_("block_size must be a multiple of 32 with TurboMind, and a power of two from 16 with PyTorch"),
                lambda c: (
                    (c[BLOCK] > 0)
                    & np.where(
                        c[BACKEND] == PYTORCH, (c[BLOCK] < 16) | (c[BLOCK] & (c[BLOCK] - 1) != 0), c[BLOCK] % 32 != 0
                    )
                ),
            ),
            *context_rules(task),
        )


ENGINE = Lmdeploy()
