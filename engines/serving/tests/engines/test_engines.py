"""What all serving engines share: command lines, legal values, defaults, log lines, and what servers report."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flagcore_serving.engine import DEEP
from flagcore_serving.job import Load
from flagcore_serving.launch import reports
from flagcore_serving.launch.server import Fetch

from engines.models.tests.examples import mixed
from engines.serving.tests.engines.tasks import (
    GIB,
    MLA,
    broken,
    engine_of,
    failure,
    merged,
    planned,
    row,
    server,
    settings,
)
from flagcore.contracts import probes_of
from flagcore.domain.launch import PORT
from flagcore.domain.trial import TrialState
from flagcore.errors import NoDevice, SpecError
from tests.checks import refuses
from tests.product import serving_inputs
from tests.product.tasks import DENSE, EXPERTS

TP, PP, DP, EP = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "data", "expert_model"))
FEW, MANY = (Load(input_len=16, output_len=1024, concurrency=clients) for clients in (4, 256))
DRAFT = {"speculation": "ngram", "speculative_tokens": 3}
SPREAD = Load(input_len=100, output_len=10, prefix_len=20, range_spread=0.5)  # at most 20 + 150 + 15 tokens
INVALID, FAILED, MEMORY = TrialState.INVALID, TrialState.FAILED, TrialState.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", f"/bin/echo serve hf --host 127.0.0.1 --port {PORT}"),
        ("sglang", f"/bin/echo --model-path hf --host 127.0.0.1 --port {PORT} --enable-metrics"),
        ("lmdeploy", f"/bin/echo serve api_server hf --server-name 127.0.0.1 --server-port {PORT} --log-level INFO"),
        ("llamacpp", f"/bin/echo --model hf --host 127.0.0.1 --port {PORT} --metrics --cache-ram 0"),
    ],
)
def test_unset_knobs_are_the_engines_defaults(engine: str, words: str) -> None:
    task = planned(engine)
    assert " ".join(server(task).argv).removesuffix(" --max-log-len 0") == words
    assert broken(engine_of(engine), task) == []
    assert broken(engine_of(engine), planned(engine, on_cores=True)) == (["no_cores"] if engine == "lmdeploy" else [])


@pytest.mark.parametrize(
    ("engine", "values", "words"),
    [
        (
            "vllm",
            {TP: 2, "block_size": 32, "max_num_seqs": 64, "gpu_memory_utilization": "0.9", "kv_cache_type": "fp8"}
            | {"enforce_eager": True, "enable_prefix_caching": False, "context_len": 4096},
            "--tensor-parallel-size 2 --block-size 32 --max-num-seqs 64 --max-model-len 4096 --gpu-memory-utilization "
            "0.9 --kv-cache-dtype fp8 --enforce-eager --no-enable-prefix-caching",
        ),
        ("vllm", {EP: 2, TP: 2}, "--tensor-parallel-size 2 --enable-expert-parallel"),
        (
            *("vllm", {"mm_encoder_tp_mode": "data", "limit_mm_per_prompt": 2, "mm_processor_cache_gb": 0}),
            "--mm-encoder-tp-mode data --limit-mm-per-prompt.image 2 --mm-processor-cache-gb 0",
        ),
        ("sglang", {"mm_encoder_tp_mode": "data"}, "--mm-enable-dp-encoder"),
        ("sglang", {"mm_encoder_tp_mode": "weights"}, ""),
        (
            "sglang",
            {TP: 2, "page_size": 64, "chunked_prefill_size": -1, "max_running_requests": 8}
            | {"mem_fraction_static": "0.8", "enable_prefix_caching": False, "enforce_eager": True}
            | {"schedule_policy": "lpm", "async_scheduling": False},
            "--tp-size 2 --page-size 64 --chunked-prefill-size -1 --max-running-requests 8 --mem-fraction-static 0.8 "
            "--disable-radix-cache --disable-cuda-graph --schedule-policy lpm --disable-overlap-schedule",
        ),
        ("sglang", {TP: 2, DP: 2}, "--tp-size 4 --attn-dp-size 2"),
        ("sglang", {"hicache_size": 8}, "--hicache-size 8 --enable-hierarchical-cache"),
        ("sglang", DRAFT | {"speculation": "NGRAM"}, "--speculative-algorithm NGRAM --speculative-num-draft-tokens 3"),
        (
            "sglang",
            DRAFT | {"speculation": "EAGLE"},
            "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4",
        ),
        (
            "lmdeploy",
            {"backend": "pytorch", TP: 2, "kv_cache_type": "int8", "max_batch_size": 64, "enforce_eager": True}
            | {"cache_max_entry_count": "0.9", "enable_prefix_caching": True},
            "--backend pytorch --tp 2 --max-batch-size 64 --cache-max-entry-count 0.9 --quant-policy int8 "
            "--enable-prefix-caching --eager-mode",
        ),
        # tp counts all devices with attention DP, or a group with experts
        ("lmdeploy", {TP: 2, DP: 2}, "--tp 4 --dp 2"),
        ("lmdeploy", {TP: 2, DP: 2, EP: 4}, "--tp 2 --dp 2 --ep 4"),
        ("llamacpp", {"parallel": 8}, "--parallel 8 --ctx-size 2048 --cache-ram 0"),
    ],
)
def test_knobs_reach_the_engine_in_its_spelling(engine: str, values: dict[str, Any], words: str) -> None:
    default = len(server(planned(engine)).argv) - (2 if engine == "llamacpp" else 0)
    assert " ".join(server(planned(engine), **values).argv[default:]) == words


@pytest.mark.parametrize(
    ("engine", "task", "rule", "values"),
    [
        ("vllm", {}, "cards", {TP: 4, "instances": 2}),
        ("vllm", {}, "attention_heads", {TP: 3}),
        ("vllm", {"model": mixed(DENSE, {"groups": 3}, 2)}, "query_groups", {TP: 2}),  # of any layer
        ("vllm", {}, "pipeline_layers", {PP: 8}),
        ("vllm", {}, "block_size", {"block_size": 8}),
        ("vllm", {}, "tokens_hold_sequences", {"max_num_batched_tokens": 8, "max_num_seqs": 16}),
        (
            *("vllm", {}, "whole_prompts"),
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 512, "context_len": 1024},
        ),
        ("vllm", {}, "eager_has_no_graphs", {"enforce_eager": True, "cudagraph_mode": "FULL"}),
        ("vllm", {}, "context_length", {"context_len": 191}),
        ("vllm", {"loads": (SPREAD,)}, "context_length", {"context_len": 184}),
        ("vllm", {"model": replace(EXPERTS, vocab_size=1023)}, "vocabulary", {TP: 3}),
        ("vllm", {}, "experts_exist", {EP: 2, TP: 2}),
        ("vllm", {"model": EXPERTS}, "expert_parallel", {EP: 2, TP: 1}),
        ("vllm", {"model": EXPERTS}, "even_experts", {EP: 4, TP: 4, "enable_eplb": True, "redundant_experts": 33}),
        ("vllm", {}, "speculation_needs_tokens", {"speculation": "ngram"}),
        ("vllm", {}, "speculation_needs_a_draft", DRAFT | {"speculation": "eagle"}),
        ("vllm", {}, "no_prediction_layers", DRAFT | {"speculation": "mtp"}),
        ("vllm", {}, "asynchronous_drafts", DRAFT | {"async_scheduling": "on"}),
        ("vllm", {}, "load_balancing", {"enable_eplb": True}),
        ("vllm", {"engine_args": {"attention_backend": "FLASHMLA"}}, "block_size", {"block_size": 32}),
        ("vllm", {"on_cores": True}, "block_size", {"block_size": 16}),
        ("vllm", {"on_cores": True, "model": MLA}, "block_size", {"block_size": 32}),
        ("vllm", {"on_cores": True}, "pipeline_on_cores", {PP: 2}),
        ("vllm", {"on_cores": True}, "data_on_cores", {DP: 2}),
        ("vllm", {"on_cores": True}, "threads_on_cores", {"threads": 2, "instances": 2}),
        ("sglang", {}, "cards", {TP: 2, DP: 4}),
        ("sglang", {}, "chunk_of_pages", {"page_size": 64, "chunked_prefill_size": 96}),
        ("sglang", {}, "whole_prompts", {"chunked_prefill_size": -1, "max_prefill_tokens": 128}),
        ("sglang", {}, "experts_exist", {EP: 2}),
        ("sglang", {}, "mixed_chunks_in_stages", {"enable_mixed_chunk": True, PP: 2}),
        ("sglang", {"model": EXPERTS}, "expert_parallel", {TP: 2, DP: 2, EP: 3}),
        ("sglang", {"model": EXPERTS}, "expert_parallel", {EP: 4, TP: 4, "redundant_experts": 33}),
        ("sglang", {"model": EXPERTS}, "spanning_experts", {TP: 2, DP: 2, EP: 2, "all2all_backend": "deepep"}),
        ("sglang", {"engine_args": {"attention_backend": "trtllm_mla"}}, "page_size", {"page_size": 16}),
        ("sglang", {}, "speculation_needs_a_draft", DRAFT | {"speculation": "EAGLE"}),
        ("sglang", {"engine_version": "0.5.2"}, "value_release", {"speculation": "NGRAM"}),
        ("lmdeploy", {}, "tensor_power_of_two", {TP: 3}),
        ("lmdeploy", {"model": EXPERTS}, "pytorch_parallel", {"backend": "pytorch", DP: 2}),
        ("lmdeploy", {"model": EXPERTS}, "expert_parallel", {TP: 2, EP: 4}),
        ("lmdeploy", {}, "cache_share", {"cache_max_entry_count": "1"}),
        ("lmdeploy", {}, "cache_type", {"kv_cache_type": "fp8"}),
        ("lmdeploy", {}, "cache_type", {"backend": "turbomind", "kv_cache_type": "turbo_quant"}),
        ("lmdeploy", {}, "block_size", {"block_size": 48}),
        ("lmdeploy", {}, "block_size", {"backend": "pytorch", "block_size": 96}),
        ("lmdeploy", {}, "turbomind_only", {"backend": "pytorch", "num_tokens_per_iter": 512}),
        ("lmdeploy", {}, "pytorch_only", {"enforce_eager": True}),
        ("llamacpp", {"on_cores": True}, "threads_on_cores", {"threads": 2, "instances": 2}),
        ("llamacpp", {"on_cores": True}, "cores_are_not_split", {TP: 2}),
        ("llamacpp", {}, "most_slots", {"parallel": 257}),
        ("llamacpp", {}, "batch_holds_slots", {"parallel": 64, "batch_size": 32}),
        ("llamacpp", {}, "ubatch_in_batch", {"ubatch_size": 1024, "batch_size": 512}),
        ("llamacpp", {}, "quantized_cache", {"kv_cache_type": "q8_0", "flash_attention": "off"}),
        ("llamacpp", {}, "context_grain", {"context_len": 1000}),
        ("llamacpp", {}, "speculation_needs_a_draft", {"speculation": "draft-simple"}),
        ("llamacpp", {}, "no_prediction_layers", {"speculation": "draft-mtp"}),
        (
            "llamacpp",
            {"engine_args": {"ctx_size": 1024}, "loads": (Load(input_len=256),)},
            "slot_context",
            {"parallel": 8},
        ),
        ("llamacpp", {}, "split_mode", {"split_mode": "row"}),
        ("llamacpp", {"model": replace(EXPERTS, family="deepseek_v3")}, "split_tensors", {TP: 2}),
        ("llamacpp", {}, "tensor_mode_cache", {TP: 2, "kv_cache_type": "q8_0"}),
        ("llamacpp", {}, "split_mode", {"split_mode": "layer", TP: 2}),
        ("llamacpp", {}, "split_mode", {"split_mode": "none", PP: 2}),
        ("llamacpp", {}, "one_split", {TP: 2, PP: 2}),
    ],
)
def test_values_that_an_engine_refuses_are_illegal(
    engine: str, task: dict[str, Any], rule: str, values: dict[str, Any]
) -> None:
    assert rule in broken(engine_of(engine), planned(engine, **task), **values)


@pytest.mark.parametrize(
    ("engine", "task", "values"),
    [
        ("vllm", {"model": EXPERTS}, {EP: 4, TP: 2, DP: 2}),
        ("vllm", {"model": EXPERTS}, {EP: 4, TP: 4, "enable_eplb": True, "redundant_experts": 4}),
        ("sglang", {"model": EXPERTS}, {TP: 2, DP: 2, EP: 4, "all2all_backend": "deepep", "redundant_experts": 4}),
        ("vllm", {"engine_args": {"attention_backend": "FLASHMLA"}}, {"block_size": 64}),
        ("vllm", {"engine_args": {"speculative-config.model": "/draft"}}, DRAFT | {"speculation": "eagle"}),
        ("vllm", {"on_cores": True, "model": MLA}, {"block_size": 16}),
        ("vllm", {"loads": (SPREAD,)}, {"context_len": 185}),
        ("sglang", {"model": EXPERTS}, {TP: 2, DP: 2, EP: 2}),
        ("sglang", {"engine_version": "0.5.3"}, {"speculation": "NGRAM"}),
        ("sglang", {"engine_version": ""}, {"speculation": "NGRAM"}),
        # EAGLE drafts with the model's own layers if it has them
        ("sglang", {"model": replace(DENSE, mtp_num_layers=1)}, DRAFT | {"speculation": "EAGLE"}),
        ("sglang", {"engine_args": {"speculative-draft-model-path": "draft"}}, DRAFT | {"speculation": "EAGLE3"}),
        (
            "lmdeploy",
            {"model": EXPERTS},
            {"backend": "pytorch", "kv_cache_type": "fp8", "block_size": 32, "enforce_eager": True},
        ),
        ("lmdeploy", {"model": EXPERTS}, {"block_size": 96, DP: 2, EP: 2}),
        ("llamacpp", {"engine_args": {"ctx_size": 1024}}, {"parallel": 4}),
        ("llamacpp", {"engine_args": {"ctx_size": 1024}}, {"parallel": 8, "kv_unified": "on"}),
        ("llamacpp", {}, {"split_mode": "row", TP: 2}),
        ("llamacpp", {}, {"split_mode": "layer", PP: 2}),
        ("llamacpp", {}, {"split_mode": "none"}),
    ],
)
def test_values_that_an_engine_accepts_are_legal(engine: str, task: dict[str, Any], values: dict[str, Any]) -> None:
    assert broken(engine_of(engine), planned(engine, **task), **values) == []


@pytest.mark.parametrize(
    ("engine", "on_cores", "values", "like"),
    [
        ("vllm", True, {TP: 2, "max_num_batched_tokens": 2048}, None),
        ("vllm", False, {"block_size": 128}, None),
        ("sglang", False, {"enforce_eager": True}, None),
        ("llamacpp", True, {"ubatch_size": 256}, None),
        ("vllm", True, {"block_size": 128, "max_num_batched_tokens": 2048, "kv_cache_type": "auto"}, {}),
        ("sglang", False, {"page_size": 1, "kv_cache_type": "auto", "schedule_policy": "fcfs"}, {}),
        ("sglang", True, {"enforce_eager": True}, {}),
        ("lmdeploy", False, {"backend": "turbomind", "block_size": 64, "max_prefill_token_num": 8192}, {}),
        ("lmdeploy", False, {"kv_cache_type": "none"}, {}),
        ("llamacpp", True, {"batch_size": 2048, "ubatch_size": 512, "kv_cache_type": "f16"}, {}),
        ("llamacpp", True, {"flash_attention": "auto", "n_gpu_layers": 99, "split_mode": "none"}, {}),
        ("llamacpp", True, {"speculation": "none"}, {}),
        ("llamacpp", True, {"batch_size": 256, "ubatch_size": 256}, {"batch_size": 256}),
        ("llamacpp", True, {"threads": 1, "threads_batch": 1}, {"threads": 1}),
        ("llamacpp", False, {"split_mode": "tensor", TP: 2}, {TP: 2}),
        ("llamacpp", False, {"split_mode": "layer", PP: 2}, {PP: 2}),
    ],
)
def test_only_default_values_are_merged_with_not_set(engine: str, on_cores: bool, values: Any, like: Any) -> None:
    task = planned(engine, on_cores=on_cores)
    found = merged(engine_of(engine), task, **values)
    assert all(found[knob] for knob in values) if like is None else found == merged(engine_of(engine), task, **like)


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("vllm", ("port", "model", "host", "api_key", "disable-log-stats")),
        ("sglang", ("model_path", "port")),
        ("lmdeploy", ("server_port", "api-keys", "log-level")),
        ("llamacpp", ("port", "-m", "no_slots")),
    ],
)
def test_flags_that_flagcore_sets_are_refused_with_a_reason(engine: str, flags: tuple[str, ...]) -> None:
    for flag in flags:
        with pytest.raises(SpecError) as error:
            engine_of(engine).axes(planned(engine, engine_args={flag: 1}))
        key = "model" if flag == "-m" else flag.replace("_", "-")
        assert (error.value.key, error.value.fix) == (f"serve.engine_args.{key}", "remove it")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "lmdeploy"])
def test_the_table_of_flags_is_consistent(engine: str) -> None:
    program = engine_of(engine).program
    removed = {flag: successor for flags in program.removed.values() for flag, successor in flags.items()}
    assert not removed.keys() & program.flags
    for name in (*program.short_flags.values(), *filter(None, removed.values())):
        assert program.knows_flag(name), name
        assert name not in removed


@pytest.mark.parametrize(
    ("engine", "arguments", "fixed"),
    [
        ("vllm", {"async-scheduling": True}, {"async_scheduling": "on"}),
        ("vllm", {"no-async-scheduling": True}, {"async_scheduling": "off"}),
        # values that a build of the engine registers are passed on
        ("vllm", {"attention-backend": "VENDOR_ATTN", "quantization": "vendor_int8"}, {}),
        ("vllm", {"O": 3}, {"optimization_level": "3"}),
        ("sglang", {"tp": 4, "dp": 2}, {TP: 4, "instances": 2}),
        ("sglang", {"tp_size": 4, "attn_dp_size": 2}, {TP: 2, DP: 2}),
        ("sglang", {"tp": 4, "dp_size": 2, "enable_dp_attention": True}, {TP: 2, DP: 2}),
        ("sglang", {"tp": 4, "dp": 1, "enable-dp-attention": True}, {TP: 4}),
        (
            *("sglang", {"speculative-algorithm": "ngram", "speculative-num-draft-tokens": 8}),
            {"speculation": "NGRAM", "speculative_tokens": 8},
        ),
        (
            *("sglang", {"speculative-num-steps": 2, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 3}),
            {"speculative_tokens": 2},
        ),
        ("sglang", {"mem-fraction": 0.75}, {"mem_fraction_static": "0.75"}),
        (
            *("llamacpp", {"np": 2, "flash-attn": True, "max_model_len": 512, "no_cache_prompt": True}),
            {"parallel": 2, "flash_attention": "on", "context_len": 512, "enable_prefix_caching": False},
        ),
    ],
)
def test_flags_of_engine_args_set_knobs_of_all_candidates(engine: str, arguments: Any, fixed: Any) -> None:
    task = planned(engine, engine_args=arguments, default_space=True)
    parsed = engine_of(engine).program.split(task.spec)
    assert (parsed.fixed, parsed.others) == (fixed, {} if fixed else arguments)
    values = {axis.knob: axis.values for axis in engine_of(engine).axes(task)}
    assert {knob: values[knob] for knob in fixed} == {knob: (value,) for knob, value in fixed.items()}
    assert {knob: value for knob, value in engine_of(engine).defaults(task).items() if knob in fixed} == fixed


def test_candidates_do_not_keep_the_layout_of_a_baseline() -> None:
    assert engine_of("llamacpp").program.kept({"split_mode": "tensor", "n_gpu_layers": 9}, ()) == {"n_gpu_layers": 9}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_what_a_server_lacks_is_reported_before_a_launch(engine: str, tmp_path: Path) -> None:
    program, kind = engine_of(engine).program, "file" if engine == "llamacpp" else "config"
    for weights in (None, str(tmp_path)):
        with refuses("serve.weights", weights, match=rf"is missing|is not a (file|directory with a {kind}\.json)"):
            program.ready(planned(engine, weights=weights).spec)
    (tmp_path / "config.json").write_text("{}")
    place = tmp_path / "config.json" if engine == "llamacpp" else tmp_path
    with pytest.raises(NoDevice, match="no-such-server"):
        program.ready(planned(engine, weights=str(place), command=("no-such-server",)).spec)


@pytest.mark.parametrize(
    ("engine", "given", "read"),
    [
        ("vllm", {"gpu_memory_utilization": 0.9}, {"gpu_memory_utilization": "0.9"}),
        ("sglang", {"speculation": "mtp", "chunked_prefill_size": "off"}, {"speculation": "NEXTN"}),
        (
            "lmdeploy",
            {"max_num_seqs": 8, "max_num_batched_tokens": 4096, "page_size": 64, "quant_policy": 8},
            {"max_batch_size": 8, "max_prefill_token_num": 4096, "block_size": 64, "kv_cache_type": "int8"},
        ),
        (
            "llamacpp",
            {"flash_attention": False, "instance": 2, "n_gpu_layers": "auto", "max_num_seqs": 4},
            {"flash_attention": "off", "instances": 2, "n_gpu_layers": -1, "parallel": 4},
        ),
    ],
)
def test_names_and_values_of_other_engines_are_accepted(engine: str, given: Any, read: Any) -> None:
    expected = read | ({"chunked_prefill_size": -1} if engine == "sglang" else {})
    assert engine_of(engine).parse(given) == expected
    assert engine_of(engine).parse(expected) == expected


@pytest.mark.parametrize(
    ("engine", "values"),
    [
        ("vllm", {"gpu_memory_utilization": 1.5}),
        ("sglang", {"chunked_prefill_size": -2}),
        ("sglang", {"page_size": -1}),
        ("llamacpp", {"kv_cache_type": "q9"}),
    ],
)
def test_invalid_values_are_reported_with_their_key(engine: str, values: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as refused:
        engine_of(engine).parse(values)
    assert {refused.value.key: refused.value.value} == values


@pytest.mark.parametrize(
    ("engine", "line", "state"),
    [
        ("vllm", "(EngineCore pid=1) ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])", INVALID),
        ("vllm", "ValueError: max_num_batched_tokens (8) must be greater than or equal to max_num_seqs (16).", INVALID),
        ("vllm", "User-specified max_model_len (99999) is greater than the derived max_model_len (8192)", INVALID),
        ("vllm", "vllm: error: unrecognized arguments: --no-such-flag 3", INVALID),
        ("vllm", "Weight input_size_per_partition = 176 is not divisible by min_thread_k = 128. Consider", INVALID),
        ("vllm", "ValueError: Failed to find a kernel that can implement the WNA16 linear layer. Reasons:", INVALID),
        ("vllm", "AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers.", INVALID),
        ("vllm", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", MEMORY),
        ("vllm", "Available memory on node 0 (14.5/16.84 GiB) is less than requested memory for kv", MEMORY),
        ("vllm", "ValueError: Free memory on device cuda:0 is less than desired GPU memory utilization", FAILED),
        ("vllm", "RuntimeError: operator torchvision::nms does not exist", FAILED),
        ("vllm", "importlib.metadata.PackageNotFoundError: No package metadata was found for vllm", FAILED),
        ("vllm", "(EngineCore pid=3) KeyError: 'rope'", FAILED),
        ("sglang", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", MEMORY),
        ("sglang", "torch.OutOfMemoryError: CUDA out of memory.", MEMORY),
        ("sglang", "AssertionError: chunked_prefill_size must be divisible by page_size", INVALID),
        ("sglang", "launch_server.py: error: unrecognized arguments: --nope", INVALID),
        ("sglang", "KeyError: 'qk'", FAILED),
        ("lmdeploy", "RuntimeError: No enough gpu memory for kv cache.", MEMORY),
        ("lmdeploy", "AssertionError: no valid parallel config: dp=1, tp=3, ep=2", INVALID),
        ("lmdeploy", "lmdeploy: error: unrecognized arguments: --x", INVALID),
        ("lmdeploy", "ValueError: something else", FAILED),
        ("llamacpp", "E ggml_aligned_malloc: insufficient memory (attempted to allocate 585939.00 MB)", MEMORY),
        ("llamacpp", "ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory", MEMORY),
        ("llamacpp", "E llama_init_from_model: quantized V cache requires flash_attn to be enabled", INVALID),
        ("llamacpp", "llama-server: error: unrecognized arguments: --nope 3", INVALID),
        ("llamacpp", "E srv init: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080", FAILED),
    ],
)
def test_the_line_that_gives_the_reason_is_found_before_the_last_one(engine: str, line: str, state: TrialState) -> None:
    last = {
        "vllm": "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.",
        "sglang": "Received sigquit from a child process",
    }
    found, reason = failure(engine_of(engine), f"INFO start\n{line}\n{last.get(engine, '')}\n")
    assert found is state
    assert line[:40] in reason or line.split(": ", 1)[-1][:40] in reason


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("RuntimeError: operator torchvision::nms does not exist", "pip uninstall -y torchvision"),
        ("importlib.metadata.PackageNotFoundError: No package metadata was found for vllm", "dist-info"),
        ("ValueError: Free memory on device cuda:0 is less than desired GPU memory utilization", "another process"),
    ],
)
def test_a_failure_that_is_not_the_candidates_has_its_fix(line: str, fix: str) -> None:
    assert fix in failure(engine_of("vllm"), line)[1]


@pytest.mark.parametrize(
    ("engine", "task", "values", "expected"),
    [
        # memory decides on batch sizes; no fp8 rate is known of this chip: the older generation
        ("vllm", {"memory": 80 * GIB}, {}, {"max_batched_tokens": 2048, "max_running": 256}),
        ("vllm", {"memory": 200 * GIB}, {}, {"max_batched_tokens": 16384, "max_running": 1024}),
        (
            *("vllm", {"memory": 200 * GIB, "engine_version": "0.19.0"}, {}),
            {"max_batched_tokens": 2048, "max_running": 256},
        ),
        ("vllm", {"on_cores": True}, {TP: 2}, {"max_batched_tokens": 4096, "max_running": 256, "block_size": 128}),
        ("vllm", {"engine_version": "0.21.0"}, {}, {"memory_fraction": 0.92}),
        ("vllm", {"engine_version": "nightly-5b8c30d62b754b57"}, {}, {"memory_fraction": 0.92}),
        ("vllm", {}, {"cudagraph_mode": "NONE"}, {"graph_tokens": 0}),
        ("vllm", {}, {"optimization_level": "0"}, {"graph_tokens": 0}),
        ("vllm", {}, {"optimization_level": "1"}, {"graph_tokens": 512, "whole": 0.0}),
        ("vllm", {}, {"optimization_level": "0", "cudagraph_mode": "FULL"}, {"graph_tokens": 512, "whole": 1.0}),
        ("vllm", {}, {"gpu_memory_utilization": "0.8"}, {"memory_fraction": 0.8}),
        ("vllm", {"engine_args": {"gpu-memory-utilization": 0.85}}, {}, {"memory_fraction": 0.85}),
        ("sglang", {"memory": 16 * GIB}, {TP: 1}, {"max_batched_tokens": 2048, "memory_fraction": 0.772}),
        ("sglang", {"memory": 80 * GIB}, {TP: 1}, {"max_batched_tokens": 8192, "memory_fraction": 0.836}),
        ("sglang", {"memory": 80 * GIB}, {TP: 4}, {"max_batched_tokens": 8192, "memory_fraction": 0.825}),
        ("sglang", {}, {"max_prefill_tokens": 2500}, {"max_batched_tokens": 2432}),  # 19 prompts of 128 tokens
        ("sglang", {}, {"mem_fraction_static": "0.7"}, {"memory_fraction": 0.7}),
        ("sglang", {"engine_args": {"mem_fraction_static": 0.6}}, {}, {"memory_fraction": 0.6}),
        (
            *("sglang", {}, {TP: 1, DP: 4, "chunked_prefill_size": 8192, "max_running_requests": 64}),
            {"max_batched_tokens": 2048, "max_running": 16},
        ),
        ("sglang", {}, {"chunked_prefill_size": -1}, {"chunked": 0, "max_batched_tokens": 16384}),
        ("lmdeploy", {}, {"backend": "turbomind"}, {"graph_tokens": 0}),
        (
            "lmdeploy",
            {},
            {"backend": "pytorch", "kv_cache_type": "int4"},
            {"graph_tokens": 512, "cache_element_bytes": 0.5},
        ),
        (
            *("llamacpp", {"on_cores": True}, {"parallel": 8, "batch_size": 256}),
            {"max_running": 8, "max_batched_tokens": 256, "pass_tokens": 256, "context_len": 256, "devices": 2},
        ),
        ("llamacpp", {"on_cores": True}, {"threads": 1}, {"devices": 1}),
    ],
)
def test_settings_are_those_of_the_engine(
    engine: str, task: dict[str, Any], values: dict[str, Any], expected: dict[str, float]
) -> None:
    found = settings(planned(engine, **task), **values)
    assert {name: getattr(found, name).item() for name in expected} == pytest.approx(expected, abs=0.002)


PROPS = '{"total_slots": 4, "default_generation_settings": {"n_ctx": 512}}'
VLLM_METRICS = (
    'vllm:cache_config_info{block_size="64",enable_prefix_caching="False",engine="0",gpu_memory_utilization="0.92",'
    'num_gpu_blocks="16384"} 1.0\nvllm:num_preemptions_total{engine="0",model_name="m"} 3.0\n'
)
VLLM_LOG = """
(APIServer pid=7) INFO [api_utils.py:286] non-default args: {'model': 'hf', 'max_num_seqs': 16, 'max_model_len': 2048}
(APIServer pid=7) INFO 11-20 19:18:15 [scheduler.py:307] Chunked prefill is enabled with max_num_batched_tokens=512.
(EngineCore pid=9) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: max_seq_len=2048, \
tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, enforce_eager=True, kv_cache_dtype=auto, \
enable_prefix_caching=False, enable_chunked_prefill=True, pooler_config=None
"""
VLLM_KNOBS_LOG = (
    "Asynchronous scheduling is disabled.\n(EngineCore pid=9) INFO [core.py:133] Initializing a V1 LLM engine "
    "(v0.28.0) with config: model='m', speculative_config=SpeculativeConfig(method='ngram', model=None, "
    "num_spec_tokens=3), tokenizer='m', quantization=fp8, quantization_config=None, compilation_config="
    "{'mode': <CompilationMode.VLLM_COMPILE: 3>}\nUsing FLASH_ATTN attention backend out of potential backends: []"
)
VLLM_IMAGES = """non-default args: {'limit_mm_per_prompt': {'image': 2}, 'mm_processor_cache_gb': 0.0, \
'mm_encoder_tp_mode': 'data'}"""
SGLANG_INFO: dict[str, Any] = {"tp_size": 4, "pp_size": 1, "ep_size": 2, "attn_dp_size": 2, "page_size": 64}
SGLANG_INFO |= {"chunked_prefill_size": 4096, "max_prefill_tokens": 16384, "max_running_requests": None}
SGLANG_INFO |= {"mem_fraction_static": 0.85, "kv_cache_dtype": "auto", "schedule_policy": "lpm"}
SGLANG_INFO |= {"disable_radix_cache": True, "disable_cuda_graph": False}
SGLANG_TREE = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 5, "speculative_num_draft_tokens": 8}
SGLANG_LOG = (
    "[2026-11-20] max_total_num_tokens=65536, chunked_prefill_size=4096, max_running_requests=2048, context_len=8192\n"
)
TURBOMIND_LOG = """turbomind engine config:

dtype=bfloat16, state_dtype=bfloat16, session_len=4096, max_batch_size=64, devices=[0, 1], tp=2, dp=1, cp=1, ep=1
[TM][INFO] Object cache budget: 2048.00 MB from free 2560.00 MB and ratio 0.800
"""
PYTORCH_LOG = (
    "Building CacheEngine with config: \nCacheConfig(max_batches=32, block_size=64, num_cpu_blocks=0, "
    "num_gpu_blocks=100, cache_max_entry_count=0.9, max_prefill_token_num=8192, enable_prefix_caching=True)."
)
LLAMA_LOG = """
0.00.002.125 I cmn  common_param: system_info: n_threads = 2 (n_threads_batch = 1) / 2 | CPU : SSE3 = 1 |
0.00.051.259 I llama_context: n_batch               = 2048
0.00.051.272 I llama_context: n_ubatch              = 256
0.00.051.299 I llama_context: flash_attn            = enabled
0.00.055.055 I llama_kv_cache: size =    6.38 MiB (   512 cells), K (q8_0):    3.19 MiB, V (q8_0):    3.19 MiB
0.00.073.107 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 512, kv_unified = 'false'
0.00.091.259 I llama_context: n_batch               = 64
"""


@pytest.mark.parametrize(
    ("engine", "response", "log", "values"),
    [
        (
            *("vllm", VLLM_METRICS, VLLM_LOG),
            {TP: 2, PP: 1, DP: 1, "context_len": 2048, "enforce_eager": True, "enable_prefix_caching": False}
            | {"enable_chunked_prefill": True, "kv_cache_type": "auto", "max_num_batched_tokens": 512}
            | {"max_num_seqs": 16, "block_size": 64, "gpu_memory_utilization": "0.92"},
        ),
        (
            *("vllm", "", VLLM_KNOBS_LOG),
            {"async_scheduling": "off", "speculation": "ngram", "speculative_tokens": 3, "quantization": "fp8"}
            | {"compilation_mode": "3", "attention_backend": "FLASH_ATTN"},
        ),
        (
            *("sglang", json.dumps(SGLANG_INFO), SGLANG_LOG),
            {TP: 2, DP: 2, PP: 1, EP: 2, "page_size": 64, "chunked_prefill_size": 8192, "max_prefill_tokens": 16384}
            | {"max_running_requests": 4096, "context_len": 8192, "mem_fraction_static": "0.85"}
            | {"kv_cache_type": "auto", "schedule_policy": "lpm", "enable_prefix_caching": False}
            | {"enforce_eager": False},
        ),
        ("vllm", "", VLLM_IMAGES, {"limit_mm_per_prompt": 2, "mm_processor_cache_gb": 0, "mm_encoder_tp_mode": "data"}),
        ("sglang", json.dumps(SGLANG_TREE), "", {"speculation": "EAGLE3", "speculative_tokens": 5}),
        ("sglang", '{"mm_enable_dp_encoder": true}', "", {"mm_encoder_tp_mode": "data"}),
        (
            *("lmdeploy", "", TURBOMIND_LOG),
            {"backend": "turbomind", "context_len": 4096, "max_batch_size": 64, TP: 2, DP: 1, EP: 1},
        ),
        (
            *("lmdeploy", "", PYTORCH_LOG),
            {"backend": "pytorch", "max_batch_size": 32, "block_size": 64, "cache_max_entry_count": "0.9"}
            | {"max_prefill_token_num": 8192, "enable_prefix_caching": True},
        ),
        (
            *("llamacpp", PROPS, LLAMA_LOG),
            {"parallel": 4, "context_len": 512, "batch_size": 2048, "ubatch_size": 256, "flash_attention": "on"}
            | {"kv_cache_type": "q8_0", "threads": 2, "threads_batch": 1, "kv_unified": "off"},
        ),
        ("llamacpp", PROPS, "nothing", {"parallel": 4, "context_len": 512}),
        *(
            ("llamacpp", PROPS, f"load_tensors: offloaded {layers}/37 layers to GPU", {"parallel": 4, **read})
            for layers, read in ((18, {"context_len": 512, "n_gpu_layers": 18}), (37, {"context_len": 512}))
        ),
    ],
)
def test_values_of_the_server_and_its_log_are_read_back(engine: str, response: str, log: str, values: Any) -> None:
    assert engine_of(engine).reports.effective(lambda path: response, log) == values


@pytest.mark.parametrize(
    ("engine", "text", "figures"),
    [
        ("vllm", VLLM_METRICS, {"preemptions": 3.0}),
        (
            "lmdeploy",
            'lmdeploy:num_requests_running{model_name="m"} 3.0\nlmdeploy:generation_tokens_total{e="0"} 9.0\n',
            {"requests_running": 3.0, "output_tokens": 9.0},
        ),
    ],
)
def test_counters_have_the_same_names_for_all_engines(engine: str, text: str, figures: dict[str, float]) -> None:
    assert engine_of(engine).reports.read_counters(lambda path: text) == figures


LLAMA_MEMORY = """\
load_tensors:   CPU_Mapped model buffer size =    51.00 MiB
load_tensors:        CUDA0 model buffer size =  2048.00 MiB
load_tensors:        CUDA1 model buffer size =  1024.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =   512.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =   256.00 MiB
llama_kv_cache: size =  512.00 MiB (  1024 cells,   6 layers,  4/4 seqs), K (f16):  256.00 MiB, V (f16):  256.00 MiB
sched_reserve:       CUDA0 compute buffer size =   102.40 MiB
"""
VLLM_MEMORY = """\
(EngineCore_DP0 pid=2) INFO 10-06 12:00:31 [gpu_model_runner.py:3480] Model loading took 15.27 GiB and 3.9 seconds
(EngineCore_DP0 pid=2) INFO 10-06 12:00:31 [gpu_worker.py:721] Available KV cache memory: 55.23 GiB
(EngineCore_DP0 pid=2) INFO 10-06 12:00:31 [kv_cache_utils.py:1087] GPU KV cache size: 402,176 tokens
(EngineCore_DP0 pid=2) INFO 10-06 12:00:40 [gpu_model_runner.py:3480] Graph capturing finished in 8 secs, took 0.31 GiB
"""
SGLANG_MEMORY = """\
[2025-11-04 05:27:13 TP0] Load weight end. type=LlamaForCausalLM, avail mem=75.11 GB, mem usage=15.02 GB.
[2025-11-04 05:27:13 TP0] KV Cache is allocated. #tokens: 524288, K size: 17.16 GB, V size: 17.16 GB
[2025-11-04 05:27:32 TP0] Capture cuda graph end. Time elapsed: 8.04 s. mem usage=0.80 GB. avail mem=10.30 GB.
[2025-11-04 05:27:32 TP0] max_total_num_tokens=524288, chunked_prefill_size=8192, max_running_requests=2048
"""


@pytest.mark.parametrize(
    ("engine", "log", "reported"),
    [
        ("llamacpp", LLAMA_MEMORY, {"weights_gib": 2.0, "kv_cache_gib": 0.75, "compute_gib": 0.1}),
        ("vllm", VLLM_MEMORY, {"weights_gib": 15.27, "kv_cache_gib": 55.23, "graphs_gib": 0.31}),
        ("sglang", SGLANG_MEMORY, {"weights_gib": 15.02, "kv_cache_gib": 34.32, "graphs_gib": 0.8}),
        ("lmdeploy", TURBOMIND_LOG, {"kv_cache_gib": 2.0}),
        ("lmdeploy", PYTORCH_LOG, {}),
    ],
)
def test_memory_lines_of_engine_logs_are_read(engine: str, log: str, reported: dict[str, float]) -> None:
    tokens = {LLAMA_MEMORY: 4096.0, VLLM_MEMORY: 402176.0, SGLANG_MEMORY: 524288.0, PYTORCH_LOG: 6400.0}
    expected = reported | ({"kv_cache_tokens": tokens[log]} if log in tokens else {})
    assert engine_of(engine).reports.memory(log) == pytest.approx(expected)
    assert engine_of(engine).reports.memory("") == {}


TEXT = """# TYPE a:total counter
a:total{engine="0",name="x \\"y\\""} 3.0
a:total{engine="1"} 4
a:bad NaN
a:info{size="16",on="True"} 1.0
not a line
"""


def test_figures_of_all_labels_are_read_except_invalid_numbers() -> None:
    of_labels = {'a:total{engine="0"}': [3.0], 'a:total{engine="1"}': [4.0]}
    found = reports.samples(TEXT)
    assert found["a:total"] == [3.0, 4.0]
    assert found["a:info"] == [1.0]
    assert of_labels.items() <= found.items()
    assert reports.labels(TEXT, "a:info") == {"size": "16", "on": "True"}
    assert reports.labels(TEXT, "a:none") == {}


def test_counters_are_summed_and_shares_averaged_and_a_server_may_have_none() -> None:
    def fetch(path: str) -> str:
        raise OSError("HTTP 404")

    def read(fetch: Fetch, **names: str) -> dict[str, float]:
        return reports.ServerReports(counters={"a:total": names["total"], "b": "none"}).read_counters(fetch)

    assert read(fetch, total="all") == {}
    assert read(lambda path: TEXT, total="all") == {"all": 7.0}
    assert read(lambda path: TEXT, total="cache_usage") == {"cache_usage": 3.5}


@pytest.mark.parametrize("name", ["llamacpp", "lmdeploy", "sglang", "vllm"])
def test_empty_columns_are_the_engines_defaults(name: str) -> None:
    engine = engine_of(name)
    task = planned(name)
    columns = engine.columns(task, {})
    assert {axis.knob: axis.decode(int(columns[axis.knob][0])) for axis in engine.axes(task)} == dict(
        engine.defaults(task)
    )
    assert all(size.shape == (1,) for size in engine.sizes(task, engine.columns(task, {})).values())
    with pytest.raises(SpecError) as refused:
        engine.columns(task, {"kv_cache_type": "no such type"})
    assert "kv_cache_type" in refused.value.key
    with refuses("serve.engine", name):
        probes_of(engine)


@pytest.mark.parametrize(
    ("name", "load", "values", "count"),
    [
        ("vllm", FEW, {TP: 2}, 0),
        ("vllm", FEW, {PP: 2}, DEEP),
        ("llamacpp", FEW, {PP: 2}, 0),
        ("vllm", MANY, {"max_num_seqs": 8}, 1),
    ],
)
def test_plans_avoid_pipelines_without_need_and_long_queues(
    name: str, load: Load, values: dict[str, Any], count: int
) -> None:
    task, engine = planned(name, loads=(load,)), engine_of(name)
    columns = row(engine, task, **values)
    assert engine.plans.unusual(task, columns, engine.predict(task, columns, serving_inputs.costs())) == [count]
