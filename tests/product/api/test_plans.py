"""Plans: distinct layouts, the names of chips, and what to change where nothing fits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flagcore import api
from flagcore.api.commands.explain import REMOVED
from flagcore.api.runs import load_snapshot
from flagcore.domain.records import read_prediction
from flagcore.errors import NothingFits
from flagcore.plugins import load_plugins
from flagcore.report.text import bottleneck_text
from flagcore.tuner.stages import build as build_module
from tests.product.tasks import LLAMA_8B

SPACE = {
    "pipeline_model_parallel_size": [1, 2],
    "context_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "use_recompute": False,
}
EXAMPLES = Path(__file__).parents[3] / "examples"
LAYOUT = ("data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")


def spec(chip: str = "H100-SXM", *, space: dict[str, Any] = SPACE) -> Any:
    return {
        "model": LLAMA_8B,
        "cluster": {"chip": chip, "devices_per_node": 8},
        "train": {"engine": "megatron", "seq_length": 4096, "global_batch_size": 128, "precision": "bf16"},
        "auto_tuner": {"space": space},
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_varies_several_knobs(path: Path) -> None:
    axes = load_snapshot(path, None, ()).problem.space.axes
    assert sum(len(axis.values) > 1 for axis in axes) >= 4


def test_each_layout_is_listed_once_with_its_number_among_all_candidates() -> None:
    every = api.estimate(spec(), top=10_000).candidates
    distinct = api.estimate(spec(), top=10_000, distinct=True).candidates
    layouts = [tuple(each["candidate"][knob] for knob in LAYOUT) for each in distinct]
    assert 1 < len(layouts) == len(set(layouts)) < len(every)
    assert sum(1 + each["variants"] for each in distinct) == len(every)
    for each in distinct:
        assert every[each["number"] - 1]["candidate"] == each["candidate"]


def test_the_bottleneck_of_the_fastest_candidate_is_named() -> None:
    found = api.estimate(spec())
    assert str(found.candidates[0]["limit"]) in bottleneck_text(read_prediction(found.candidates[0]))


def test_a_family_name_means_one_chip_in_specs_only(caplog: pytest.LogCaptureFixture) -> None:
    assert api.estimate(spec("H100"), top=1).chip == "H100-SXM"
    assert any("H100-SXM" in record.getMessage() for record in caplog.records)
    (chip,) = [each for each in load_plugins(()).chips() if each.name == "H100-SXM"]
    assert chip.matches_name("nvidia h100")
    assert not chip.has_name("H100")


@pytest.mark.parametrize(
    ("space", "model", "devices", "change"),
    [
        (
            {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
            {"num_layers": 64},
            8,
            "all knobs in the",
        ),
        ({}, {"num_layers": 4, "hidden_size": 32768, "ffn_hidden_size": 131072}, 8, "cluster.nodes = "),
        ({"micro_batch_size": 1}, {}, 1, "cluster.devices_per_node = "),
    ],
)
def test_where_nothing_fits_the_cheapest_change_is_named(
    space: dict[str, Any], model: dict[str, int], devices: int, change: str
) -> None:
    data = spec(space=space)
    data["cluster"]["devices_per_node"] = devices
    data["model"] = LLAMA_8B | model
    data["auto_tuner"]["baseline"] = dict.fromkeys(space, 1) or None
    with pytest.raises(NothingFits) as caught:
        api.estimate(data)
    assert change in str(caught.value)
    assert "(memory of H100-SXM" in str(caught.value)


def test_where_only_the_baseline_fits_the_smallest_other_candidate_is_named() -> None:
    groups = [{"chip": chip, "devices_per_node": 8, "nic_bytes_per_second": 5e10} for chip in ("H100-SXM", "C550")]
    baseline = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
    plans = {}
    for mesh in ("dp8", "tp4 dp2"):
        data = {**spec(space={"meshes": [f"C550 {mesh} + H100-SXM {mesh}"]}), "cluster": {"groups": groups}}
        data["model"] = {**LLAMA_8B, "num_layers": 80}
        data["auto_tuner"]["baseline"] = baseline
        plans[mesh] = api.estimate(data)
    (only,) = plans["dp8"].candidates
    assert only["candidate"]["meshes"] is None
    assert "meshes=C550 dp8 + H100-SXM dp8" in plans["dp8"].unmet
    assert len(plans["tp4 dp2"].candidates) > 1
    assert plans["tp4 dp2"].unmet == ""


def test_a_rule_that_removes_what_fits_is_named() -> None:
    space = {**SPACE, "use_recompute": True, "recompute_granularity": "selective", "tensor_model_parallel_size": 2}
    baseline = {"tensor_model_parallel_size": 2, "use_recompute": True, "recompute_granularity": "selective"}
    with pytest.raises(NothingFits) as caught:
        api.estimate({**(data := spec(space=space)), "auto_tuner": {**data["auto_tuner"], "baseline": baseline}})
    message = str(caught.value)
    assert "by selective_recompute_with_flash_attention" in message
    assert "GiB" not in message


EXPERT_LAYERS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 3584, "moe_router_topk": 2, "moe_first_dense_layers": 1}


@pytest.mark.parametrize(
    ("layers", "compared"),
    [
        ({}, {}),
        (EXPERT_LAYERS, {"expert_tensor_parallel_size": [None, 1]}),
        ({**EXPERT_LAYERS, "mtp_num_layers": 1}, {}),
    ],
    ids=["dense", "experts, a compared setting", "multi-token prediction"],
)
def test_bounds_hold_and_keep_the_first_layouts(
    layers: dict[str, Any], compared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = spec(
        space=compared | {"micro_batch_size": [1, 4], "use_distributed_optimizer": True, "context_parallel_size": 1}
    )
    data["model"], data["cluster"]["memory_per_device"] = {**LLAMA_8B, "num_layers": 16, **layers}, "24GiB"
    monkeypatch.setattr(build_module, "BOUND_ROWS", 10**9)
    whole, problem = api.estimate(data, distinct=True), load_snapshot(data, None, ()).problem
    predictions = problem.predictions
    if not compared:
        known, arguments = (predictions.share_in_use, predictions.step_time_s), (problem.space.columns(), problem.costs)
        for bound, predicted in zip((problem.engine.least_share, problem.engine.least_seconds), known, strict=True):
            ratio = bound(problem.task, *arguments) / predicted
            assert ratio.max() < 1.1
            assert np.median(ratio) > 0.6
    monkeypatch.setattr(build_module, "BOUND_ROWS", 0)
    bounded = api.estimate(data, distinct=True)
    for one, other in zip(bounded.candidates, whole.candidates, strict=True):
        assert {**one, "variants": 0} == {**other, "variants": 0}
    assert bounded.counts.illegal["far_too_large"] > 0
    assert bounded.counts.candidates < whole.counts.candidates
    (large,) = [rule for rule in problem.legality.bounds if rule.name == "far_too_large"]
    removed = problem.space.candidate(int(large.broken(problem.space.columns()).argmax()))
    report = api.explain_candidate(data, ",".join(f"{knob}={value}" for knob, value in removed.items))
    assert report.state == REMOVED
    assert "far_too_large" in {each.rule for each in report.rules}


@pytest.mark.parametrize("chip", ["C550", "MLU370-X8"])
def test_plans_for_several_hosts_have_times_and_keep_tensor_parallelism_within_a_host(
    chip: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = spec(chip)
    data["cluster"] = {"chip": chip, "nodes": 4}
    data["train"]["global_batch_size"] = 64
    found = api.estimate(data, top=50)
    per_host = found.devices // 4
    assert found.untimed == 0
    assert max(each["candidate"]["tensor_model_parallel_size"] for each in found.candidates) <= per_host
    assert any("cluster.nic_bytes_per_second" in record.getMessage() for record in caplog.records)
    data["cluster"]["nic_bytes_per_second"] = 25e9
    known = api.estimate(data, top=1).candidates[0]
    assumed = found.candidates[0]
    assert known["candidate"] == assumed["candidate"]
    assert known["step_time_s"]["value"] == assumed["step_time_s"]["value"]
    assert known["step_time_s"]["high"] < assumed["step_time_s"]["high"]
    data["auto_tuner"] = {"space": {"tensor_model_parallel_size": [2 * per_host]}}
    crossing = api.estimate(data, top=50).candidates
    assert any(each["candidate"]["tensor_model_parallel_size"] == 2 * per_host for each in crossing)


@pytest.mark.parametrize(("chip", "is_named"), [("H200", True), ("B200", False)])
def test_a_format_without_units_is_named(chip: str, is_named: bool, caplog: pytest.LogCaptureFixture) -> None:
    data = {"model": "openai/gpt-oss-20b", "cluster": {"chip": chip, "devices_per_node": 1}}
    data["serve"] = {"engine": "vllm", "precision": "mxfp4", "profile": {"input_len": 256, "output_len": 32}}
    data["auto_tuner"] = {"space": {"max_num_seqs": [8]}}
    api.estimate(data, top=1)
    assert any("mxfp4" in record.getMessage() for record in caplog.records) == is_named


@pytest.mark.parametrize(("chip", "is_named"), [("BW1000", True), ("MLU370-X8", False)])
def test_an_estimated_link_is_named(chip: str, is_named: bool, caplog: pytest.LogCaptureFixture) -> None:
    data = {**spec(chip), "cluster": {"chip": chip, "devices_per_node": 8}}
    data["train"] |= {"precision": "auto", "global_batch_size": 64}
    api.estimate(data, top=1)
    (known,) = (each for each in load_plugins(()).chips() if each.name == chip)
    detail = known.figures["link.bytes_per_second"].source.detail
    assert any(detail in record.getMessage() for record in caplog.records) == is_named


@pytest.mark.parametrize(
    ("name", "chip"), [("MLU590", "MLU590-M9"), ("910B", "910B3"), ("A100", "A100-80GB"), ("MTT-S4000", "MTT-S4000")]
)
def test_a_family_means_its_usual_member(name: str, chip: str) -> None:
    assert next(each.name for each in load_plugins(()).chips() if each.matches_name(name)) == chip
