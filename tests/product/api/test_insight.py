"""Figures that are checked by hand, and laws of plans on random small jobs and on layouts of vendors' recipes."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flagcore import api
from flagcore.api.commands import report as what_if_module
from flagcore.api.commands.report import insight, what_if
from flagcore.api.inputs import loaded_plugins, open_spec
from flagcore.api.jobs import predict_records
from flagcore.api.runs import load_snapshot
from flagcore.contracts import Problem
from flagcore.domain.space import Candidate
from flagcore.tuner.stages import build
from tests.checks import refuses
from tests.product.cli.conftest import MODEL, Project
from tests.product.tasks import LLAMA_8B

SPEC: dict[str, Any] = {
    "model": {**MODEL, "num_layers": 8},
    "cluster": {"chip": "cpu", "devices_per_node": 4, "memory_per_device": "400MiB"},
    "train": {"engine": "megatron", "seq_length": 256, "global_batch_size": 8, "precision": "bf16"},
    "auto_tuner": {"space": {"context_parallel_size": 1}},
}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return open_spec(SPEC, None, ()).problem


def test_each_value_has_its_fastest_candidate(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if_module, "CHUNK", 100)  # so that what is found in one piece is set against the others
    rows, steps = np.flatnonzero(problem.predictions.fits), problem.predictions.step_time_s
    assert 0 < rows.size < len(problem.space)
    all_trials = [(problem.space.candidate(int(row)).as_dict(), float(steps[row])) for row in rows]
    best, _ = all_trials[len(all_trials) // 2]
    knobs_by_name = {knob["knob"]: knob for knob in what_if(problem, Candidate.of(best))}
    for name in best:
        values = {candidate[name] for candidate, _ in all_trials}
        if len(values) < 2:
            assert name not in knobs_by_name
            continue
        assert knobs_by_name[name]["best"] == best[name]
        assert {value["value"] for value in knobs_by_name[name]["values"]} == values
        for value in knobs_by_name[name]["values"]:
            device_passes = [(candidate, step) for candidate, step in all_trials if candidate[name] == value["value"]]
            assert value["candidates"] == len(device_passes)
            assert value["fastest"]["predicted"]["step_time_s"]["value"] == min(step for _, step in device_passes)
            assert value["fastest"]["candidate"][name] == value["value"]


def test_insight_reports_every_stage_and_adds_up_to_the_prediction(problem: Problem) -> None:
    staged = [
        row
        for row in range(len(problem.space))
        if problem.space.columns(np.array([row]))["pipeline_model_parallel_size"][0] == 4
    ]
    insight_data = insight(problem, problem.space.candidate(staged[0]))
    assert [stage["rank"] for stage in insight_data["stages"]] == [0, 1, 2, 3]
    assert len(insight_data["pipelines"][0]["forward_s"]) == 4
    worst = max(insight_data["stages"], key=lambda stage: stage["device_used_gib"])
    assert worst["device_used_gib"] * 2**30 == pytest.approx(float(problem.predictions.device_used_bytes[staged[0]]))
    assert all(rule in insight_data["messages"] for rule in problem.space.illegal)
    assert all(fact["kind"] for chip in insight_data["chips"] for fact in chip["facts"])


def test_without_a_best_rules_and_chips_are_still_reported(problem: Problem) -> None:
    insight_data = insight(problem, None)
    assert insight_data["messages"]
    assert insight_data["chips"]
    assert "knobs" not in insight_data


TRAIN = {"engine": "megatron", "seq_length": 1024, "global_batch_size": 64, "precision": "bf16"}
SPACE = {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 1, "micro_batch_size": 1}


def plan(cluster: dict[str, Any], **tuner: Any) -> dict[str, Any]:
    return {"model": MODEL, "cluster": cluster, "train": TRAIN, "auto_tuner": {"space": SPACE, **tuner}}


def planned_best(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the best in result.json of a plan."""
    (folder / "spec.json").write_text(json.dumps(spec))
    api.tune(folder / "spec.json", run_dir=folder / "run", fidelity="estimate")
    return dict(json.loads((folder / "run" / "result.json").read_text())["best"])


@pytest.mark.slow
def test_a_measured_run_on_two_devices(tmp_path: Path) -> None:
    project = Project(tmp_path)
    cluster = {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "512MiB", "price_per_device_hour": 1.8}
    control = {"max_trials": 2, "repeats": 0, "planned_steps": 1000}
    outcome = api.tune(project.spec(cluster=cluster, control=control), run_dir=tmp_path / "run", objective="cost")
    assert outcome.data["objective"]["name"] == "tokens_per_second_per_device"
    best = outcome.data["best"]
    seconds = best["measured"]["step_time_s"]["median"]
    tokens_per_s = 8 * 1024 / seconds  # eight samples of 1,024 tokens in a step, on two devices of 1.8 per hour
    cost = best["cost"]
    assert cost["cost_per_million_tokens"] == pytest.approx(2 * 1.8 / 3600 / tokens_per_s * 1e6)
    assert cost["planned_cost"] == pytest.approx(1000 * seconds / 3600 * 2 * 1.8)
    assert cost["planned_days"] == pytest.approx(1000 * seconds / 86400)


def test_a_plan_on_groups_with_different_prices_and_chips(tmp_path: Path) -> None:
    groups = [
        {"chip": "H100-SXM", "nodes": 1, "devices_per_node": 8, "price_per_device_hour": 3.0},
        {"chip": "A100-80GB", "nodes": 2, "devices_per_node": 8, "price_per_device_hour": 1.5},
    ]
    spec = plan({"groups": groups}, control={"planned_steps": 10_000}) | {"train": TRAIN | {"global_batch_size": 48}}
    best = planned_best(spec, tmp_path)
    seconds, cost = best["predicted"]["step_time_s"]["value"], best["cost"]
    tokens_per_s, per_hour = 48 * 1024 / seconds, 8 * 3.0 + 16 * 1.5
    assert cost["planned_days"] == pytest.approx(10_000 * seconds / 86400)
    assert cost["planned_cost"] == pytest.approx(10_000 * seconds / 3600 * per_hour)
    assert cost["cost_per_million_tokens"] == pytest.approx(per_hour / 3600 / tokens_per_s * 1e6)


def test_a_planned_server_pays_the_devices_that_it_uses(tmp_path: Path) -> None:
    spec = {
        "model": MODEL,
        "cluster": {"chip": "H100-SXM", "devices_per_node": 8, "price_per_device_hour": 2.0},
        "serve": {"engine": "vllm", "profile": {"input_len": 128, "output_len": 64, "concurrency": 8}},
        "auto_tuner": {"objective": "cost", "space": {"tensor_model_parallel_size": [1, 2], "instance": 1}},
    }
    best, other = api.estimate(spec).candidates
    used = best["candidate"]["tensor_model_parallel_size"]
    assert used == 1  # the second device costs as much, and gives less than the first
    assert other["output_tokens_per_s"] > 0
    for each in (best, other):
        devices = each["candidate"]["tensor_model_parallel_size"]
        rate = each["output_tokens_per_s"]
        assert each["cost_per_million_tokens"] == pytest.approx(devices * 2.0 / 3600 / rate * 1e6)
    assert best["cost_per_million_tokens"] < other["cost_per_million_tokens"]
    saved = planned_best(spec, tmp_path)
    assert saved["candidate"] == best["candidate"]
    assert saved["cost"] == {name: pytest.approx(best[name]) for name in saved["cost"]}


@pytest.mark.parametrize(
    "cluster",
    [
        {"chip": "H100-SXM", "devices_per_node": 8},
        {"groups": [{"chip": "H100-SXM", "price_per_device_hour": 1.0}, {"chip": "A100-80GB"}]},
    ],
)
def test_objective_cost_needs_all_prices(cluster: dict[str, Any]) -> None:
    assert "cost_per_million_tokens" not in api.estimate(plan(cluster), top=1).candidates[0]
    with refuses("auto_tuner.objective"):
        api.estimate(plan(cluster), objective="cost")


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
