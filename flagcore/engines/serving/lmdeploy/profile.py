"""LMDeploy, by its own program `lmdeploy serve api_server`: release 0.18. No server was run.

Rules: lmdeploy 0.18.0 `messages.py` (both configs), `turbomind/parallel_config.py`, `cli/serve.py` (dp of the PyTorch
engine), `cli/utils.py` (block sizes, powers of two), `docs/en/quantization/kv_quant.md`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from flagcore.domain.candidate import KnobValue
from flagcore.domain.space import BoolArray, Columns, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.common import heterogeneous, knobs, metrics
from flagcore.engines.serving.common.command_line import written
from flagcore.engines.serving.common.hardware import DP, EP, TP, Hardware, count
from flagcore.engines.serving.common.knobs import code
from flagcore.engines.serving.common.rules import context_rule, same_as_unset, split_rules
from flagcore.engines.serving.engine import Engine, ServingWorkload
from flagcore.engines.serving.lmdeploy import knobs as own
from flagcore.engines.serving.lmdeploy.knobs import BACKEND, BLOCK, CACHE, EAGER, ITERATIONS, KV, PER_ITERATION, PYTORCH
from flagcore.engines.serving.load.result import GENERATE
from flagcore.engines.serving.settings import PORT, Fetch, address
from flagcore.engines.serving.trial.job import Instance


def _server(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
    spec, data = task.spec, count(values, DP)
    if count(values, EP) == 1:  # without EP, tp counts the devices of all attention groups
        values = {**values, TP: count(values, TP) * data}
    argv = [*own.PROGRAM.command(spec), spec.serve.weights or ""]
    argv += ["--server-name", address(task), "--server-port", PORT, "--log-level", "INFO", "--max-log-len", "0"]
    argv += knobs.arguments(own.KNOBS, values)
    argv += written(own.PROGRAM.parse(spec).others, negated=False)
    return Instance(argv=tuple(argv), environment={"HF_HUB_OFFLINE": "1"})


def effective(fetch: Fetch, log: str) -> dict[str, KnobValue]:
    """Return the settings of the selected engine from its log."""
    for backend, line in (("pytorch", "Building CacheEngine with config"), ("turbomind", "turbomind engine config")):
        if line in log:
            return {own.BACKEND: backend, **metrics.settings(log, own.PROGRAM.settings)}
    return {}


def memory(log: str) -> dict[str, float]:
    """Return the size of the cache, which TurboMind logs in MB and the PyTorch engine in blocks."""
    if blocks := re.search(r"CacheConfig\(.*\bblock_size=(\d+).*\bnum_gpu_blocks=(\d+)", log):
        return {"kv_cache_tokens": float(blocks[1]) * float(blocks[2])}
    return metrics.largest(log, {"kv_cache_gib": r"Object cache budget: ([\d.]+) MB"}, 1 / 1024)


WHOLE = 1000
"""The code of a share of 1."""


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of illegal values."""
    on_cores = Hardware.of(task).on_cores
    return (
        *split_rules(task, data=True, pipeline=False),
        Rule(
            name="no_cores",
            knobs=(BACKEND,),
            message="LMDeploy does not run on CPU cores",
            broken=lambda c: np.full(c[BACKEND].shape, on_cores),
        ),
        *_parallel_rules(task.spec.model.num_moe_experts or 1),
        *_cache_rules(),
        Rule(
            name="turbomind_only",
            knobs=(BACKEND, PER_ITERATION, ITERATIONS),
            message=f"{PER_ITERATION} and {ITERATIONS} are options of TurboMind",
            broken=lambda c: (c[BACKEND] == PYTORCH) & ((c[PER_ITERATION] > 0) | (c[ITERATIONS] > 0)),
        ),
        Rule(
            name="pytorch_only",
            knobs=(BACKEND, EAGER),
            message=f"{EAGER} is an option of the PyTorch engine",
            broken=lambda c: (c[BACKEND] != PYTORCH) & (c[EAGER] == 1),
        ),
        context_rule(task, own.CONTEXT),
    )


def _parallel_rules(experts: int) -> tuple[Rule, ...]:
    return (
        Rule(
            name="tensor_power_of_two",
            knobs=(TP,),
            message=f"{TP} must be a power of two",
            broken=lambda c: c[TP] & (c[TP] - 1) != 0,
        ),
        Rule(
            name="pytorch_parallel",
            knobs=(BACKEND, DP, EP),
            message=f"{DP} and {EP} must be 1 with backend pytorch, which starts one server a rank for them",
            broken=lambda c: (c[BACKEND] == PYTORCH) & ((c[DP] > 1) | (c[EP] > 1)),
        ),
        Rule(
            name="expert_parallel",
            knobs=(TP, DP, EP),
            message=f"{EP} must be a multiple of {DP}, and divide {TP} x {DP} and the {experts} experts",
            broken=lambda c: (c[EP] > 1) & _uneven(c, experts),
        ),
    )


def _cache_rules() -> tuple[Rule, ...]:
    pytorch_only = [code(own.BY_NAME[KV], name) for name in ("fp8", "fp8_e5m2", "turbo_quant")]
    return (
        Rule(
            name="cache_share", knobs=(CACHE,), message=f"{CACHE} must be below 1", broken=lambda c: c[CACHE] == WHOLE
        ),
        Rule(
            name="cache_type",
            knobs=(BACKEND, KV),
            message=f"{KV} fp8 and fp8_e5m2 need backend pytorch, and so does turbo_quant",
            broken=lambda c: (c[BACKEND] != PYTORCH) & np.isin(c[KV], pytorch_only),
        ),
        Rule(
            name="block_size",
            knobs=(BACKEND, BLOCK),
            message=f"{BLOCK} must be a multiple of 32 with TurboMind, and a power of two from 16 with PyTorch",
            broken=lambda c: (
                (c[BLOCK] > 0)
                & np.where(
                    c[BACKEND] == PYTORCH, (c[BLOCK] < 16) | (c[BLOCK] & (c[BLOCK] - 1) != 0), c[BLOCK] % 32 != 0
                )
            ),
        ),
    )


def _uneven(c: Columns, experts: int) -> BoolArray:
    """Return where experts are not shared evenly (the constraints of `turbomind/parallel_config.py`)."""
    shares = c[EP].clip(1)
    uneven: BoolArray = (shares % c[DP].clip(1) != 0) | ((c[TP] * c[DP]) % shares != 0) | (experts % shares != 0)
    return uneven


def merges(task: Task) -> tuple[Merge, ...]:
    """Return values that are LMDeploy's defaults."""
    return (
        *heterogeneous.merges(),
        *same_as_unset(
            own.KNOBS,
            {BACKEND: "turbomind", BLOCK: own.DEFAULT_BLOCK, own.PREFILL: own.DEFAULT_PREFILL, KV: "none"},
        ),
    )


WORKLOAD: ServingWorkload = Engine(
    name="lmdeploy",
    where=f"{__name__}:WORKLOAD",
    program=own.PROGRAM,
    modules={"lmdeploy": "lmdeploy>=0.18,<0.19"},
    rules=rules,
    merges=merges,
    settings=own.settings,
    server=_server,
    effective=effective,
    memory=memory,
    api=GENERATE,  # its completions take text only
    untested="written from its documentation, no trial has run; times are those of its kernels alone",
)
