"""Plans: distinct layouts, the names of chips, published runs beside them, and what to change where nothing fits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flagcore import api
from flagcore.api.commands import estimate as estimate_module
from flagcore.api.commands.explain import REMOVED
from flagcore.api.inputs import loaded_plugins, open_spec
from flagcore.api.jobs import PublishedRuns, predict_records
from flagcore.api.runs import load_snapshot
from flagcore.contracts import Problem
from flagcore.domain.chip import Support
from flagcore.domain.records import read_prediction
from flagcore.domain.spec import Spec
from flagcore.errors import NothingFits, UsageError
from flagcore.plugins import load_plugins
from flagcore.report.estimate import Estimate, estimate_texts
from flagcore.report.text import bottleneck_text, gain_text
from flagcore.tuner.problem import recommended_row
from flagcore.tuner.stages import build as build_module
from tests.checks import given
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
    assert sum(len(axis.values) > 1 for axis in axes) >= 3


def test_each_layout_is_listed_once_with_its_number_among_all_candidates() -> None:
    every = api.estimate(spec(), top=10_000).candidates
    distinct = api.estimate(spec(), top=10_000, distinct=True).candidates
    layouts = [tuple(each["candidate"][knob] for knob in LAYOUT) for each in distinct]
    assert 1 < len(layouts) == len(set(layouts)) < len(every)
    assert sum(1 + each["variants"] for each in distinct) == len(every)
    for each in distinct:
        assert every[each["number"] - 1]["candidate"] == each["candidate"]


SERVER = {
    "model": LLAMA_8B,
    "cluster": {"chip": "H100-SXM", "devices_per_node": 8},
    "serve": {"engine": "vllm", "profile": {"input_len": 2048, "output_len": 128, "concurrency": 64}},
    "auto_tuner": {"space": {"instances": "auto", "tensor_model_parallel_size": "auto", "max_num_seqs": [16, 64]}},
}


@pytest.mark.parametrize("job", [spec(), SERVER], ids=["training", "serving"])
@pytest.mark.costly
def test_plans_list_candidates_by_their_time_and_partial_knobs_mean_the_fastest_of_them(job: Any) -> None:
    found = api.estimate(job, top=10_000)
    seconds, plan = [each["step_time_s"]["value"] for each in found.candidates], found.recommended
    listed = [time for time, each in zip(seconds, found.candidates, strict=True) if "last" not in each]
    assert listed == sorted(listed) == seconds[: len(listed)]
    assert plan["step_time_s"]["value"] <= 1.1 * seconds[0]
    assert [each["recommended"] for each in found.candidates].count(True) == 1
    assert api.estimate(job, top=1).candidates[0]["candidate"] == plan["candidate"]
    explained = api.explain_candidate(job, "recommended")
    assert explained.candidate == plan["candidate"]
    fastest = explained.changes.get("fastest")
    assert (fastest.candidate if fastest else plan["candidate"]) == found.candidates[0]["candidate"]
    with_tp_8 = [each for each in found.candidates if each["candidate"]["tensor_model_parallel_size"] == 8]
    assert api.explain_candidate(job, "TP 8").candidate == with_tp_8[0]["candidate"]


def test_the_bottleneck_of_the_recommended_candidate_is_named() -> None:
    found = api.estimate(spec())
    assert str(found.recommended["limit"]) in bottleneck_text(read_prediction(found.recommended))


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


def test_devices_that_cannot_hold_the_job_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, build = list[int](), estimate_module.build_problem

    def counted(spec: Spec, *arguments: Any, **named: Any) -> Problem:
        nodes.append(spec.cluster.nodes)
        return build(spec, *arguments, **named)

    monkeypatch.setattr(estimate_module, "build_problem", counted)
    data = spec(space={})
    data["model"] = LLAMA_8B | {"num_layers": 4, "hidden_size": 131072, "ffn_hidden_size": 524288}
    with pytest.raises(NothingFits, match=r"cluster\.nodes = |neither other knobs"):
        api.estimate(data)
    assert len(nodes) <= 3, "the memory tells how many nodes are too few"


@pytest.mark.costly
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


UNSPLIT = {"num_layers_per_virtual_pipeline_stage": None}
EXPERT_LAYERS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 3584, "moe_router_topk": 2, "moe_first_dense_layers": 1}


@pytest.mark.parametrize(
    ("layers", "compared"),
    [
        ({}, {}),
        (EXPERT_LAYERS, {"expert_tensor_parallel_size": [None, 1], **UNSPLIT}),
        ({**EXPERT_LAYERS, "mtp_num_layers": 1}, UNSPLIT),
    ],
    ids=["dense", "experts, a compared setting", "multi-token prediction"],
)
@pytest.mark.costly
def test_bounds_hold_and_keep_the_first_layouts(
    layers: dict[str, Any], compared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = spec(space=compared | {"micro_batch_size": 4, "use_distributed_optimizer": True, "context_parallel_size": 1})
    data["model"], data["cluster"]["memory_per_device"] = {**LLAMA_8B, "num_layers": 8, **layers}, "14GiB"
    data["train"]["engine_version"] = "0.17.1"  # of the loss that leaves the baseline in its place
    monkeypatch.setattr(build_module, "BOUND_ROWS", 10**9)
    whole, problem = api.estimate(data, distinct=True), load_snapshot(data, None, ()).problem
    predictions = problem.predictions
    if "expert_tensor_parallel_size" not in compared:
        known, arguments = (predictions.share_in_use, predictions.step_time_s), (problem.space.columns(), problem.costs)
        bounds = given(problem.engine.bounds)
        for bound, predicted in zip((bounds.share, bounds.seconds), known, strict=True):
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


@pytest.mark.parametrize("chip", ["C550", pytest.param("MLU370-X8", marks=pytest.mark.long)])
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


@pytest.mark.costly
def test_every_published_run_of_the_plugins_is_a_valid_record_with_an_address() -> None:
    with loaded_plugins(()) as loaded:
        records = loaded.published_runs()
        answers = predict_records(records, loaded)
        used = {(each["cluster"]["chip"], each["rl"]["engine"]) for each in records if each["kind"] == "rl"}
        works = {(name, engine): loaded.engine_support(given(loaded.find_chip(name)), engine) for name, engine in used}
    assert {support.support for support in works.values()} == {Support.YES}  # "no run has been reported" is false
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
    adapted = api.estimate({**SPEC, "train": {**SPEC["train"], "adapter": {"rank": 16}}}).published
    assert "LoRA" in adapted[0].run
    assert not any("LoRA" in each.run for each in estimate.published)


def test_of_equally_fast_candidates_layouts_of_near_published_runs_are_recommended_and_then_the_simplest() -> None:
    problem = open_spec({**SPEC, "auto_tuner": {}}, None, (), plan=True).problem
    equal = replace(problem.predictions, step_time_s=np.ones(len(problem.space)))
    runs_of = (problem.published[:1], ())
    plans = [recommended_row(replace(problem, predictions=equal, published=runs)) for runs in runs_of]
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    first, usual = ([problem.space.candidate(given(row)).as_dict()[name] for name in sizes] for row in plans)
    assert (first, usual) == ([1, 1, 2], [1, 1, 1])


def test_plans_are_expected_to_be_slower_where_such_runs_are_published(estimate: Estimate) -> None:
    spec = {**SPEC, "model": "Qwen/Qwen3-30B-A3B"}
    others = api.estimate(spec, chip="MI300X")
    assert ("other chips" in estimate.expected, "other chips" in others.expected) == (False, True)
    for plan in (estimate, api.estimate(spec), others):
        mean, low, high = given(plan.expected_s)
        assert low < plan.recommended["step_time_s"]["value"] < mean < high
    tuned = api.estimate({**spec, "train": {**spec["train"], "lengths": {"mean": 900}}})
    assert tuned.expected_s is None  # no plan of such a job was compared with runs


@pytest.mark.costly
def test_flags_mean_what_the_engine_makes_of_them() -> None:
    spec = {**SPEC, "model": "mistralai/Mixtral-8x7B-v0.1", "auto_tuner": {}}
    spec["cluster"] = {"chip": "H100-SXM", "nodes": 4}
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    report = api.explain_like(spec, flags + " --sequence-parallel --account-for-loss-in-pipeline-split --bf16")
    assert report.candidate["num_layers_per_virtual_pipeline_stage"] == 4
    assert [line.rpartition(": ")[2] for line in report.because[1:2]] == ["--bf16"]
    assert report.because[0].endswith("expert_tensor_parallel_size=2, account_for_loss_in_pipeline_split=True")
    report = api.explain_like(spec, "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1")
    assert report.because[0].endswith("expert_tensor_parallel_size=1")
    with pytest.raises(UsageError, match="tensor_model_parallel_size"):
        api.explain_like(spec, "--tensor-modl-parallel-size 2")


@pytest.mark.costly
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
        changed = replace(estimate, candidates=({**first, "mfu": mfu, "recommended": True}, *others))
        assert any(f"{mfu:.1%}" in text for text, is_result in estimate_texts(changed) if not is_result) == warns


def test_a_run_with_experts_does_not_bound_the_mfu_of_a_dense_plan() -> None:
    bounds = []
    for model in (SPEC["model"], "mistralai/Mixtral-8x7B-v0.1"):
        problem = open_spec({**SPEC, "model": model}, "BI-V150", (), plan=True).problem
        with loaded_plugins(()) as loaded:
            bounds.append({run.run.split(",")[0]: run.is_bound for run in PublishedRuns(problem, loaded)})
    assert [found["Mixtral 8x7B with 8 layers"] for found in bounds] == [False, True]


def test_an_assumed_setting_that_needs_too_much_memory_is_named() -> None:
    cluster = {"chip": "H100-SXM", "nodes": 4, "nic_bytes_per_second": 5e10}
    train = {**SPEC["train"], "seq_length": 4096, "global_batch_size": 1200}
    spec = {**SPEC, "model": "mistralai/Mixtral-8x7B-v0.1", "train": train, "cluster": cluster}
    report = api.explain_candidate(spec, "tp=8, pp=2, mbs=3, dist-opt, sp")
    assert not given(report.predicted).fits
    assert [line for line in report.because if "expert_tensor_parallel_size=1" in line] == [report.because[-1]]


@pytest.mark.costly
@pytest.mark.parametrize(
    "work",
    [
        {"train": {"engine": "megatron", "seq_length": 8192, "global_batch_size": 16, "precision": "bf16"}},
        {"serve": {"engine": "vllm", "profile": {"concurrency": 16}}},
    ],
    ids=["train", "serve"],
)
def test_every_screen_of_a_plan_has_the_same_figures(work: dict[str, Any]) -> None:
    cluster, pages = {"chip": "H100", "nodes": 1, "devices_per_node": 8}, list[str]()
    spec = {"model": "Qwen/Qwen3-8B", "cluster": cluster, **work}
    plan = api.estimate(spec, top=2, on_page=pages.append)
    compared, step_s = api.compare("best", "baseline", spec=spec), plan.recommended["step_time_s"]["value"]
    explained = api.explain_candidate(spec, "best")
    found = (compared.a.predicted, explained.predicted)
    assert [each and each.step_time_s for each in found] == [step_s, step_s]
    assert plan.gain is not None
    assert f"~{gain_text(plan.objective, plan.gain)}" in pages[0] or plan.gain <= 0.0
    assert plan.expected.partition(" (")[0] in pages[0]
    assert not plan.expected or plan.expected in explained.because


def test_a_slower_candidate_is_not_called_the_fastest_where_only_it_is_listed() -> None:
    work = {"engine": "megatron", "seq_length": 8192, "global_batch_size": 128, "precision": "bf16"}
    work |= {"engine_version": "0.17.1"}  # a release with another fused loss has other figures
    cluster = {"chip": "H100-SXM", "nodes": 2, "devices_per_node": 8}
    data = {"model": "meta-llama/Meta-Llama-3.1-8B", "cluster": cluster, "train": work}
    one, two = (api.estimate(data, top=top) for top in (1, 2))
    first, second = (each["step_time_s"]["value"] for each in two.candidates)
    assert one.behind == two.behind == pytest.approx(1.0 - first / second)
    assert one.behind > 0.0
    texts = [[text for text, _ in estimate_texts(each) if "* recommended:" in text] for each in (one, two)]
    assert texts[0] == texts[1]


@pytest.mark.costly
def test_a_fixed_cache_that_is_too_small_is_not_said_to_need_the_memory_of_the_device() -> None:
    work = {"engine": "vllm", "engine_args": {"kv-cache-memory-bytes": "1G"}, "profile": {"input_len": 256}}
    data = {"model": "Qwen/Qwen3-0.6B", "cluster": {"chip": "H100-SXM", "devices_per_node": 1}, "serve": work}
    tuner = {"space": {"context_len": 40960}, "baseline": {"context_len": 40960}}
    with pytest.raises(NothingFits) as raised:
        api.estimate({**data, "auto_tuner": tuner})
    assert " of 79.65 GiB" not in str(raised.value)
    assert "auto_tuner.baseline.context_len" in str(raised.value)


def test_the_fastest_is_recommended_also_if_it_is_the_baseline_beside_the_space_of_the_engine() -> None:
    work = {"engine": "vllm", "profile": {"input_len": 256, "output_len": 64, "concurrency": 8}}
    cluster = {"chip": "H100-SXM", "devices_per_node": 1}
    data: dict[str, Any] = {"model": "Qwen/Qwen3-0.6B", "cluster": cluster, "serve": work}
    found = api.estimate(data, top=1)  # graphs of up to 512 tokens, which a low limit of sequences does not capture
    assert found.recommended["candidate"] == found.baseline["candidate"]
    found = api.estimate({**data, "auto_tuner": {"space": {"max_num_seqs": 8}}}, top=1)
    assert found.recommended["candidate"] != found.baseline["candidate"]
    tuner = {"space": {"max_num_seqs": [1, 2]}, "baseline": {"max_num_seqs": 16}}
    fast, slow = api.estimate({**data, "auto_tuner": tuner}, top=2).candidates
    assert (fast["recommended"], fast["candidate"]["max_num_seqs"], "last" in fast) == (True, 16, False)
    data["serve"] = work | {"slo": {"tpot_s": {"p50": slow["tpot_s"]["p50"]}}}
    data["serve"]["slo"]["ttft_s"] = {"p99": 1000.0}
    limited = api.estimate({**data, "auto_tuner": tuner}, top=1).recommended
    assert (limited["candidate"]["max_num_seqs"] != 16, limited["nearest_limit"]) == (True, "tpot_s.p50")
