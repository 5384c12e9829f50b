"""Layouts of vendors' recipes on their chips: legal, and predicted to fit."""

from typing import Any

import pytest

from flagcore.api.inputs import loaded_plugins
from flagcore.api.jobs import predict_records

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
