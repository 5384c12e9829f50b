"""Records of jobs, and the lines of their file.

Public models: the names of their repositories, and their parameters.
"""

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_models.layers import parameters
from flagcore_models.public import find_public, public_models

from engines.models.tests.test_models import DEEPSEEK_V3, GPT_OSS, MIXTRAL, QWEN3_NEXT, QWEN35_MOE, config
from flagcore.errors import SpecError
from flagcore.spec.convert import parse_spec
from flagcore.spec.jobs import read_job, read_job_lines
from flagcore.spec.models import model_from
from tests.checks import given, refuses
from tests.product.tasks import ENGINES, SHAPE

ErrorOf = Callable[..., SpecError]
RECORD: dict[str, Any] = {
    "id": "a#1",
    "kind": "train",
    "source": "somebody",
    "model": {"name": "tiny", **SHAPE},
    "cluster": {"chip": "Example 80G", "devices": 8, "devices_per_node": 4, "interconnect": "tin cans"},
    "train": {"seq_length": 128, "global_batch_size": 8, "precision": "nvfp4", "attention": "unfused", "notes": "?"},
    "candidate": {
        "tensor_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "num_layers_in_first_pipeline_stage": 1,
        "num_layers_in_last_pipeline_stage": 3,
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp", "core_attn"],
        "pipeline_schedule": "zb-h1",
    },
    "measured": {"step_time_s": float("nan")},
}


def changed(path: tuple[str, ...], value: object) -> dict[str, Any]:
    record = copy.deepcopy(RECORD)
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return record


def test_a_record_becomes_a_job_and_unknown_keys_are_ignored() -> None:
    job = read_job(RECORD, ENGINES)
    assert (job.id, job.work.kind, job.chip, job.devices, job.devices_per_node) == ("a#1", "train", "Example 80G", 8, 4)
    assert (job.model.name, job.model.kv_channels) == ("tiny", 16)
    assert (job.work.precision, job.work.attention, job.work.implementation) == ("nvfp4", "unfused", None)
    settings = {"recompute_modules": "core_attn,mlp", "pipeline_schedule": "zb-h1"}
    assert job.work.settings == settings
    assert job.candidate == {key: value for key, value in RECORD["candidate"].items() if key not in settings}
    assert job.notes == "?"
    assert job.rank is None


@pytest.mark.parametrize("modules", ["mlp, core_attn", "mlp core_attn", ["core_attn", "mlp", "mlp"]])
def test_recompute_modules_are_one_sorted_text(modules: object) -> None:
    job = read_job(changed(("candidate", "recompute_modules"), modules), ENGINES)
    assert job.work.settings["recompute_modules"] == "core_attn,mlp"


@pytest.mark.parametrize("path", [("train",), ("train", "settings"), ("candidate",)])
def test_settings_may_be_in_three_places(path: tuple[str, ...]) -> None:
    record = changed(("train", "settings"), {})
    place = record
    for key in path:
        place = place[key]
    place |= {"overlap_grad_reduce": True, "no_overlap_p2p_communication": True, "exp_avg_dtype": None}
    found = read_job(record, ENGINES).work.settings
    assert found["overlap_grad_reduce"] is True
    assert found["overlap_p2p_comm"] is False
    assert not {"exp_avg_dtype", "no_overlap_p2p_communication"} & set(found)


@pytest.mark.parametrize("value", [True, False])
def test_a_setting_and_its_opposite_may_not_contradict_each_other(value: bool) -> None:
    arguments = {"overlap_p2p_comm": value, "no_overlap_p2p_communication": value}
    with pytest.raises(SpecError, match=r"no_overlap_p2p_communication.*is the negation of overlap_p2p_comm.*one of"):
        read_job(changed(("train", "settings"), arguments), ENGINES)
    agreed = read_job(
        changed(("train", "settings"), arguments | {"overlap_p2p_comm": not value}), ENGINES
    ).work.settings
    assert agreed["overlap_p2p_comm"] is not value


def test_settings_of_a_candidate_override_those_of_its_job() -> None:
    record = changed(("train", "settings"), {"pipeline_schedule": "1f1b", "expert_tensor_parallel_size": 4})
    job = read_job(record, ENGINES)
    assert job.work.settings["pipeline_schedule"] == "zb-h1"
    assert job.candidate["expert_tensor_parallel_size"] == 1


@pytest.mark.parametrize(
    ("path", "value", "key", "problem"),
    [
        (("kind",), "serve", "serve", "is missing"),
        (("kind",), "dance", "kind", "must be train"),
        (("id",), 5, "id", "must be a string"),
        (("rank",), 8, "rank", "below cluster.devices = 8"),
        (("rank",), -1, "rank", "from 0"),
        (("model",), "nowhere", "model", "is neither a path nor"),
        (("model", "hidden_size"), 66, "model.hidden_size", "divisible"),
        (("train", "precision"), "BF16", "train.precision", "bf16"),
        (("candidate",), [], "candidate", "must be a mapping"),
        (("candidate", "micro_batch_size"), "2", "candidate.micro_batch_size", "a whole number"),
        (("candidate", "sequence_parallel"), 1, "candidate.sequence_parallel", "true or false"),
        (("candidate", "recompute_modules"), "core_atn", "candidate.recompute_modules[0]", "core_attn"),
        (("candidate", "moe_expert_imbalance"), 0.5, "candidate.moe_expert_imbalance", "from 1"),
        (("train", "cp_comm_type"), "p3p", "train.cp_comm_type", "a2a"),
    ],
)
def test_invalid_record_is_refused_by_its_key(
    error_of: ErrorOf, path: tuple[str, ...], value: object, key: str, problem: str
) -> None:
    error = error_of(read_job, changed(path, value), ENGINES)
    assert error.key.startswith(key.removesuffix("[0]"))
    assert problem in error.problem


SLIPS = [
    (("train", "seq_len"), 128, "train.seq_len", "did you mean seq_length?"),
    (("train", "settings"), {"fp8_gather": True}, "train.settings.fp8_gather", "fp8_param_gather"),
    (("cluster", "device_per_node"), 8, "cluster.device_per_node", "did you mean devices_per_node?"),
    (("candidate", "pp"), 2, "candidate.pp", "did you mean pipeline_model_parallel_size?"),
    (("train", "micro_batch_size"), 2, "train.micro_batch_size", "belongs under candidate"),
    (("micro_batch_size",), 2, "micro_batch_size", "belongs under candidate"),
    (("rnak",), 1, "rnak", "did you mean rank?"),
]


@pytest.mark.parametrize(("path", "value", "key", "fix"), SLIPS)
def test_a_misspelt_key_is_reported_with_the_right_one(
    error_of: ErrorOf, path: tuple[str, ...], value: object, key: str, fix: str
) -> None:
    error = error_of(lambda: read_job(changed(path, value), ENGINES))
    assert error.key == key
    assert "is not a known key" in error.problem
    assert fix in error.fix


def test_source_keys_may_be_at_any_usual_place_of_a_record() -> None:
    record = {**RECORD, "notes": "from a table", "comment": "?", "figure": 3, "revision": {"rank_order": 1}}
    record["cluster"] = {**RECORD["cluster"], "source": "page 2", "notes": ["a"], "nodes": 2}
    record["train"] = {**RECORD["train"], "source": "page 2", "engine": "megatron"}
    assert read_job(record, ENGINES) == read_job(RECORD, ENGINES)


@pytest.mark.parametrize(
    ("text", "rate"), [("NVLink, inter-node 800 Gbps", 25e9), ("IB 8x50GB/s", 100e9), ("tin cans", None)]
)
def test_the_network_of_a_node_is_read_from_its_interconnect(text: str, rate: float | None) -> None:
    assert read_job(changed(("cluster", "interconnect"), text), ENGINES).nic_bytes_per_second == rate


@pytest.mark.parametrize(
    ("cluster", "devices"), [({"nodes": 3}, 12), ({"devices": 2}, 2), ({"devices": 2, "nodes": 1}, 2)]
)
def test_nodes_may_be_set_if_they_match_the_allocation(cluster: dict[str, int], devices: int) -> None:
    assert read_job(changed(("cluster",), {"chip": "x", "devices_per_node": 4, **cluster}), ENGINES).devices == devices


def test_nodes_that_contradict_the_devices_are_reported(error_of: ErrorOf) -> None:
    error = error_of(lambda: read_job(changed(("cluster", "nodes"), 3), ENGINES))
    assert (error.key, error.value) == ("cluster.nodes", 3)
    assert "must be 2: cluster.devices = 8 at devices_per_node = 4" in error.problem
    error = error_of(lambda: read_job(changed(("cluster",), {"chip": "x", "devices_per_node": 4}), ENGINES))
    assert (error.key, error.problem) == ("cluster.devices", "is missing")
    error = error_of(
        lambda: read_job(changed(("cluster",), {"chip": "x", "devices_per_node": 8, "nodes": 10**6}), ENGINES)
    )
    assert error.key == "cluster.nodes"


WRONG = {
    "cut short": (b'{"id": "a", ', "cannot be read as JSON"),
    "a list": (b"[1]", "JSON object"),
    "no id": (b"{}", "id must be"),
    "a number for an id": (b'{"id": 1}', "id must be"),
    "a key given twice": (b'{"id": "a", "model": {"x": 1, "x": 2}}', "has the key 'x' twice"),
    "Latin 1": (b'{"id": "\xe9"}', "is not UTF-8 text"),
    "deep": (b'{"id": ' + b"[" * 100_000, "is nested too deep"),
    "many digits": (b'{"id": ' + b"9" * 5000 + b"}", "digits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_line_without_a_record_is_reported_by_file_and_number_and_the_next_is_read(name: str) -> None:
    line, words = WRONG[name]
    lines = io.BytesIO(b'{"id": "first"}\n\n' + line + b'\n{"id": "last"}')
    first, error, last = read_job_lines(lines, file="some.jsonl")
    assert (first, last) == ({"id": "first"}, {"id": "last"})
    assert isinstance(error, SpecError)
    assert error.key == "some.jsonl: line 3"
    assert words in error.problem


def test_a_byte_order_mark_is_accepted() -> None:
    assert list(read_job_lines(io.BytesIO(b'\xef\xbb\xbf{"id": "a"}\n'), file="x")) == [{"id": "a"}]


KNOWN = {
    "Gemma-7B": (config("gemma", 28, 3072, 24576, 16, 256000), 8_537_680_896),
    "Mixtral-8x7B": (MIXTRAL, 46_702_792_704),
    "gpt-oss-120b": (GPT_OSS, 116_829_156_672),
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_419_200),
    "DeepSeek-V3.2": (config("deepseek_v32", 61, 7168, 18432, 128, 129280), 671_877_929_216),
    "GLM-5": (config("glm_moe_dsa", 78, 6144, 12288, 64, 154880), 743_911_199_232),
    "GLM-4.5-Air": (config("glm4_moe", 46, 4096, 10944, 96, 151552, head_dim=128), 106_852_251_264),
    "GLM-4.7-Flash": (config("glm4_moe_lite", 47, 2048, 10240, 20, 154880), 29_943_390_976),
    "MiniMax-M2": (config("minimax_m2", 62, 3072, 1536, 48, 200064), 228_689_748_992),
    "Llama-4-Scout": (config("llama4_text", 48, 5120, 8192, 40, 202048), 107_769_861_120),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, 79_674_391_296),
    "Qwen3.5-9B": (config("qwen3_5_text", 32, 4096, 12288, 16, 248320), 8_953_803_264),
    "Qwen3.5-35B-A3B": (QWEN35_MOE, 34_660_610_688),
    "Ministral-3-8B": (config("ministral3", 34, 4096, 14336, 32, 131072), 8_489_553_920),
}
"""Models with sizes that no other test checks: the keys of config.json, and the parameters that the authors
or the weights report, or that the model of transformers 5.19 with this config.json has."""


@pytest.mark.parametrize(("data", "count"), KNOWN.values(), ids=KNOWN)
def test_known_model_has_its_known_number_of_parameters(data: dict[str, Any], count: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert parameters(model_from(".", base=tmp_path)) == pytest.approx(count, rel=6e-4)


@pytest.mark.parametrize("off", [0, None, [0, None]])
def test_all_forms_of_no_virtual_stages_are_one_value(off: Any) -> None:
    train = {"engine": "megatron", "seq_length": 128, "global_batch_size": 8, "precision": "bf16"}
    space = {"num_layers_per_virtual_pipeline_stage": off}
    data = {"model": SHAPE, "train": train, "auto_tuner": {"space": space}}
    assert parse_spec(data, file="x", base=Path(), engines=ENGINES).space.items() >= {(*space, (None,))}


BILLIONS: dict[str, float] = yaml.safe_load(Path(__file__).with_name("parameters.yaml").read_text())


def test_a_public_model_has_its_published_number_of_parameters() -> None:
    found = {name: parameters(model_from(name, base=Path())) / 1e9 for name in BILLIONS}
    rounded = "baidu/ERNIE-4.5-300B-A47B-PT"
    assert found.pop(rounded) == pytest.approx(BILLIONS[rounded], rel=4e-3)
    assert found == pytest.approx({name: BILLIONS[name] for name in found}, rel=1e-3)


NOT_READ = {"max_position_embeddings", "quantization_config", "vision_config", "audio_config", "laurel_rank"}
NOT_READ |= {"indexer_compress_ratio", "hc_count", "ngram_vocab_size_base"}
NOT_READ |= {"rms_norm_eps", "rope_theta", "rope_scaling", "partial_rotary_factor"}  # which exports read
NOT_READ |= {"norm_topk_prob", "routed_scaling_factor"}


def test_all_other_keys_of_public_models_are_read() -> None:
    found = {
        name: {key.partition(".")[0] for key, _ in model_from(name, base=Path()).unread} for name in public_models()
    }
    assert {name: keys - NOT_READ for name, keys in found.items() if keys - NOT_READ} == {}


@pytest.mark.parametrize(
    ("name", "shape", "weights"),
    [
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B", None),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B", "fp8"),
        ("amd/Llama-3.3-70B-Instruct-FP8-KV", "meta-llama/Llama-3.3-70B-Instruct", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "Qwen/Qwen2.5-72B", "int8"),
        ("RedHatAI/DeepSeek-R1-0528-quantized.w4a16", "deepseek-ai/DeepSeek-R1", "int4"),
        ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek-ai/DeepSeek-V3.1", "nvfp4"),
        ("nvidia/DeepSeek-R1-0528-NVFP4-v2", "deepseek-ai/DeepSeek-R1", "nvfp4"),
        ("amd/DeepSeek-R1-0528-MXFP4-MTP-MoEFP4", "deepseek-ai/DeepSeek-R1", "mxfp4"),
        ("amd/Llama-3.3-70B-Instruct-MXFP4-Preview", "meta-llama/Llama-3.3-70B-Instruct", "mxfp4"),
        ("Intel/Qwen3-14B-int4-mixed-AutoRound", "Qwen/Qwen3-14B", "int4"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3", "fp8"),
        ("unsloth/DeepSeek-R1-BF16", "deepseek-ai/DeepSeek-R1", None),
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Meta-Llama-3.1-70B", None),
        ("any/gpt-oss-120b-dequantized", "openai/gpt-oss-120b", None),
        ("any/llama-3-70b-fp16", "meta-llama/Meta-Llama-3-70B", None),
    ],
)
def test_variants_have_the_shape_of_their_model(name: str, shape: str, weights: str | None) -> None:
    (found, stored), (known, _) = given(find_public(name)), given(find_public(shape))
    assert (found | {"quantization_config": None}, stored) == (known | {"quantization_config": None}, weights)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-9B", "Qwen3-8B", "a/b/Qwen3-8B", "./Qwen3-8B/x", ""])
def test_other_names_are_unknown(name: str) -> None:
    assert find_public(name) is None


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8C", "Qwen3-8B", "/nowhere/Qwen3-8B-FP8"])
def test_a_misspelled_name_and_a_path_that_does_not_exist_get_the_nearest_name(name: str, tmp_path: Path) -> None:
    with refuses("model", name, match="Qwen/Qwen3-8B"):
        model_from(name, base=tmp_path)


def test_a_directory_wins_over_a_public_name(tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    with pytest.raises(SpecError):
        model_from("Qwen/Qwen3-8B", base=tmp_path)
