"""A rank of a world that is not there against the same rank of a real world, on the processor."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron.trial.job import parse_job

from engines.megatron.tests.trial import trial_jobs
from engines.megatron.tests.trial.trial_jobs import DENSE, EXPERTS, NEEDS_MEGATRON

pytestmark = [NEEDS_MEGATRON, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.together("training")]

HEADS = {"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 64}
SHAPE = {"hidden_size": 512, "ffn_hidden_size": 1408, "vocab_size": 4096, **HEADS}
TRAIN = {"seq_length": 64, "global_batch_size": 8, "train_iters": 2, "balanced_routing": True}
SPLIT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
SHARDED = {"expert_model_parallel_size": 4, "use_distributed_optimizer": True}
WORLDS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "dense": ({**DENSE, **SHAPE}, {**SPLIT, "data_parallel_size": 1, "micro_batch_size": 2}, (0, 3)),
    "experts": (
        {**EXPERTS, **SHAPE, "num_layers": 2, "num_moe_experts": 8, "moe_ffn_hidden_size": 512},
        {**SHARDED, "data_parallel_size": 8, "micro_batch_size": 1},
        (7,),
    ),
}
CASES = [
    pytest.param(name, rank, marks=() if (name, rank) == ("dense", 3) else pytest.mark.long)
    for name, (_, _, ranks) in WORLDS.items()
    for rank in ranks
]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Metrics of the real worlds of the chosen tests, by name, and of the probes, by name and rank."""
    folder = tmp_path_factory.mktemp("probes")
    mine = [item for item in request.session.items if item.path == request.path and "found" in item.fixturenames]
    params = [item.callspec.params for item in mine if hasattr(item, "callspec")]
    chosen = {(each["name"], each["rank"]) for each in params} | {("dense", 3)}
    jobs = {name: _job(folder, name, None) for name, _ in chosen}
    jobs |= {f"{name} {rank}": _job(folder, name, rank) for name, rank in chosen}
    jobs["long"] = {**_job(folder, "dense", 3), "output": str(folder / "long")}
    jobs["long"]["train"]["global_batch_size"] *= 4
    codes, stderr = trial_jobs.run_jobs(folder, jobs)
    assert set(codes.values()) == {0}, stderr
    return {name: json.loads((folder / name / "metrics.json").read_text()) for name in jobs}


def _job(folder: Path, name: str, rank: int | None) -> Any:
    model, knobs, _ = WORLDS[name]
    job = trial_jobs.make_job(folder / (name if rank is None else f"{name} {rank}"), model, train=TRAIN, **knobs)
    return job if rank is None else {**job, "probe": {"rank": rank}}


@pytest.mark.parametrize(("name", "rank"), CASES)
def test_a_probed_rank_needs_the_memory_that_it_needs_in_its_world(found: dict[str, Any], name: str, rank: int) -> None:
    real = found[name]["ranks"][rank]["peak_allocated_bytes"]
    balance = 0.2 if name == "experts" else 0.03  # how a real router spreads tokens depends on the processor's rounding
    assert found[f"{name} {rank}"]["peak_allocated_bytes"] == pytest.approx(real, rel=balance)


@pytest.mark.parametrize(("name", "rank"), CASES)
def test_a_probed_rank_computes_about_as_long_as_in_its_world(found: dict[str, Any], name: str, rank: int) -> None:
    real = statistics.median(step["forward_backward_s"] for step in found[name]["ranks"][rank]["own_steps"][1:])
    probed = statistics.median(step["compute_s"] for step in found[f"{name} {rank}"]["steps"][1:])
    assert 0.4 < probed / real < 2.5  # processor time, which a machine with other work lengthens


@pytest.mark.parametrize(("name", "rank"), CASES)
def test_rank_holds_its_part_of_the_model(found: dict[str, Any], name: str, rank: int) -> None:
    assert found[f"{name} {rank}"]["parameters"] == found[name]["ranks"][rank]["parameters"]
    assert found[f"{name} {rank}"]["effective"]["data_parallel_size"] == WORLDS[name][1]["data_parallel_size"]


@pytest.mark.parametrize(("name", "rank"), CASES)
def test_phases_are_measured_separately(found: dict[str, Any], name: str, rank: int) -> None:
    probed = found[f"{name} {rank}"]
    peaks = probed["peak_forward_backward_bytes"], probed["peak_optimizer_bytes"]
    model_bytes = {"dense": 16, "experts": 10}[name] * probed["parameters"]  # FP32; the states of experts are sharded
    assert 0.97 * model_bytes <= probed["static_bytes"] <= 1.08 * model_bytes  # the system returns some memory late
    assert probed["static_bytes"] <= min(peaks)
    assert max(peaks) == probed["peak_allocated_bytes"]


def test_a_probe_runs_only_enough_microbatches_to_predict_the_others(found: dict[str, Any]) -> None:
    short, long = found["dense 3"], found["long"]
    assert (short["num_microbatches"], short["microbatches_run"]) == (4, 4)
    assert (long["num_microbatches"], long["microbatches_run"]) == (16, 4)
    assert long["peak_allocated_bytes"] == pytest.approx(short["peak_allocated_bytes"], rel=0.01)
    for step in long["steps"]:
        assert step["compute_s"] == pytest.approx(4 * step["schedule_s"] + step["once_s"])


@pytest.mark.parametrize(
    ("stages", "stage", "interleaved", "microbatches", "enough"),
    [(8, 0, False, 64, 9), (8, 7, False, 64, 4), (1, 0, False, 2, 2), (8, 0, True, 64, 16), (4, 0, True, 4, 4)],
)
def test_pipeline_is_filled_up(stages: int, stage: int, interleaved: bool, microbatches: int, enough: int) -> None:
    model, knobs = {**DENSE, "num_layers": 16}, {"pipeline_model_parallel_size": stages, "micro_batch_size": 1}
    if interleaved:
        knobs["num_layers_per_virtual_pipeline_stage"] = 1
    data = trial_jobs.make_job(Path("unused"), model, train={"global_batch_size": microbatches}, **knobs)
    assert parse_job(data).enough_microbatches(stage) == enough
