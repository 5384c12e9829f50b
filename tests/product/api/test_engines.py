"""Several serving engines for one load. Job records: each is answered by itself, no key is passed over, and measured
records of earlier runs are learned. Candidates and memory in the words of real engines."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flagcore_llamacpp.engine import KNOBS
from flagcore_megatron.engine import ENGINE, LABELS
from flagcore_megatron.space.knobs import BY_NAME

from flagcore.api import estimate_jobs
from flagcore.api.commands.tune import each_engine
from flagcore.api.inputs import LoadedSpec, read_spec
from flagcore.api.jobs import past
from flagcore.errors import Interrupted, NoDevice, SpecError
from flagcore.plugins import LoadedPlugins
from flagcore.report.candidate_report import differs_text
from flagcore.report.explanation import prediction_text
from flagcore.report.text import candidate_text, values_text
from flagcore.spec.shapes import Shape
from tests.product import tasks

DATA = {
    "serve": {"engine": ["slow", "quick", "absent"]},
    "auto_tuner": {"space": {"a": [1], "quick": {"b": [2]}}, "control": {"max_trials": 9, "max_time": "90s"}},
}
ENGINES = ("slow", "quick", "absent")
RATES = {"slow": 10.0, "quick": 20.0}


@dataclass(frozen=True)
class Found:
    plan: Any
    data: dict[str, Any]
    run_dir: Path
    heading: str = ""
    seen: list[Any] = field(default_factory=list)


def outcome(data: dict[str, Any], run_dir: Path) -> Any:
    engine = data["serve"]["engine"]
    if engine not in RATES:
        raise NoDevice(f"{engine} is not installed")
    run_dir.mkdir(parents=True)
    (run_dir / "best.yaml").write_text(engine)
    (run_dir / "best").mkdir()
    (run_dir / "best" / "launch.json").write_text(engine)
    best = SimpleNamespace(number=0, step_seen_s=1 / RATES[engine], predicted_step_s=None)
    return Found(
        SimpleNamespace(best=best, median_s=lambda trial: trial.step_seen_s, stopped_because=""),
        {"given": data},
        run_dir,
    )


def test_the_best_engine_wins_and_an_unavailable_one_is_skipped(tmp_path: Path) -> None:
    result = each_engine(DATA, ENGINES, tmp_path / "run", outcome)
    assert result.data["engine"] == "quick"
    assert list(result.data["engines"]) == ["quick", "slow", "absent"]
    assert "absent is not installed" in result.data["engines"]["absent"]["error"]
    assert (tmp_path / "run" / "best.yaml").read_text() == "quick"
    assert (tmp_path / "run" / "best" / "launch.json").read_text() == "quick"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["engine"] == "quick"


def test_each_engine_has_its_own_knobs_and_a_share_of_the_budget(tmp_path: Path) -> None:
    result = each_engine(DATA, ENGINES, tmp_path / "run", outcome)
    inputs = {engine: result.data["engines"][engine]["given"]["auto_tuner"] for engine in RATES}
    assert inputs["quick"] == {"space": {"a": [1], "b": [2]}, "control": {"max_trials": 3, "max_time": 30.0}}
    assert inputs["slow"]["space"] == {"a": [1]}


def test_if_no_engine_can_run_each_error_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(data: dict[str, Any], run_dir: Path) -> Any:
        raise NoDevice("no device" if run_dir.name != "third" else "no plugin")

    with caplog.at_level(logging.WARNING, "flagcore"), pytest.raises(NoDevice, match="first, second, third"):
        each_engine(DATA, ("first", "second", "third"), tmp_path, fails)
    assert [" device" in each for each in caplog.messages] == [True, False, False]


def test_an_interrupt_ends_all_engines(tmp_path: Path) -> None:
    def interrupted(data: dict[str, Any], run_dir: Path) -> Any:
        raise Interrupted("interrupted")

    with pytest.raises(Interrupted):
        each_engine(DATA, ENGINES, tmp_path, interrupted)


def test_an_unknown_strategy_and_launcher_are_reported_with_all_other_errors() -> None:
    tuner = {"strategy": "lerned", "launcher": "lokal", "space": {"nope": 1}}
    data = {"model": {}, "serve": {"engine": "vllm"}, "auto_tuner": tuner}
    with pytest.raises(SpecError) as refused:
        read_spec(LoadedSpec("x", data))
    result = {(each.key, each.value) for each in refused.value.problems}
    assert result > {("auto_tuner.strategy", "lerned"), ("auto_tuner.launcher", "lokal"), ("auto_tuner.space.nope", 1)}


@pytest.mark.parametrize("cluster", [{"chip": "nosuch"}, {"groups": [{"chip": "cpu"}, {"chip": "nosuch"}]}])
def test_an_unknown_chip_is_listed_with_the_other_problems_of_a_spec(cluster: dict[str, Any]) -> None:
    model = {"num_layers": 2, "hidden_size": 65, "ffn_hidden_size": 96, "num_attention_heads": 4, "vocab_size": 100}
    train = {"engine": "megatron", "seq_length": 8, "global_batch_size": 2, "precision": "bf16"}
    chip = "cluster.groups[1].chip" if "groups" in cluster else "cluster.chip"
    with pytest.raises(SpecError) as error:
        read_spec(LoadedSpec("x", {"model": model, "cluster": cluster, "train": train}))
    assert [(each.key, each.value) for each in error.value.problems] == [("model.hidden_size", 65), (chip, "nosuch")]
    assert read_spec(LoadedSpec("x", {"model": {**model, "hidden_size": 64}, "cluster": cluster, "train": train}))


MODEL = {
    "num_layers": 8,
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "vocab_size": 32000,
}
SERVE = {"precision": "bf16", "input_len": 256, "output_len": 64, "num_prompts": 128, "concurrency": 64}


RECORD: dict[str, Any] = {
    "id": "a",
    "kind": "serve",
    "model": MODEL,
    "cluster": {"chip": "NVIDIA H200", "devices": 8, "devices_per_node": 8},
    "serve": {**SERVE, "engine": "vllm"},
    "candidate": {},
}


def answered(**sections: Any) -> dict[str, Any]:
    """Return the answer to RECORD with some keys of its sections replaced."""
    record = RECORD | {
        n: {**RECORD.get(n, {}), **part} if isinstance(part, dict) else part for n, part in sections.items()
    }
    (reported,) = estimate_jobs([record])
    return reported


def answer(engine: str = "vllm", **candidate: Any) -> dict[str, Any]:
    return answered(serve={"engine": engine}, candidate=candidate)


def rate(engine: str, **candidate: Any) -> float:
    warnings = answer(engine, **candidate)
    assert warnings["status"] == "ok", warnings
    return float(warnings["output_tokens_per_s"])


def test_a_record_may_have_the_cpus_of_a_host() -> None:
    many, few = (answered(cluster={"cpus_per_node": count})["output_tokens_per_s"] for count in (96, 2))
    assert many == answer()["output_tokens_per_s"]
    assert few < 0.8 * many


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_an_unknown_key_of_the_engine_is_reported_with_the_nearest(engine: str) -> None:
    warnings = answer(engine, tensor_model_paralel_size=2)
    assert warnings["status"] == "invalid"
    assert f"is not a knob of {engine}; did you mean tensor_model_parallel_size?" in warnings["reason"]


@pytest.mark.parametrize(
    ("engine", "own", "general"),
    [
        ("sglang", {"max_running_requests": 4}, {"max_num_seqs": 4}),
        ("sglang", {"chunked_prefill_size": 128}, {"max_num_batched_tokens": 128}),
        ("llamacpp", {"parallel": 16}, {"max_num_seqs": 16}),
        ("llamacpp", {"parallel": 8, "batch_size": 64}, {"max_running_requests": 8, "max_num_batched_tokens": 64}),
        ("vllm", {"max_num_seqs": 4}, {"max_running_requests": 4}),
    ],
)
def test_a_limit_under_its_general_name_sets_the_engines_argument(
    engine: str, own: dict[str, int], general: dict[str, int]
) -> None:
    assert rate(engine, **own) == rate(engine, **general)
    assert rate(engine, **own) != rate(engine)


def test_one_limit_under_two_names_is_refused() -> None:
    warnings = answer("sglang", max_num_seqs=4, max_running_requests=8)
    assert warnings["status"] == "invalid"
    assert "max_running_requests is the same knob as max_num_seqs" in warnings["reason"]


def test_missing_engine_features_imply_only_the_off_value() -> None:
    assert rate("llamacpp", data_parallel_size=1, enforce_eager=False, block_size=None) == rate("llamacpp")
    for name, value in (("data_parallel_size", 2), ("enforce_eager", True), ("block_size", 16)):
        assert f"{name} is not a knob of llamacpp" in answer("llamacpp", **{name: value})["reason"]


def test_layers_on_the_host_have_no_time_and_no_memory_of_the_device() -> None:
    part, full = answer("llamacpp", n_gpu_layers=4), answer("llamacpp", n_gpu_layers=9)
    assert full == answer("llamacpp", n_gpu_layers=-1) == answer("llamacpp", n_gpu_layers=99)
    assert part["status"] == "ok"
    assert part["reason"].startswith("no time: unknown: the host's speed for layers")
    assert "output_tokens_per_s" not in part or part["output_tokens_per_s"] is None
    assert part["memory"]["static_gib"] < 0.5 * full["memory"]["static_gib"]
    assert answer("llamacpp", n_gpu_layers=0)["memory"]["static_gib"] == 0.0


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("engine_args", {"enforce_eager": True}, "it belongs under serve"),
        ("max_num_seqs", 4, "it belongs under candidate"),
        ("tensor_model_parallel_size", 2, "it belongs under candidate"),
        ("candidates", {}, "did you mean candidate?"),
    ],
)
def test_a_key_of_a_record_in_the_wrong_place_is_reported(key: str, value: object, says: str) -> None:
    inputs = {**RECORD, key: value}
    if key == "candidates":
        del inputs["candidate"]
    (reported,) = estimate_jobs([inputs])
    assert reported["status"] == "invalid"
    assert says in reported["reason"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_unknown_memory_of_a_chip_is_valid_json(engine: str) -> None:
    reported = answered(cluster={"chip": "MLU580"}, serve={"engine": engine})
    assert reported["status"] == "ok"
    assert reported["reason"].startswith("no time")
    assert "fits" not in reported["memory"]
    assert 0.0 < json.loads(json.dumps(reported, allow_nan=False))["memory"]["device_used_gib"] < 100.0


@pytest.mark.parametrize("load", [{"concurrency": 64}, {"request_rate": "inf"}])
def test_instances_without_requests_answer_none(load: dict[str, object]) -> None:
    serve = {"concurrency": None, **load, "num_prompts": 2}
    two, eight = (answered(serve=serve, candidate={"instances": each}) for each in (2, 8))
    assert eight["output_tokens_per_s"] == pytest.approx(two["output_tokens_per_s"])
    assert eight["requests_per_s"] * eight["e2e_s"]["mean"] <= 2.0 * 1.001


def test_an_open_loop_over_many_instances_never_answers_more_than_the_arrivals() -> None:
    serve = {"concurrency": None, "request_rate": 1, "num_prompts": 64}
    assert answered(serve=serve, candidate={"instances": 8})["requests_per_s"] <= 64 / 63


def test_records_of_instances_that_only_prefill_or_decode_are_predicted_with_their_own_layouts() -> None:
    """Both layouts are not among those of `auto`, and differ in TPOT."""
    serve = {**RECORD["serve"], "engine_version": "0.19.0", "concurrency": 8, "request_rate": None}
    records = [{**RECORD, "serve": serve, "candidate": {"prefill_decode": f"1xtp1+1xtp{size}"}} for size in (1, 4)]
    together = [each["tpot_s"]["mean"] for each in estimate_jobs(records)]
    assert together == [next(iter(estimate_jobs([each])))["tpot_s"]["mean"] for each in records]
    assert together[0] != together[1]


CANDIDATE = {"data_parallel_size": 4, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}


def measured_record(measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "run/1",
        "kind": "train",
        "model": {name: getattr(tasks.DENSE, name) for name in Shape.model_fields},
        "cluster": {"chip": "test-chip", "devices": 4, "devices_per_node": 4},
        "train": {"engine": "megatron", "seq_length": 128, "global_batch_size": 8, "precision": "bf16"},
        "candidate": {**CANDIDATE, "context_parallel_size": 1, "expert_model_parallel_size": 1, "micro_batch_size": 1},
        "measured": measured,
    }


@pytest.mark.parametrize("figure", [0.01, [1.0], {"a": 1}, 1e308, -1.0, None])
def test_a_measured_record_is_learned_once_but_not_with_an_invalid_figure(figure: object) -> None:
    records = [measured_record({"step_time_s": figure})]
    found = past(records, tasks.CHIP, LoadedPlugins.of({}), ENGINE, "tokens_per_second_per_device")
    assert len(found.time) == (figure == 0.01)


PREDICTED: dict[str, Any] = {
    "step_time_s": {"value": 2.0, "low": 1.5, "high": 2.5},
    "tokens_per_second_per_device": {"value": 1234.5, "low": 1.0, "high": 2.0},
    "mfu": 0.5,
    "time": {"compute_s": 1.5, "pp_bubble_s": 0.5},
    "limit": "bubble",
    "memory": {
        "fits": False,
        "capacity_gib": 10.0,
        "static_gib": 8.0,
        "activation_gib": 4.0,
        "peak_allocated_gib": 12.0,
        "reserved_gib": 12.5,
        "device_used_gib": 13.0,
        "worst_stage": 1,
        "components": {
            "output_head": {"params": 1e6, "activation_gib": 1.0},
            "novelty": {"params": 2e6, "activation_gib": 0.5},
            "qkv_proj": {"params": 3e6, "activation_gib": 2.5},
        },
    },
    "model": [
        {"component": "Embedding", "params_per_layer": 1e8, "layers": 1, "params": 1e8},
        {"component": "MLP", "params_per_layer": 2e8, "layers": 3, "params": 6e8},
    ],
}
LLAMACPP = {knob.name: knob for knob in KNOBS}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "MBS 1"),
        ({"data_parallel_size": 2, "micro_batch_size": 8, "use_distributed_optimizer": True}, "DP 2, MBS 8, dist-opt"),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
            "PP 2, MBS 1, layers/virtual stage 1",
        ),
        (
            {
                "use_recompute": True,
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 1,
            },
            "MBS 1, recompute full block 1",
        ),
        ({"use_recompute": True, "recompute_granularity": "selective"}, "MBS 1, recompute selective"),
    ],
)
def test_a_candidate_is_described_by_its_non_neutral_knobs(values: dict[str, object], text: str) -> None:
    assert candidate_text(tasks.candidate(**values), BY_NAME) == text  # type: ignore[arg-type]


def test_values_that_are_neutral_for_the_engine_are_left_out() -> None:
    usual_values = {"instances": 1, "parallel": 8, "n_gpu_layers": -1, "enable_prefix_caching": True}
    assert values_text(usual_values, LLAMACPP) == "parallel 8"
    assert values_text({"instances": 1}, LLAMACPP) == "engine defaults"
    assert values_text({"instances": 2, "enable_prefix_caching": False}, LLAMACPP) == "instances 2, no prefix caching"


def test_the_memory_table_adds_up_to_the_peak() -> None:
    components = {"embedding": {"params": 1e6, "weights_gib": 3.0, "optimizer_gib": 5.0, "activation_gib": 4.0}}
    for peak, name, rest in ((11.75, "freed before the peak", "-0.250"), (14.5, "temporary", "2.500")):
        memory = PREDICTED["memory"] | {"components": components, "peak_allocated_gib": peak}
        rows = [line.split() for line in prediction_text(PREDICTED | {"memory": memory}, LABELS).splitlines()]
        assert [*name.split(), "0", "0.000", "0.000", rest] in rows
        assert ["Total", "1,000,000", "3.000", "5.000", f"{peak - 8:.3f}"] in rows


def test_knobs_of_recompute_are_reported_as_one() -> None:
    flags_on = {
        "use_recompute": (False, True),
        "recompute_granularity": (None, "full"),
        "recompute_method": (None, "block"),
    }
    assert differs_text({"micro_batch_size": (1, 2), **flags_on}, BY_NAME) == "MBS 1 -> 2, recompute off -> full block"
    assert differs_text({knob: pair[::-1] for knob, pair in flags_on.items()}, BY_NAME) == "recompute full block -> off"
    assert differs_text({"recompute_method": ("uniform", "block")}, BY_NAME) == "method uniform -> block"
    assert differs_text({"max_num_seqs": (None, 0), "enforce_eager": (None, False)}, BY_NAME) == (
        "max_num_seqs unset -> 0, enforce_eager unset -> off"
    )
