"""Laws of plans on random small jobs, and layouts of vendors' recipes on their chips."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from flagcore.api.inputs import loaded_plugins
from flagcore.api.jobs import predict_records
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


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECIPES = {
    # https://github.com/AMD-AGI/Primus examples/megatron/configs/MI300X @fd1eeabb
    "MI300X": [
        ("meta-llama/Meta-Llama-3.1-8B", 8, 8192, 128, (1, 1, 1, 1, 2), {}),
        ("meta-llama/Llama-2-7b-hf", 8, 4096, 256, (1, 1, 1, 1, 4), {}),
        ("meta-llama/Meta-Llama-3.1-405B", 64, 8192, 256, (8, 8, 1, 1, 1), {}),
        ("mistralai/Mixtral-8x7B-v0.1", 8, 4096, 32, (1, 1, 1, 8, 2), {}),
        ("Qwen/Qwen3-30B-A3B", 8, 4096, 256, (1, 1, 1, 8, 2), {}),
        ("deepseek-ai/DeepSeek-V2-Lite", 8, 4096, 640, (1, 1, 1, 8, 4), {}),
    ],
    # https://github.com/Ascend/MindSpeed-LLM examples/mcore @c77308a1, which names no chip: the 910B3 is assumed
    "910B3": [
        ("meta-llama/Llama-2-13b-hf", 8, 4096, 512, (8, 1, 1, 1, 4), {}),
        ("Qwen/Qwen2.5-72B", 128, 32768, 32, (8, 4, 4, 1, 1), {}),
        ("Qwen/Qwen3-8B", 8, 4096, 64, (1, 2, 1, 1, 1), {}),
        ("Qwen/Qwen3-14B", 8, 4096, 128, (8, 1, 1, 1, 4), {}),
        ("Qwen/Qwen3-30B-A3B", 16, 4096, 256, (1, 2, 1, 8, 1), FULL),
    ],
    # https://github.com/flagos-ai/FlagScale examples @16a2dd5b, which names no chip: 80 GB are assumed
    "A800-80GB": [
        ("meta-llama/Meta-Llama-3-70B", 32, 8192, 1024, (8, 4, 1, 1, 1), {}),
        ("meta-llama/Meta-Llama-3-8B", 32, 4096, 2048, (4, 2, 1, 1, 1), {}),
        ("mistralai/Mixtral-8x7B-v0.1", 32, 4096, 2048, (2, 4, 1, 4, 1), {}),
        ("meta-llama/Llama-2-7b-hf", 8, 2048, 1024, (1, 1, 1, 1, 1), {}),
        ("Qwen/Qwen3-14B", 32, 4096, 2048, (2, 2, 1, 1, 1), {}),
        ("Qwen/Qwen3-32B", 8, 4096, 128, (8, 1, 1, 1, 1), {}),
        ("Qwen/Qwen3-30B-A3B", 32, 4096, 128, (1, 2, 1, 4, 1), {}),
    ],
}
"""By chip: model, devices, sequence length, global batch, (TP, PP, CP, EP, MBS), recomputation."""
SIZES = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "expert_model_parallel", "micro_batch")


@pytest.mark.slow
def test_recipes_are_legal_and_fit() -> None:
    records: list[dict[str, Any]] = []
    for chip, recipes in RECIPES.items():
        for model, devices, sequence, batch, sizes, more in recipes:
            candidate = {f"{name}_size": size for name, size in zip(SIZES, sizes, strict=True)}
            candidate |= {"use_distributed_optimizer": True, "sequence_parallel": sizes[0] > 1, **more}
            if sizes[3] > 1:
                candidate["expert_tensor_parallel_size"] = 1
            records.append(
                {
                    "id": f"{model} on {devices} x {chip}",
                    "kind": "train",
                    "model": model,
                    "cluster": {"chip": chip, "devices": devices, "devices_per_node": 8},
                    "train": {"seq_length": sequence, "global_batch_size": batch, "precision": "bf16"},
                    "candidate": candidate,
                }
            )
    with loaded_plugins(()) as loaded:
        answers = predict_records(records, loaded)
    for record, answer in zip(records, answers, strict=True):
        assert (answer["status"], answer["memory"]["fits"]) == ("ok", True), record["id"]
