import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flagcore_importers.command import read_command
from flagcore_models.catalogue import public_model
from flagcore_models.config import model_of_config
from flagcore_models.layers import state_bytes
from flagcore_models.mixers.attention import Indexer
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_serving.space.placement import instance_kinds
from flagcore_sglang import pools
from flagcore_sglang.engine import ENGINE as ENGINE
from flagcore_sglang.pools import compressed_token_bytes
from flagcore_sglang.space import memory_defaults

from engines.models.tests.examples import mixed
from engines.serving.tests.engines.tasks import GIB, broken, figures, merged, planned, row, server, settings
from flagcore.api import estimate_jobs
from flagcore.domain.model import Model
from tests.product.serving_inputs import EXPERTS, LATENT
from tests.product.tasks import DENSE, VISION

PAIR = {"prefill_decode": "1xtp1+1xtp1"}
SPARSE = mixed(LATENT, {"indexer": Indexer(heads=32, head_dim=128, top_k=2048)}, LATENT.num_layers)


def cards(**arguments: Any) -> Any:
    return planned("sglang", **arguments)


def cores(**arguments: Any) -> Any:
    return planned("sglang", on_cores=True, **arguments)


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.5.21", "--dp-size 2 --enable-dp-attention"), ("0.5.22", "--attn-dp-size 2"), ("", "--enable-dp-attention")],
)
def test_attention_dp_is_inside_sglangs_tp_size_in_old_and_new_spelling(version: str, words: str) -> None:
    argv = server(cards(engine_version=version), tensor_model_parallel_size=2, data_parallel_size=2).argv
    assert argv[8:10] == ("--tp-size", "4")
    assert " ".join(argv).endswith(words)


def test_weights_on_the_host_take_no_memory_of_the_device() -> None:
    assert settings(cards(engine_args={"cpu-offload-gb": 3})).offloaded.item() == pytest.approx(3 * GIB)
    groups = {"offload-group-size": 2, "offload-num-in-group": 1}
    layers = DENSE.num_layers // 2 - 1  # one is on its way
    assert settings(cards(model=DENSE, engine_args=groups)).prefetched.item() * DENSE.num_layers == layers
    args = {"kt-weight-path": "/weights", "kt-num-gpu-experts": 32}
    assert settings(cards(model=EXPERTS, engine_args=args)).experts_on_host.item() == EXPERTS.num_layers * 0.75
    assert not settings(cards(model=DENSE, engine_args=args)).experts_on_host.any()
    assert not settings(cards(model=EXPERTS, engine_args={"kt-num-gpu-experts": 32})).experts_on_host.any()


def test_the_cache_of_a_server_on_cores_is_always_bounded() -> None:
    assert server(cores()).argv[-4:] == ("--device", "cpu", "--max-total-tokens", str(2 * 16 * (128 + 64)))
    token = DENSE.num_layers * 2 * DENSE.num_query_groups * DENSE.kv_channels * 2 / 2
    assert settings(cores()).cache_bytes.item() == pytest.approx(2 * 16 * 192 * token)
    assert server(cores(engine_args={"max_total_tokens": 5000})).argv.count("--max-total-tokens") == 1
    assert "--max-total-tokens" not in server(cards()).argv


def test_a_limit_of_tokens_is_no_demand_and_has_sglangs_units() -> None:
    def kept(tokens: object) -> float:
        args: Any = {} if tokens is None else {"max-total-tokens": tokens}
        return figures(cards(engine_args=args))["kv_cache_tokens"]

    assert kept(10**9) == kept(None) < 10**9
    assert kept("20k") == kept(20_000) == 20_000 < kept("20Ki") == 20_480


def test_the_unique_start_of_a_switch_is_that_switch() -> None:
    words = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --disable-radix --mem-frac 0.8"
    baseline: Any = read_command(None, [words], chip="H100-SXM").data["auto_tuner"]["baseline"]

    assert (baseline["enable_prefix_caching"], str(baseline["mem_fraction_static"])) == (False, "0.8")


def test_older_releases_answer_at_another_path() -> None:
    def fetch(path: str) -> str:
        if path != "/get_server_info":
            raise OSError("404")
        return json.dumps({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True})

    reported = ENGINE.reports.effective(fetch, "")
    assert (reported["tensor_model_parallel_size"], reported["data_parallel_size"]) == (2, 2)


def test_a_server_of_unset_drafted_tokens_lets_sglang_choose_them() -> None:
    task = cards(engine_args={"speculative_algorithm": "EAGLE3", "speculative-draft-model-path": "draft"})
    assert broken(ENGINE, task) == []
    assert settings(task).drafted.item() == 3
    tree = {"speculative-num-steps": 5, "speculative-eagle-topk": 4, "speculative-num-draft-tokens": 8}
    task = cards(engine_args={**task.spec.serve.engine_args, **tree})
    assert settings(task).drafted.item() == 5
    assert server(task).argv[-6:] == tuple(str(word) for name, value in tree.items() for word in (f"--{name}", value))


def predicted(version: str, **candidate: int) -> dict[str, Any]:
    serve = {"engine": "sglang", "engine_version": version, "precision": "bf16"}
    serve |= {"input_len": 65536, "output_len": 8, "concurrency": 1}
    cluster = {"chip": "NVIDIA H200", "devices": math.prod(candidate.values()), "devices_per_node": 8}
    job = {"id": "one", "kind": "serve", "model": "Qwen/Qwen3-32B", "cluster": cluster, "serve": serve}
    return next(iter(estimate_jobs([{**job, "candidate": {**candidate, "chunked_prefill_size": 8192}}])))


def test_stages_compute_pieces_of_one_prompt_together_and_old_releases_wait_between_stages() -> None:
    one, four = (predicted("0.5.8", pipeline_model_parallel_size=stages) for stages in (1, 4))
    assert one["ttft_s"]["mean"] > 2.5 * four["ttft_s"]["mean"]
    old = predicted("0.5.5", pipeline_model_parallel_size=4)
    assert old["tpot_s"]["mean"] == pytest.approx(four["tpot_s"]["mean"] + 3 * 9e-3, rel=0.02)


@pytest.mark.parametrize(
    ("version", "values", "ahead"),
    [
        ("0.5.6", {}, 1.0),
        ("0.5.6", {"async_scheduling": False}, 0.0),
        ("0.5.10", {"speculation": "NEXTN"}, 0.0),
        ("0.5.11", {"speculation": "NEXTN"}, 1.0),
        ("0.5.23", {"pipeline_model_parallel_size": 2}, 0.0),
    ],
)
def test_a_batch_is_planned_ahead_by_default_but_not_with_stages(
    version: str, values: dict[str, Any], ahead: float
) -> None:
    assert settings(cards(engine_version=version), **values).ahead.item() == ahead


def test_cached_states_are_planned_ahead_in_newer_releases_only() -> None:
    states = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=8, value_dim=8, kernel=4)

    def ahead(version: str, args: dict[str, Any], **values: bool) -> float:
        task = cards(model=mixed(DENSE, states, 2), engine_version=version, engine_args=args)
        return float(settings(task, **values).ahead.item())

    assert ahead("0.5.13", {}, enable_prefix_caching=True) == 0.0
    assert ahead("0.5.13", {}, enable_prefix_caching=False) == 1.0
    assert ahead("0.5.13", {"mamba-scheduler-strategy": "extra_buffer"}, enable_prefix_caching=True) == 1.0
    assert ahead("0.5.14", {}, enable_prefix_caching=True) == 1.0


@pytest.mark.parametrize(
    ("architecture", "words", "element"),
    [
        ("sm_90", {}, 2.0),
        ("sm_103", {}, 1.0),
        ("sm_100", {"kv_cache_type": "bfloat16"}, 2.0),
        ("gfx942", {}, 2.0),
        ("sm_90", {"kv_cache_type": "fp8_e4m3"}, 656 / 576),
        ("sm_100", {"kv_cache_type": "fp8_e4m3"}, 1.0),
    ],
)
def test_sparse_latent_attention_caches_fp8_by_default_on_new_chips(
    architecture: str, words: dict[str, str], element: float
) -> None:
    chip = {"architecture": architecture}
    assert settings(cards(chip=chip), **words).cache_element_bytes.item() == (1.0 if "fp8" in str(words) else 2.0)
    assert settings(cards(chip=chip, model=SPARSE), **words).cache_element_bytes.item() == element


@pytest.mark.parametrize(
    ("engine", "method", "stated", "element"),
    [
        ("vllm", "compressed-tensors", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1.0),
        ("vllm", "compressed-tensors", {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, 2.0),
        ("vllm", "modelopt", {"kv_cache_quant_algo": "FP8"}, 1.0),
        ("sglang", "compressed-tensors", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 2.0),
        ("sglang", "modelopt", {"kv_cache_quant_algo": "FP8"}, 1.0),
        ("sglang", "modelopt", {"kv_cache_quant_algo": None}, 2.0),
        ("trtllm", "modelopt", {"kv_cache_quant_algo": "FP8"}, 1.0),
    ],
)
def test_a_checkpoint_may_state_the_type_of_the_cache(
    engine: str, method: str, stated: dict[str, object], element: float
) -> None:
    config: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256}
    config |= {"intermediate_size": 512, "num_attention_heads": 8, "vocab_size": 1000}
    config["quantization_config"] = {"quant_method": method, **stated}
    task = planned(engine, model=model_of_config(config, name="", file="config.json"))
    assert settings(task).cache_element_bytes.item() == element
    assert settings(task, kv_cache_type="bfloat16").cache_element_bytes.item() == 2.0
    task = planned(engine, model=public_model("nvidia/Llama-3.3-70B-Instruct-FP4"))
    assert settings(task).cache_element_bytes.item() == 1.0


@pytest.mark.parametrize(
    ("family", "args", "share"),
    [
        ("gpt_oss", {}, 0.8),
        ("gpt_oss", {"swa-full-tokens-ratio": 0.5}, 0.5),
        ("gpt_oss", {"disable-hybrid-swa-memory": True}, 0.0),
        ("step3p5", {"enable-hierarchical-cache": True}, 0.0),
        ("inkling_text", {}, 0.1),
        ("gemma3_text", {}, 0.0),
    ],
)
def test_windows_of_some_families_have_a_part_of_the_cache(family: str, args: dict[str, Any], share: float) -> None:
    task = cards(model=replace(DENSE, family=family), engine_args=args)
    found, ratio = settings(task), 0.1 if family == "inkling_text" else 0.9
    assert (found.window_share.item(), found.state_share.item()) == (share, ratio / (1.0 + ratio))


def test_a_flag_sets_the_type_of_states() -> None:
    model = public_model("Qwen/Qwen3.6-27B")
    narrow = pools.with_states(model, {"mamba-ssm-dtype": "bfloat16"})
    assert state_bytes(narrow) == pytest.approx(state_bytes(model) / 2.0, rel=0.05)  # convolutions have 16 bits anyway
    assert pools.with_states(model, {}) is model


def test_compressed_attention_has_its_own_defaults() -> None:
    task = cards(model=public_model("deepseek-ai/DeepSeek-V4-Flash"))
    found = settings(task, data_parallel_size=4)
    assert found.max_running.item() == 64
    assert found.cache_element_bytes.item() == 584 / 512
    assert settings(task, max_running_requests=128, kv_cache_type="bfloat16").cache_element_bytes.item() == 2.0


def test_a_server_that_speculates_runs_48_requests_of_all_attention_groups_by_default() -> None:
    def running(**values: Any) -> float:
        return float(settings(cards(), **values).max_running.item())

    assert (running(), running(speculation="NGRAM")) == (2048, 48)
    assert running(speculation="NGRAM", data_parallel_size=2) == 24
    assert running(speculation="NGRAM", max_running_requests=96) == 96


@pytest.mark.parametrize(
    ("model", "version", "values", "mib"),
    [
        (DENSE, "0.5.23", {}, 8 * 58),  # 58 sizes up to 8,192 tokens
        (DENSE, "0.5.23", {"chunked_prefill_size": -1}, 1.5 * (16384 - 8192)),
        (DENSE, "0.5.23", {"enforce_eager": True}, -512),  # no graphs of answers either: 256 of 2 MiB
        (DENSE, "0.5.23", {"all2all_backend": "deepep"}, 8 * 58 + 3072),
        (DENSE, "0.5.15", {"all2all_backend": "deepep"}, 2048),
        (DENSE, "0.5.23", {"all2all_backend": "mooncake"}, 0),
        (DENSE, "0.5.22", {"max_running_requests": 16}, 8 * 58 - 2 * (256 - 16)),
        (DENSE, "0.5.21", {"max_running_requests": 16}, 8 * 58),
        (LATENT, "0.5.23", {}, 1536),
        (LATENT, "0.5.9", {}, 0),
        (DENSE, "0.5.9", {"speculation": "EAGLE3"}, 2048),
        (DENSE, "0.5.12", {"speculation": "STANDALONE"}, 8 * 58 + 6144),
        (DENSE, "0.5.15", {"speculation": "STANDALONE"}, 8 * 58),
        (DENSE, "0.5.23", PAIR, np.array([8 * 58 - 512, 10240 - 13440])),  # of a step: the least
        (DENSE, "0.5.12", PAIR, np.full(2, 8 * 58)),
    ],
)
def test_the_share_of_memory_leaves_room_for_graphs_of_prompts_buffers_and_drafts(
    model: Model, version: str, values: dict[str, Any], mib: Any
) -> None:
    chip, space = {"architecture": "sm_90"}, {"prefill_decode": (*PAIR.values(),)}
    task = cards(model=model, memory=80 * GIB, engine_version=version, chip=chip, space=space)
    columns = instance_kinds(task, row(ENGINE, task, **values)).columns
    reserved = (1 - ENGINE.settings(task, columns).memory_fraction) * 80 * 1024
    assert reserved == pytest.approx(512 + 1.5 * 8192 + 512 + 128 + mib, abs=41)  # the share has three digits


@pytest.mark.parametrize(
    ("architecture", "values", "page"),
    [
        ("sm_103", {"attention_backend": "fa4"}, 128),
        ("sm_90", {"attention_backend": "fa4"}, 1),
        ("sm_103", {}, 64),
        ("sm_103", {"page_size": 1}, 64),
        ("sm_103", {"page_size": 32}, 32),
        ("sm_103", {"speculation": "NGRAM"}, 1),
        ("sm_120", {}, 1),
        ("sm_90", {"attention_backend": "trtllm_mha"}, 64),
    ],
)
def test_a_page_has_a_size_that_the_attention_backend_supports(
    architecture: str, values: dict[str, Any], page: int
) -> None:
    task = cards(chip={"architecture": architecture})
    assert settings(task, **values).block_size.item() == page
    assert values or merged(ENGINE, task, page_size=page) == merged(ENGINE, task)


@pytest.mark.parametrize(
    ("chip", "family", "page"),
    [
        ({"vendor": "mthreads"}, "", 64),
        ({"vendor": "ascend"}, "", 128),
        ({}, "minimax_m3", 128),
        ({"architecture": "gfx950"}, "minimax_m3", 1),
    ],
)
def test_a_page_has_another_default_on_some_chips_and_for_some_models(
    chip: dict[str, str], family: str, page: int
) -> None:
    task = cards(chip={"architecture": "sm_90", **chip}, model=replace(DENSE, family=family))
    assert (settings(task).block_size.item(), settings(task, page_size=1).block_size.item()) == (page, 1)


@pytest.mark.parametrize(
    ("vendor", "gib", "tensor", "expected"),
    [
        ("ascend", 64, 2, (8192, 64)),
        ("ascend", 64, 8, (8192, 256)),
        ("ascend", 32, 1, (4096, 16)),
        ("nvidia", 64, 2, (8192, 256)),
    ],
)
def test_ascends_prompts_and_graphs_have_defaults_of_their_own(
    vendor: str, gib: int, tensor: int, expected: tuple[int, int]
) -> None:
    task = cards(chip={"vendor": vendor}, memory=gib * GIB)
    assert tuple(each.item() for each in memory_defaults(task, np.array([tensor]))) == expected


def test_muse_spark_caches_fp8_by_default() -> None:
    task = cards(model=replace(DENSE, family="muse_spark_text"))
    found = [settings(task, **given).cache_element_bytes.item() for given in ({}, {"kv_cache_type": "bfloat16"})]
    assert found == [1.0, 2.0]


@pytest.mark.parametrize("page", [None, 1, 32])
def test_sparse_latent_attention_has_pages_of_64_tokens(page: int | None) -> None:
    values = {"page_size": page} if page else {}
    task = cards(model=SPARSE)
    assert settings(task, **values).block_size.item() == 64
    assert merged(ENGINE, task, **values) == merged(ENGINE, task)


def test_a_vision_tower_lowers_the_share_of_memory_unless_it_is_left_out() -> None:
    model = replace(DENSE, vision=replace(VISION, num_layers=32, hidden_size=1280))
    tasks = [cards(model=model, engine_args=args) for args in ({}, {"language-model-only": True})]
    share, text = (settings(each).memory_fraction.item() for each in tasks)
    assert share == pytest.approx(text * 0.95 * (1.1 - 0.1 * 1280**2 / 1024**2))  # towers of `depth` layers count as 24


def test_the_attention_backend_of_amd_lowers_the_share_and_has_a_workspace() -> None:
    given = {"memory": 288 * GIB, "weights": "Qwen/Qwen3-30B-A3B", "devices": 1}
    task = cards(engine_args={"max-running-requests": 2048}, **given)
    plain, aiter = (settings(task, attention_backend=name) for name in ("triton", "aiter"))
    assert aiter.memory_fraction.item() == pytest.approx(0.85 * plain.memory_fraction.item())
    assert plain.workspace_bytes.item() == 0.0
    heads, width = task.spec.model.num_attention_heads, task.spec.model.kv_channels or 0
    assert aiter.workspace_bytes.item() == 2048 * heads * 160 * (4 * width + 8)  # 40,960 tokens in parts of 256
    windows = cards(**{**given, "weights": "hf"}, model=public_model("openai/gpt-oss-20b"))
    assert settings(windows, attention_backend="aiter").workspace_bytes.item() == 0.0


def test_compressed_attention_on_amd_has_a_backend_of_its_own() -> None:
    found = []
    for architecture in ("gfx950", "sm_100"):
        chip = {"architecture": architecture}
        found.append(settings(cards(model=public_model("deepseek-ai/DeepSeek-V4-Flash"), chip=chip)))
    amd, other = found
    assert amd.workspace_bytes.item() == other.workspace_bytes.item() == 0.0
    assert amd.memory_fraction.item() == other.memory_fraction.item()


def test_a_pool_smaller_than_the_context_limits_requests_but_starts() -> None:
    job: dict[str, Any] = {
        "id": "a",
        "kind": "serve",
        "model": "Qwen/Qwen3-8B",
        "cluster": {"chip": "H100-SXM", "devices": 1, "devices_per_node": 1},
        "serve": {"engine": "sglang", "precision": "bf16", "input_len": 64, "output_len": 2, "num_prompts": 2},
        "candidate": {"context_len": 32768},
    }
    job["serve"] |= {"concurrency": 1, "engine_args": {"max-total-tokens": 8192}}
    (found,) = estimate_jobs([job])
    assert found["memory"]["fits"]
    assert found["memory"]["kv_cache_tokens"] == pytest.approx(8192)


def test_the_largest_decode_graph_is_that_of_the_flags() -> None:
    found = settings(cards(engine_args={"cuda-graph-bs-decode": [1, 8, 96]}))
    assert found.graph_tokens.item() == 96
    drafting = settings(cards(engine_args={"cuda-graph-bs-decode": [96]}), speculation="NGRAM", speculative_tokens=4)
    assert drafting.graph_tokens.item() == 96 * 5  # its sizes are numbers of sequences
    more = settings(planned("sglang", engine_args={"cuda-graph-max-bs-decode": 512}))
    assert found.memory_fraction.item() >= more.memory_fraction.item()  # SGLang reserves memory for graphs


def test_attention_ranks_capture_graphs_of_their_own_requests_only() -> None:
    """nvidia/GLM-5.2-NVFP4 runs on 8 B200 with a share of 0.92 (sgl-project/sglang pull request 29674)."""
    given = {"attn-dp-size": 8, "tp-size": 8}
    few, many = (settings(cards(engine_args={**given, "max-running-requests": each})) for each in (512, 4096))
    assert 0.0 < few.workspace_bytes.item() < many.workspace_bytes.item() / 4.0


def test_a_token_of_compressed_attention_holds_a_tenth_of_the_windows() -> None:
    """With 0.8 and drafts, a layer of DeepSeek-V4-Flash has 1,056.8 bytes a token (sgl-project/sglang #34499)."""
    model = public_model("deepseek-ai/DeepSeek-V4-Flash")
    found = [compressed_token_bytes(model, args, 584 / 512, 16) for args in ({"swa-full-tokens-ratio": 0.8}, {})]
    assert found[0] / 43 == pytest.approx(1056.8, abs=0.1)
    assert found[0] - found[1] == pytest.approx(0.7 * (43 * 584 + 21 * 10240 * 16 / 128))
    old, new = (
        settings(planned("sglang", model=model, engine_version=each, devices=8, weights=None))
        for each in ("0.5.15", "0.5.23")
    )
    assert old.token_bytes[0] < found[1]
    assert (old.window_share[0], old.window_kept[0]) == (0.1, 64)  # the answer has 64 tokens
    assert np.isnan(new.token_bytes[0])
    assert new.window_kept[0] == 0
    assert old.request_bytes[0] == new.request_bytes[0] == (256 + 2) * 20 * 128 * 8 * 512


def test_attention_ranks_divide_head_and_networks_unless_tokens_are_sent_or_a_flag_is_set() -> None:
    args = {"attn-dp-size": 4, "tp-size": 4}
    task = planned("sglang", model=public_model("zai-org/GLM-5.2"), devices=4, weights=None, engine_args=args)
    whole = planned(
        "sglang", model=task.spec.model, devices=4, weights=None, engine_args={**args, "enable-dp-lm-head": True}
    )
    found, sent, own = settings(task), settings(task, all2all_backend="deepep"), settings(whole)
    assert [each.head_ranks.item() for each in (found, sent, own)] == [4, 4, 1]
    assert [each.network_ranks.item() for each in (found, sent, own)] == [4, 1, 4]


def test_prompts_run_in_tritons_kernels_by_flag_and_by_default_for_gemma_4() -> None:
    """0.5.15 `arg_groups/overrides.py`: trtllm_mha on the compute capability 10, else triton."""
    gemma = public_model("google/gemma-4-E4B-it")
    rates = [
        settings(planned("sglang", model=model, chip={"architecture": chip}, weights=None), **given).masked_rate.item()
        for model, chip, given in (
            (gemma, "sm_90", {}),
            (gemma, "sm_100", {}),
            (gemma, "sm_100", {"attention_backend": "triton"}),
            (gemma, "sm_90", {"attention_backend": "fa3"}),
            (public_model("Qwen/Qwen3-8B"), "sm_90", {}),
        )
    ]
    assert np.isnan(rates).tolist() == [False, True, False, True, True]


def test_batches_overlap_with_most_exchanges_only() -> None:
    found = [broken(ENGINE, cards(), two_batch_overlap=True, all2all_backend=each) for each in ("deepep", "deepep_v2")]
    assert ["overlapped_exchange" in each for each in found] == [False, True]


@pytest.mark.parametrize(
    ("pair", "chip", "given", "assumed"),
    [
        (
            *("4xtp1dp4ep4+1xtp1dp48ep48", "GB200", {}),
            'all2all_backend = "deepep", chunked_prefill_size = 65536, enable_eplb = true, prefill_all2all',
        ),
        ("1xtp1dp32ep32+1xtp1dp32ep32", "H200", {}, "redundant_experts = 32, two_batch_overlap = true"),
        ("1xtp1dp32ep32+1xtp1dp32ep32", "H200", {"all2all_backend": "none"}, ""),
        ("4xtp1dp8ep8+4xtp1dp8ep8", "H200", {}, ""),
    ],
)
def test_records_of_experts_on_several_hosts_have_the_recipe_of_published_runs(
    pair: str, chip: str, given: dict[str, Any], assumed: str
) -> None:
    job = {
        "model": "deepseek-ai/DeepSeek-R1",
        "serve": {"engine": "sglang", "precision": "fp8", "input_len": 64, "output_len": 4, "concurrency": 8},
        "cluster": {"chip": chip, "devices": 64, "devices_per_node": 4 if chip == "GB200" else 8},
        "candidate": {"prefill_decode": pair, **given},
    }
    (answer,) = estimate_jobs([{"id": "a", "kind": "serve", **job}])
    assert answer["status"] == "ok"
    assert assumed in "".join(answer.get("warnings", ()))
    assert bool(answer.get("warnings")) == bool(assumed)
