"""Laws of plans on random small jobs: more hardware or more choice never makes the fastest candidate slower."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from flagcore.api.runs import load_snapshot
from flagcore.tuner.stages import build
from tests.product.tasks import LLAMA_8B

EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 3584, "moe_router_topk": 2}


def random_spec(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    space = {
        "micro_batch_size": [1, 2],
        "tensor_model_parallel_size": draw.sample([1, 2, 4, 8], 3),
        "pipeline_model_parallel_size": draw.sample([1, 2, 4, 8], 3),
        "context_parallel_size": draw.choice([[1], [1, 2]]),
        "use_recompute": draw.choice([[False], [False, True]]),
        "recompute_num_layers": [None, 1, 2],
    }
    return {
        "model": {**LLAMA_8B, "num_layers": draw.choice([16, 24, 32]), **draw.choice([{}, EXPERTS])},
        "cluster": {
            "chip": draw.choice(["H100-SXM", "A100-80GB", "C550", "910B1", "MI300X"]),
            "nodes": 2,
            "devices_per_node": 8,
            "nic_bytes_per_second": draw.choice([1e10, 5e10]),
            "memory_per_device": draw.choice(["24GiB", "32GiB", "48GiB"]),
        },
        "train": {"engine": "megatron", "seq_length": 4096, "global_batch_size": 64, "precision": "bf16"},
        "auto_tuner": {"space": space},
    }


def fastest(spec: dict[str, Any], **changes: Any) -> float:
    """The time of the fastest candidate that fits, inf if none does, after changes to the cluster and the space.

    A baseline outside of the space does not count: another memory or network may have another rule of thumb.
    """
    space = {**spec["auto_tuner"]["space"], **changes.pop("space", {})}
    changed = {**spec, "cluster": {**spec["cluster"], **changes}, "auto_tuner": {"space": space}}
    problem = load_snapshot(changed, None, ()).problem
    counts = problem.predictions.fits.copy()
    if problem.adds_baseline:
        counts[problem.space.find(problem.baseline)] = False
    return float(np.fmin.reduce(problem.predictions.step_time_s[counts], initial=np.inf))


# Splits minimize the slowest stage. With more memory, another split with an equally slow stage may take up to 0.2%
# longer to exchange gradients.
LAWS = {
    "memory": ({"memory_per_device": "60GiB"}, 1.002),
    "network": ({"nic_bytes_per_second": 4e11}, 1.0),
    "devices": ({"nodes": 4}, 1.0),
    "choice": ({"space": {"micro_batch_size": [1, 2, 4], "context_parallel_size": [1, 2, 4]}}, 1.0),
    "order": ({}, 1.0),
}
CASES = [
    *(pytest.param(seed, (law,), marks=pytest.mark.slow) for seed, law in enumerate(LAWS)),
    *(pytest.param(seed, LAWS, marks=pytest.mark.long) for seed in range(200)),
]


@pytest.mark.parametrize(("seed", "laws"), CASES)
def test_more_hardware_or_choice_never_makes_the_fastest_candidate_slower(
    seed: int, laws: Iterable[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = random_spec(seed)
    monkeypatch.setattr(build, "BOUND_ROWS", seed % 2 * 10**9)  # with and without bounds
    own_s, reverse = fastest(spec), {knob: values[::-1] for knob, values in spec["auto_tuner"]["space"].items()}
    for law in laws:
        changes, most = LAWS[law]
        changed_s = fastest(spec, **({"space": reverse} if law == "order" else changes))
        assert changed_s <= own_s * most, law
        assert law != "order" or changed_s == own_s
