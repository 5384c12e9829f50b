"""The serving half of a spec, and job records of servers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from flagcore_importers.command import read_command
from flagcore_models.public import find_public, public_name
from flagcore_serving.job import Images, Load, ServeSpec

from flagcore.errors import SpecError
from flagcore.spec.convert import check_engines, engines_of, json_schema, parse_spec, select_engine
from flagcore.spec.jobs import read_job
from tests.checks import refuses
from tests.product.spec.test_page import BASE
from tests.product.tasks import ENGINES

MODEL = BASE["model"]


def serve(profile: dict[str, Any] | None = None, tuner: dict[str, Any] | None = None, **extra: Any) -> ServeSpec:
    data = {"model": MODEL, "serve": {"engine": "vllm", "profile": profile or {}} | extra, "auto_tuner": tuner or {}}
    return parse_spec(data, file="x", base=Path("/somewhere"), engines=ENGINES).serve


def error_of(*args: Any, **kwargs: Any) -> SpecError:
    with pytest.raises(SpecError) as refused:
        serve(*args, **kwargs)
    return refused.value


def test_a_spec_has_one_job() -> None:
    data = {"model": MODEL, "serve": {"engine": "vllm"}, "train": BASE["train"]}
    with refuses("serve", match="combined with train; remove one of the two"):
        parse_spec(data, file="x", base=Path("/somewhere"), engines=ENGINES)


def test_images_have_sizes_with_shares() -> None:
    found = serve({"images": {"bucket_config": {"1280x720": 3, "256x128": 1}}}).loads[0].images
    assert found == Images(buckets=((1280, 720, 0.75), (256, 128, 0.25)))
    assert Images(buckets=(), base_items_per_request=3, num_mm_items_range_ratio=0.5).counts == (1, 5)
    assert serve({}).loads[0].images is None


def test_a_list_of_clients_gives_several_load_points() -> None:
    assert [load.concurrency for load in serve({"concurrency": [1, 8]}).loads] == [1, 8]
    assert [load.request_rate for load in serve({"request_rate": [2.5, "inf"]}).loads] == [2.5, math.inf]
    assert [load.concurrency for load in serve({"num_prompts": 10}).loads] == [10]
    assert [load.concurrency for load in serve({"trace": "x.jsonl"}).loads] == [None]


def test_the_router_knows_prefixes_if_the_load_has_some() -> None:
    assert not serve({}).prefix_aware
    assert serve({"turns": 3}).prefix_aware
    assert serve({"trace": "x.jsonl"}).prefix_aware
    assert serve({}, router="prefix_aware").prefix_aware
    assert not serve({"turns": 3}, router="least_requests").prefix_aware


def test_a_load_without_a_number_is_steady_unless_it_needs_one() -> None:
    (load,) = serve({}).loads
    assert (load.num_prompts, load.is_steady, load.concurrency) == (None, True, 64)
    assert serve({"request_rate": 2.0}).loads[0].is_steady
    slo = {"ttft_s": {"p99": 1.0}}
    for profile in ({"trace": "x"}, {"turns": 2}, {"request_rate": "inf"}, {"request_rate": "auto"}):
        (load,) = serve(profile, slo=slo).loads  # type: ignore[arg-type]
        assert (load.num_prompts, load.is_steady) == (400, False)
    assert serve({"turns": 2}).loads[0].num_prompts == 128
    assert serve({"num_prompts": 10}).loads[0] == Load(num_prompts=10, concurrency=10)


@pytest.mark.parametrize(
    ("profile", "key"),
    [
        ({"concurrency": 4, "request_rate": 1.0}, "serve.profile.concurrency"),
        ({"range_ratio": 0.5, "range_spread": 0.5}, "serve.profile.range_spread"),
        ({"range_ratio": 0.5, "distribution": "lognormal"}, "serve.profile.distribution"),
        ({"images": {"bucket_config": {"8x8": 1}}, "turns": 2}, "serve.profile.images"),
        ({"images": {"bucket_config": {"8x8": 1}}, "trace": "x.jsonl"}, "serve.profile.images"),
        ({"images": {"bucket_config": {"8 by 8": 1}}}, "serve.profile.images.bucket_config['8 by 8']"),
        ({"images": {"bucket_config": {"10000x8": 1}}}, "serve.profile.images.bucket_config['10000x8']"),
        ({"images": {"bucket_config": {"8x8": 0}}}, "serve.profile.images.bucket_config['8x8']"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(profile: dict[str, Any], key: str) -> None:
    assert error_of(profile).key == key


@pytest.mark.parametrize("value", [None, 5, "vllm", []])
@pytest.mark.parametrize("model", [MODEL, None])
def test_a_serving_job_that_is_no_mapping_is_the_only_problem(value: object, model: object) -> None:
    with refuses("serve"):
        parse_spec({"model": model, "serve": value}, file="x", base=Path("/"), engines=ENGINES)


@pytest.mark.parametrize("more", [{"slo": {"itl_s": {"mean": 1.0}}}, {"tuner": {"objective": "tpot_s.p99"}}])
def test_answers_of_one_token_have_no_time_of_further_tokens(more: dict[str, Any]) -> None:
    assert error_of({"output_len": 1}, **more).key == "serve.profile.output_len"
    assert serve({"output_len": 2}, **more).loads[0].output_len == 2


def test_limits_have_the_names_of_figures() -> None:
    assert serve(slo={"ttft_s": {"p99": 1.0, "mean": 0.5}}).slo == {"ttft_s.mean": 0.5, "ttft_s.p99": 1.0}
    error = error_of(slo={"ttft_s": 1})
    assert error.key == "serve.slo.ttft_s"
    assert "p99" in error.problem


def test_paths_start_at_the_folder_of_the_spec() -> None:
    found = serve({"trace": "t.jsonl"}, weights="w.gguf", command=["run"])
    assert found.weights == "/somewhere/w.gguf"
    assert found.loads[0].trace == "/somewhere/t.jsonl"
    assert (found.command, found.directory) == (("run",), "/somewhere")


SEVERAL = {
    "model": MODEL,
    "serve": {"engine": ["vllm", "sglang"]},
    "auto_tuner": {"space": {"instances": [1, 2], "vllm": {"block_size": [16]}, "sglang": {"page_size": [1]}}},
}


def test_several_engines_have_separate_sections_of_knobs() -> None:
    assert engines_of(SEVERAL, ENGINES.kinds) == ("vllm", "sglang")
    spec = parse_spec(select_engine(SEVERAL, "sglang", ENGINES.kinds), file="x", base=Path(), engines=ENGINES)
    assert spec.space == {"instances": (1, 2), "page_size": (1,)}
    with refuses("serve.engine", ["vllm", "sglang"]):
        parse_spec(SEVERAL, file="x", base=Path(), engines=ENGINES)


def test_knobs_of_an_engine_that_is_not_named_are_refused() -> None:
    data = {**SEVERAL, "auto_tuner": {"space": {"vlm": {"block_size": 16}}}}
    with pytest.raises(SpecError, match=r"auto_tuner\.space\.vlm has knobs of an engine that serve\.engine does not"):
        select_engine(data, "vllm", ENGINES.kinds)
    with pytest.raises(SpecError) as refused:
        parse_spec({**data, "serve": {"engine": "vllm"}}, file="x", base=Path(), engines=ENGINES)
    assert "auto_tuner.space.vlm" in refused.value.key


INT8 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}}


@pytest.mark.parametrize(
    ("stored", "precision"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "int4"),
        ({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}, "int4"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "int4"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "nvfp4"),
        ({"quantization_config": INT8}, "int8"),
        ({"text_config": {"quantization_config": INT8}}, "int8"),
        ({"quantization_config": INT8 | {"config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}}}}}, "bf16"),
        ({"quantization_config": INT8 | {"config_groups": [1]}}, "bf16"),
        ({"quantization_config": {"quant_method": "new"}}, "bf16"),
        ({}, "bf16"),
    ],
)
def test_the_precision_of_a_server_is_that_of_its_weights(tmp_path: Path, stored: object, precision: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert serve(weights=str(tmp_path)).precision == precision
    assert serve(weights=str(tmp_path / "config.json")).precision == precision
    fp8 = serve(weights=str(tmp_path), precision="fp8", engine_args={"seed": 1})
    assert (fp8.precision, fp8.engine_args.get("quantization")) == ("fp8", None if stored else "fp8")
    assert "quantization" not in serve(weights=str(tmp_path), precision="fp8", engine="lmdeploy").engine_args


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("unsloth/Qwen3.8-27B-GGUF:UD-Q4_K_XL", "q4_k_m"),
        ("bartowski/Qwen_Qwen3.5-27B-GGUF", "q4_k_m"),
        ("a/GLM-4.5-Air-GGUF:IQ2_XXS", "iq2_xxs"),
        ("a/Qwen3-8B-Q8_0.gguf", "q8_0"),
        ("a/Qwen3-8B-GGUF:F16", "bf16"),
        ("ggml-org/gpt-oss-20b-GGUF", "int4"),
    ],
)
def test_names_of_gguf_files_say_their_format(name: str, form: str) -> None:
    """llama-server takes Q4_K_M of a repository without a tag (llama.cpp `common/download.cpp` @0216dab3)."""
    assert serve(weights=name).precision == form


@pytest.mark.parametrize("text", ["{", "\xff"])
def test_a_damaged_config_file_does_not_change_the_precision(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, "latin-1")
    assert serve(weights=str(tmp_path)).precision == "bf16"


RECORD: dict[str, Any] = {
    "id": "a",
    "kind": "serve",
    "model": MODEL,
    "cluster": {"chip": "x", "devices": 4, "devices_per_node": 8},
    "serve": {"engine": "vllm", "engine_version": "", "precision": "fp8", "input_len": 1024, "output_len": 128},
    "candidate": {"tensor_model_parallel_size": 4, "enforce_eager": True},
}


def job_of(**changes: Any) -> Any:
    return read_job({**RECORD, "serve": {**RECORD["serve"], **changes}, "more": 1}, ENGINES)


def test_a_record_of_a_server_becomes_a_job() -> None:
    closed = job_of(concurrency=8, num_prompts=None)
    assert closed.work.loads == (Load(input_len=1024, output_len=128, concurrency=8, num_prompts=None),)
    assert closed.work.engine_version is None
    assert closed.candidate == {"tensor_model_parallel_size": 4, "enforce_eager": True}
    assert job_of(request_rate="inf", num_prompts=64).work.loads[0].request_rate == math.inf


def test_a_record_may_name_the_file_whose_weights_are_served(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    with refuses("serve.weights", str(file)):
        job_of(concurrency=8, weights=str(file))
    file.touch()
    assert job_of(concurrency=8, weights=str(file)).work.weights == str(file)


@pytest.mark.parametrize("load", [{}, {"concurrency": 4, "request_rate": 2.0}])
def test_a_record_needs_exactly_one_kind_of_load(load: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"serve\.concurrency and serve\.request_rate"):
        job_of(**load)


@pytest.mark.parametrize("value", [{"deep": 1}, [[1, 2]]])
def test_a_flag_of_the_engine_has_no_nested_value(value: Any) -> None:
    with pytest.raises(SpecError, match=r"serve\.engine_args\.flag"):
        serve({}, engine_args={"flag": value})
    with pytest.raises(SpecError, match=r"serve\.engine_args\.flag"):
        job_of(concurrency=8, engine_args={"flag": value})


@pytest.mark.parametrize(
    ("engine", "knob", "value", "key"),
    [
        ("vllm", "nope", [1], "auto_tuner.space.nope"),
        ("vllm", "max_num_seqs", ["x"], "auto_tuner.space.max_num_seqs[0]"),
        ("vllm", "max_num_seqs", [0], "auto_tuner.space.max_num_seqs[0]"),
        ("vllm", "max_num_seqs", [0.5], "auto_tuner.space.max_num_seqs[0]"),
        ("vllm", "kv_cache_type", ["fp3"], "auto_tuner.space.kv_cache_type[0]"),
        ("vllm", "prefill_decode", ["1xtp1+1xtp1", "2+2"], "auto_tuner.space.prefill_decode[1]"),
        ("vllm", "gpu_memory_utilization", [1.5], "auto_tuner.space.gpu_memory_utilization[0]"),
        ("lmdeploy", "backend", ["torch"], "auto_tuner.space.backend[0]"),
        ("lmdeploy", "n_gpu_layers", 1, "auto_tuner.space.n_gpu_layers"),
    ],
)
def test_a_space_has_the_knobs_of_the_engine_that_the_spec_names(engine: str, knob: str, value: Any, key: str) -> None:
    error = error_of(tuner={"space": {knob: value}}, engine=engine)
    assert [each.key for each in error.problems] == [key]
    if isinstance(value, list) and len(value) == 1 and knob != "nope":
        assert error.value == value[0]


def test_the_schema_has_the_knobs_of_each_engine() -> None:
    schema = json_schema(ENGINES)["$defs"]
    for engine in ("vllm", "lmdeploy"):
        knobs = schema[f"ServeSpace_{engine}"]["properties"]
        assert "auto" in str(knobs["max_num_seqs"])
        assert ("backend" in knobs) == (engine == "lmdeploy")


def test_other_spellings_of_knobs_and_values_are_valid() -> None:
    space = {"quant_policy": [8, "fp8", None], "max_num_seqs": "auto", "cache_max_entry_count": ["0.9", 0.5]}
    data = {"model": MODEL, "serve": {"engine": "lmdeploy"}, "auto_tuner": {"space": space}}
    found = parse_spec(data, file="x", base=Path(), engines=ENGINES).space
    assert found == {"quant_policy": (8, "fp8", None), "max_num_seqs": "auto", "cache_max_entry_count": ("0.9", 0.5)}


def test_weights_of_autoround_keep_their_shape_and_format() -> None:
    """The words of their repository's name, and of vLLM's flag, which is another name of inc."""
    name = "Frozenlock/Qwen3-8B-int4-AutoRound"
    assert (public_name(name), (find_public(name) or ({}, None))[1]) == ("Qwen/Qwen3-8B", "int4")
    imported = read_command("vllm", [f"vllm serve {name} --quantization auto_round"])
    assert imported.data["auto_tuner"]["baseline"]["quantization"] == "inc"
    assert not [note for note in imported.notes if note.key == "quantization" and "not predicted" in note.text]


def test_one_knob_under_two_names_is_an_error() -> None:
    error = error_of(tuner={"space": {"max_batch_size": [4], "max_num_seqs": [8]}}, engine="lmdeploy")
    assert error.key == "auto_tuner.space.max_num_seqs"


def test_each_engine_of_a_list_has_its_own_knobs() -> None:
    space = {"instances": [1], "vllm": {"n_gpu_layers": [1]}, "sglang": {"page_size": [0]}, "block_size": ["x"]}
    data = {**SEVERAL, "auto_tuner": {"space": space}}
    with pytest.raises(SpecError) as refused:
        check_engines(data, file="x", base=Path(), engines=ENGINES)
    assert {each.key for each in refused.value.problems} == {
        "auto_tuner.space.vllm.n_gpu_layers",
        "auto_tuner.space.sglang.page_size[0]",
        "auto_tuner.space.block_size[0]",
    }
    check_engines(SEVERAL, file="x", base=Path(), engines=ENGINES)


@pytest.mark.parametrize(
    ("profile", "slo", "requests"),
    [
        ({}, {"ttft_s": {"p90": 0.5}}, 1000),
        ({}, {"tpot_s": {"mean": 0.05}, "ttft_s": {"mean": 0.1}}, 3200),
        ({}, {"e2e_s": {"mean": 2.0}}, 2000),
        ({}, {"ttft_s": {"p99": 0.001}}, 400),
        ({"num_prompts": 50}, {"ttft_s": {"p95": 0.5}}, 50),
    ],
)
def test_a_search_for_the_highest_rate_sends_requests_for_long_enough(
    profile: dict[str, Any], slo: dict[str, Any], requests: int
) -> None:
    (load,) = serve({"request_rate": "auto", **profile}, slo=slo).loads
    assert load.at("request_rate", 100.0).num_prompts == requests
