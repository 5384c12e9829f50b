"""Plans with no setting typed: against what was published of the runs, and one spec on several chips."""

from pathlib import Path
from typing import Any

import pytest

from flagcore import api

FEW: dict[str, Any] = {
    "data_parallel_size": [64, 128],
    "micro_batch_size": 1,
    "context_parallel_size": [1, 2],
    "num_layers_per_virtual_pipeline_stage": [None, 1, 2],
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""A part of the space in which both searches end within seconds; the best of the whole space lies in it."""


def spec(model: str | dict[str, Any], chip: str, nodes: int, space: dict[str, Any] | None = None, **train: Any) -> Any:
    cluster = {"chip": chip, "nodes": nodes, "devices_per_node": 8}
    return {
        "model": model,
        "cluster": cluster,
        "train": {"engine": "megatron", **train},
        "auto_tuner": {"space": space or {}},
    }


@pytest.mark.parametrize("space", [FEW, pytest.param({}, marks=pytest.mark.long)], ids=["few", "all"])
def test_deepseek_v3_is_planned_within_a_quarter_of_its_report(space: dict[str, Any]) -> None:
    """14.8T tokens in 2.664M hours of H800 (arXiv 2412.19437)."""
    job = spec("deepseek-ai/DeepSeek-V3", "H800", 256, space, seq_length=4096, global_batch_size=15360, precision="fp8")
    best = api.estimate(job, top=1).candidates[0]
    assert best["tokens_per_second_per_device"]["value"] == pytest.approx(14.8e12 / (2.664e6 * 3600), rel=0.25)


@pytest.mark.parametrize("space", [FEW, pytest.param({}, marks=pytest.mark.long)], ids=["few", "all"])
def test_llama_3_405b_is_planned_within_15_percent_of_its_report(space: dict[str, Any]) -> None:
    """41% of the peak on 16,384 H100 at 8,192 tokens (arXiv 2407.21783, table 4)."""
    job = spec(
        "meta-llama/Meta-Llama-3.1-405B",
        "H100-SXM",
        2048,
        space,
        seq_length=8192,
        global_batch_size=2048,
        precision="bf16",
    )
    assert api.estimate(job, top=1).candidates[0]["mfu"] == pytest.approx(0.41, rel=0.15)


SMALL = {"num_layers": 4, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 8, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("chip", "implementation"),
    [
        ("H100-SXM", "transformer_engine"),
        ("A100-40GB", "transformer_engine"),
        ("V100-32GB", None),
        ("C500", "transformer_engine"),
    ],
)
def test_a_plan_lists_the_assumptions_of_the_vendor(chip: str, implementation: str | None) -> None:
    found = api.estimate(spec(SMALL, chip, 2, seq_length=2048, global_batch_size=64, precision="fp16"), top=1)
    assert found.assumed.get("implementation") == implementation
    assert ("assumed" in found.candidates[0]) is (implementation is not None)


ROOT = Path(__file__).resolve().parents[3]
SPEC = ROOT / "examples" / "portability.yaml"


def exchange(chip: str, tensor: int) -> float:
    account = api.explain_candidate(SPEC, f"tp={tensor}, mbs=1, sp", chip=chip)
    assert account.predicted is not None
    return float(account.predicted.time_s["tp_comm_s"])


def test_tensor_parallelism_over_both_islands_of_a_c500_costs_more_than_on_a_full_mesh() -> None:
    assert exchange("C500", 8) > 2.5 * exchange("C500", 4)
    assert exchange("C550", 8) < 2.5 * exchange("C550", 4)


def test_a_c500_may_run_tensor_parallelism_over_both_islands() -> None:
    assert api.explain_candidate(SPEC, "tp=8, mbs=1, sp", chip="C500").state != "removed"


@pytest.mark.parametrize(("chip", "has_memory"), [("C588", True), ("BI-V150S", True), ("MLU580", False)])
def test_with_an_unpublished_rate_the_estimate_suggests_calibration(chip: str, has_memory: bool) -> None:
    found = api.estimate(SPEC, chip=chip, top=1)
    assert found.candidates[0].get("step_time_s", {}).get("value") is None
    assert found.untimed == found.counts.untried
    assert f"peak rate of {chip} in bf16" in found.no_time
    assert "`flag calibrate`" in found.no_time
    assert ("give cluster.memory_per_device" in found.no_time) == (not has_memory)


def test_hosts_of_some_releases_need_a_time_for_each_layer_of_a_server() -> None:
    load = {"input_len": 512, "output_len": 64, "concurrency": 1, "num_prompts": 4}
    job = {"kind": "serve", "model": "Qwen/Qwen3-4B", "cluster": {"chip": "910B3", "devices": 4, "devices_per_node": 4}}
    job["candidate"] = {"tensor_model_parallel_size": 4}
    serve = [{"engine": "vllm", "precision": "bf16", **load, **each} for each in ({"engine_version": "0.11.0"}, {})]
    older, newer = api.estimate_jobs([{**job, "id": "1", "serve": each} for each in serve])
    assert older["tpot_s"]["mean"] > 2.0 * newer["tpot_s"]["mean"]
    assert older["tpot_s"]["mean"] == pytest.approx(
        36 * 0.75e-3, rel=0.1
    )  # Qwen3-4B has 36 layers, each captured in pieces
