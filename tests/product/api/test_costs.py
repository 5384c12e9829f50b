"""Costs of three runs, added up by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from flagcore import api
from flagcore.errors import SpecError
from tests.product.cli.conftest import MODEL, Project

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
    with pytest.raises(SpecError) as missing:
        api.estimate(plan(cluster), objective="cost")
    assert missing.value.key == "auto_tuner.objective"
