"""Published runs beside a plan."""

from dataclasses import replace

import numpy as np
import pytest

from flagcore import api
from flagcore.api.inputs import loaded_plugins, open_spec
from flagcore.api.jobs import predict_records, published_runs
from flagcore.errors import UsageError
from flagcore.report.estimate import Estimate, estimate_texts
from flagcore.tuner.problem import rows_by_time

SPEC = {
    "model": "meta-llama/Meta-Llama-3.1-8B",
    "train": {"engine": "megatron", "seq_length": 8192, "global_batch_size": 128, "precision": "bf16"},
    "cluster": {"chip": "H100-SXM", "nodes": 1},
    "auto_tuner": {"space": {"pipeline_model_parallel_size": [1], "micro_batch_size": [1], "use_recompute": [False]}},
}


TOO_LARGE = {
    "Meta-Llama-3-70B, 64 x GB200, fp8, 8192",
    "Meta-Llama-3.1-405B, 512 x H100-SXM, bf16, 8192",
    "Llama-3.1-405B, 16384 x H100-SXM, bf16, 8192",
}
"""Published runs that are wrongly predicted not to fit: by 2 to 7% more than the device has. The trainer of the third
shards gradients, and frees tensors that Megatron keeps (arXiv 2407.21783)."""


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return api.estimate(SPEC)


def test_every_published_run_of_the_plugins_is_a_valid_record_with_an_address() -> None:
    with loaded_plugins(()) as loaded:
        records = loaded.published_runs()
        answers = predict_records(records, loaded)
    assert len(records) >= 60
    assert len({record["id"] for record in records}) == len(records)
    assert all(record["source"].startswith("https://") for record in records)
    for record, answer in zip(records, answers, strict=True):
        assert answer["status"] == "ok", (record["id"], answer)
        assert 0.3 < answer["step_time_s"]["value"] / record["measured"]["step_time_s"] < 3, record["id"]
    too_large = {record["id"] for record, answer in zip(records, answers, strict=True) if not answer["memory"]["fits"]}
    assert too_large == TOO_LARGE


def test_a_plan_comes_with_the_nearest_published_runs(estimate: Estimate) -> None:
    nearest = estimate.published[0]
    assert nearest.run.startswith("Meta-Llama-3.1-8B, 8 x")
    assert (nearest.precision, nearest.candidate["context_parallel_size"]) == ("bf16", 2)
    assert nearest.measured == pytest.approx(10682, rel=0.01)  # the source's figure
    assert nearest.predicted / nearest.measured == pytest.approx(1, rel=0.3)
    lines: list[str] = []
    assert len(estimate.published) < len(api.estimate(SPEC, evidence=True, on_first=lines.append).published)
    assert ["s/step" in line for line in lines] == [True]  # before the whole space is predicted
    assert not api.estimate(SPEC, chip="910B1").published


def test_of_equally_fast_candidates_layouts_of_near_published_runs_come_first_and_then_the_simplest() -> None:
    problem = open_spec({**SPEC, "auto_tuner": {}}, None, (), plan=True).problem
    equal = replace(problem.predictions, step_time_s=np.ones(len(problem.space)))
    orders = [rows_by_time(replace(problem, predictions=equal, published=runs)) for runs in (problem.published[:1], ())]
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    first, usual = ([problem.space.candidate(int(rows[0])).as_dict()[name] for name in sizes] for rows in orders)
    assert (first, usual) == ([1, 1, 2], [1, 1, 1])


def test_plans_are_expected_to_be_slower_where_such_runs_are_published(estimate: Estimate) -> None:
    spec = {**SPEC, "model": "Qwen/Qwen3-30B-A3B"}
    others = api.estimate(spec, chip="MI300X")
    assert (estimate.expected_here, others.expected_here) == (True, False)
    for plan in (estimate, api.estimate(spec), others):
        assert plan.expected_s is not None
        mean, low, high = plan.expected_s
        assert low < plan.candidates[0]["step_time_s"]["value"] < mean < high


def test_flags_mean_what_the_engine_makes_of_them() -> None:
    spec = {**SPEC, "model": "mistralai/Mixtral-8x7B-v0.1", "auto_tuner": {}}
    spec["cluster"] = {"chip": "H100-SXM", "nodes": 4}
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    more = " --sequence-parallel --account-for-loss-in-pipeline-split --bf16"
    report = api.explain_like(spec, flags + more)
    assert report.candidate["num_layers_per_virtual_pipeline_stage"] == 4
    assert [line.rpartition(": ")[2] for line in report.because[1:2]] == ["--bf16"]
    assert report.because[0].endswith("expert_tensor_parallel_size=2, account_for_loss_in_pipeline_split=True")
    report = api.explain_like(spec, "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1")
    assert report.because[0].endswith("expert_tensor_parallel_size=1")
    with pytest.raises(UsageError, match="tensor_model_parallel_size"):
        api.explain_like(spec, "--tensor-modl-parallel-size 2")


def test_chips_of_one_design_are_as_fast_as_their_peaks_and_power() -> None:
    pairs = (("MI350X", "MI355X"), ("H100-NVL", "H100-SXM"), ("H200-NVL", "H200"))
    for slower, faster in pairs:
        seconds = [
            api.estimate(SPEC, chip=chip, top=1).candidates[0]["step_time_s"]["value"] for chip in (slower, faster)
        ]
        assert seconds[0] > seconds[1], slower


def test_the_layout_of_a_published_run_is_compared_with_the_best() -> None:
    report = api.explain_like(SPEC, "dgxc-benchmarking LLAMA-3.1-8b fp8")
    assert report.name.startswith("Meta-Llama-3.1-8B, 8 x H100-SXM, fp8, 8192 (https://")
    assert (report.candidate["context_parallel_size"], report.candidate["data_parallel_size"]) == (2, 4)
    assert report.as_data()["published"]["memory"]["fits"]
    assert len(report.because) == 3  # with the own settings, the place in the list, the margin of memory
    candidate = api.explain_like(SPEC, "405B 1024 bf16").candidate  # illegal on 8 devices
    assert (candidate["pipeline_model_parallel_size"], candidate["num_layers_per_virtual_pipeline_stage"]) == (8, 2)
    with pytest.raises(UsageError, match="8B, 8 x H100"):
        api.explain_like(SPEC, "no such run")


def test_an_mfu_above_the_published_ones_is_reported(estimate: Estimate) -> None:
    best, (first, *others) = max(each.mfu or 0 for each in estimate.published), estimate.candidates
    for mfu, warns in ((best - 0.01, False), (best + 0.01, True)):
        changed = replace(estimate, candidates=({**first, "mfu": mfu}, *others))
        assert any(f"{mfu:.1%}" in text for text, is_result in estimate_texts(changed) if not is_result) == warns


def test_a_run_with_experts_does_not_bound_the_mfu_of_a_dense_plan() -> None:
    bounds = []
    for model in (SPEC["model"], "mistralai/Mixtral-8x7B-v0.1"):
        problem = open_spec({**SPEC, "model": model}, "BI-V150", (), plan=True).problem
        with loaded_plugins(()) as loaded:
            bounds.append({run.run.split(",")[0]: run.is_bound for run in published_runs(problem, loaded)})
    assert [found["Mixtral 8x7B with 8 layers"] for found in bounds] == [False, True]


def test_an_assumed_setting_that_needs_too_much_memory_is_named() -> None:
    cluster = {"chip": "H100-SXM", "nodes": 4, "nic_bytes_per_second": 5e10}
    train = {**SPEC["train"], "seq_length": 4096, "global_batch_size": 1200}
    spec = {**SPEC, "model": "mistralai/Mixtral-8x7B-v0.1", "train": train, "cluster": cluster}
    report = api.explain_candidate(spec, "tp=8, pp=2, mbs=3, dist-opt, sp")
    assert report.predicted is not None
    assert not report.predicted.fits
    assert [line for line in report.because if "expert_tensor_parallel_size=1" in line] == [report.because[-1]]
