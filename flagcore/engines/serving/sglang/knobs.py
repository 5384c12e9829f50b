"""The knobs of SGLang's server, its command line, and SGLang's defaults.

Sources: sglang 0.5.23 `srt/arg_groups/` (fields, memory_hook, parallel_hook), 0.5.6 `srt/server_args.py`. The releases
that have a flag follow from `srt/server_args.py` of 0.4.0 to 0.5.15 and `srt/arg_groups/` of 0.5.16 to 0.5.23.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from flagcore.domain.knob import Flag
from flagcore.domain.serving import EngineArg
from flagcore.domain.space import Columns, FloatArray, IntArray
from flagcore.domain.spec import Task
from flagcore.engines.serving.space import knobs
from flagcore.engines.serving.space.hardware import DP, INSTANCES, PP, TP, Hardware, longest_request, max_in_flight
from flagcore.engines.serving.space.installed import strip_dashes
from flagcore.engines.serving.space.knobs import by_hardware, code, fixed_values, knob, or_default, variant
from flagcore.engines.serving.space.program import Program
from flagcore.engines.serving.space.settings import Settings
from flagcore.engines.serving.space.weights import cache_bytes_per_token

PAGE, CHUNK, PREFILL = "page_size", "chunked_prefill_size", "max_prefill_tokens"
RUNNING, CONTEXT, MEMORY, KV = "max_running_requests", "context_len", "mem_fraction_static", "kv_cache_type"
PREFIX, EAGER, POLICY, MIXED = "enable_prefix_caching", "enforce_eager", "schedule_policy", "enable_mixed_chunk"
ASYNC, BACKEND, SPECULATION, DRAFTED = knobs.ASYNC, knobs.BACKEND, knobs.SPECULATION, knobs.DRAFTED
MOE, BALANCING, REDUNDANT, QUANTIZATION = knobs.MOE, knobs.BALANCING, "redundant_experts", knobs.QUANTIZATION
HICACHE, COMPILE = "hicache_size", "enable_torch_compile"
NGRAM, NEED_DRAFT_MODEL = "NGRAM", ("EAGLE", "EAGLE3", "STANDALONE")
BACKENDS = (
    *("flashinfer", "fa3", "fa4", "triton", "torch_native", "flex_attention", "flashmla", "cutlass_mla", "trtllm_mla"),
    *("cutedsl_mla", "tokenspeed_mla", "trtllm_mha", "dual_chunk_flash_attn", "nsa", "dsa", "aiter", "wave"),
    *("intel_amx", "intel_xpu", "ascend", "hpc_ops", "compressed", "dsv4", "qsa", "minicpm_flashinfer"),
    *("minicpm_flashattn", "llada2_cfg_flashinfer"),
)
MOE_BACKENDS = (
    *("auto", "deep_gemm", "triton", "triton_kernel", "cutlass", "aiter", "marlin", "humming"),
    *("flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_mxfp4", "flashinfer_cutedsl", "flashinfer_megamoe"),
    *("flashinfer_trtllm_routed", "megamoe", "hpc_ops", "intel_xpu", "lora_triton", "lora_marlin", "lora_cutedsl"),
    *("experimental_sgl_trtllm", "experimental_sgl_marlin"),
)
QUANTIZATIONS = (
    *("fp8", "w8a8_fp8", "modelopt_fp8", "mxfp8", "w8a8_int8", "awq", "awq_marlin", "gptq", "gptq_marlin", "marlin"),
    *("bitsandbytes", "gguf", "modelopt", "modelopt_fp4", "petit_nvfp4", "mxfp4", "moe_wna16", "qoq", "w4afp8"),
    *("modelslim", "quark", "quark_int4fp8_moe", "auto-round", "compressed-tensors", "unquant"),
    *("auto-round-int8", "humming", "modelopt_mixed", "mxfp_w4a8", "nvfp4_online", "quark_mxfp4", "mlx_q4", "mlx_q8"),
)
KV_BYTES = {
    "auto": 2.0,
    "bf16": 2.0,
    "bfloat16": 2.0,
    "fp8_e5m2": 1.0,
    "fp8_e4m3": 1.0,
    "mxfp8": 33 / 32,
    "nvfp4": 9 / 16,
    "fp4_mx_block16": 9 / 16,
    "fp4_e2m1": 9 / 16,
}
"""Bytes of a cached element."""
PREFILL_TOKENS, MIN_RUNNING = 16384, 2048
"""SGLang's default of max_prefill_tokens, and its minimum default of max_running_requests."""
DRAFTED_TOKENS, NGRAM_TOKENS = 3, 12
"""SGLang's defaults of drafted tokens, except 5 for Llama (0.5.23 `speculative_hook.py`)."""
_MIN_POOL = 4096
_MEMORY_STEPS = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (90, 8192, 256, 512),
    (160, 8192, 256, 512),
)
"""By the GiB of a device: chunked_prefill_size, and the largest decode graph for TP < 4 and TP >= 4
(`memory_hook.py`)."""
_LARGEST_MEMORY_STEP = (16384, 512, 512)

KNOBS = (
    knobs.INSTANCES_KNOB,
    variant(
        knobs.TP_KNOB,
        "tp-size",
        "tensor-parallel-size",
        "tp",
        help="Devices that split each layer's matrices; SGLang's default tp-size also counts attention groups.",
    ),
    replace(knobs.ROLES_KNOB, versions=">=0.4.6"),
    variant(knobs.TRANSFER_KNOB, words=("mooncake", "nixl"), versions=">=0.4.6"),
    variant(knobs.PP_KNOB, "pp-size", "pipeline-parallel-size", "pp", versions=">=0.4.6.post2"),
    variant(
        knobs.DP_KNOB,
        "attn-dp-size",
        help="Attention data parallelism: groups inside one instance that each hold the attention of some sequences; "
        "`--dp-size` with `--enable-dp-attention` in releases without attn-dp-size.",
    ),
    variant(knobs.EP_KNOB, "ep-size", "expert-parallel-size", "ep", versions=">=0.4.1"),
    knob(
        PAGE,
        "Tokens of one page of the cache.",
        aliases=("block_size",),
        auto=fixed_values(1, 32, 64),
        versions=">=0.4.4",
    ),
    knob(
        CHUNK,
        "Maximum number of prompt tokens in one iteration; -1 (`off`): whole prompts.",
        aliases=("max_num_batched_tokens",),
        minimum=-1,
        spellings={"off": -1},
        auto=by_hardware(fixed_values(512, 2048), fixed_values(2048, 4096, 8192, 16384)),
        memory_order=1,
    ),
    knob(PREFILL, "Maximum number of tokens of the prompts that start in one iteration.", memory_order=1),
    knob(
        RUNNING,
        "Maximum number of sequences in one iteration, over all attention groups.",
        aliases=("max_num_seqs",),
        auto=knobs.POWERS_IN_FLIGHT,
        memory_order=1,
    ),
    variant(knobs.CONTEXT_KNOB, "context-length"),
    knob(
        MEMORY,
        "Share of a device's memory for weights and cache only.",
        flags=("mem-fraction-static", "mem-fraction"),
        label="memory share",
        kind="share",
        auto=by_hardware(knobs.NOT_SET, fixed_values(None, "0.85", "0.9")),
    ),
    variant(knobs.KV_KNOB, "kv-cache-dtype", words=tuple(KV_BYTES), auto=knobs.if_fp8("auto", "fp8_e4m3")),
    variant(knobs.PREFIX_KNOB, off="disable-radix-cache"),
    variant(knobs.EAGER_KNOB, "disable-cuda-graph"),
    knob(
        POLICY,
        "Order of waiting requests: first come first served, longest cached prefix first, and others.",
        label="policy",
        kind="word",
        words=(
            "fcfs",
            "lpm",
            "random",
            "dfs-weight",
            "lof",
            "priority",
            "routing-key",
            "hrrn",
            "shortest-prefill-first",
        ),
        auto=fixed_values("fcfs", "lpm"),
    ),
    knob(
        MIXED,
        "Chunks of prompts and answers share iterations.",
        label="mixed chunks",
        kind="flag",
        neutral=False,
        auto=fixed_values(False, True),
    ),
    knob(
        ASYNC,
        "Whether the next iteration is scheduled while the device computes.",
        label="async",
        kind="flag",
        neutral=True,
        flags=("",),
        off="disable-overlap-schedule",
    ),
    variant(knobs.BACKEND_KNOB, "attention-backend", words=BACKENDS),
    variant(
        knobs.MOE_KNOB, "moe-runner-backend", words=MOE_BACKENDS, aliases=("moe_runner_backend",), versions=">=0.5"
    ),
    variant(knobs.BALANCING_KNOB, "enable-eplb", versions=">=0.4.6.post5"),
    knob(
        REDUNDANT,
        "Copies of experts, in addition to the experts of the model.",
        label="redundant experts",
        flags=("ep-num-redundant-experts",),
        versions=">=0.4.6.post5",
    ),
    variant(
        knobs.SPECULATION_KNOB,
        "speculative-algorithm",
        words=(NGRAM, "NEXTN", *NEED_DRAFT_MODEL),
        spellings={"ngram": NGRAM, "mtp": "NEXTN", "eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE"},
        versions=">=0.4.2",
    ),
    variant(knobs.DRAFTED_KNOB, versions=">=0.4.2"),
    knob(HICACHE, "GiB of host memory for evicted cache of each rank.", label="offload", versions=">=0.4.6"),
    knob(COMPILE, "Whether torch.compile is used.", label="compile", kind="flag", neutral=False),
    variant(knobs.QUANTIZATION_KNOB, "quantization", words=QUANTIZATIONS),
    variant(knobs.TOWER_KNOB, Flag(name="mm-enable-dp-encoder", word="data"), versions=">=0.5.6"),
)
"""`tensor_model_parallel_size` is the split of one attention group: SGLang's default tp-size is its product with
`data_parallel_size`."""
BY_NAME = {knob.name: knob for knob in KNOBS}
TP_FLAGS = ("tp-size", "tensor-parallel-size", "tp")


DP_FLAGS = ("dp-size", "dp_size", "data-parallel-size", "dp")
"""SGLang's servers behind one port; with `enable-dp-attention` the attention groups of one server."""
STEPS, BREADTH, VERIFIED = "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"
DRAFT_FLAG = "speculative-draft-model-path"


class SglangProgram(Program):
    """SGLang's server. Several of its flags together set one knob."""

    def known_args(self, args: Mapping[str, EngineArg]) -> dict[str, EngineArg]:
        """Return arguments with knobs in place of the flags that only together have a knob's meaning.

        SGLang's tp-size is the product of TP and attention DP. A chain of drafts has one draft in each step.
        """
        found = dict(args)

        def take(*names: str) -> EngineArg:
            keys = [key for key in found if key.lstrip("-") in names or strip_dashes(key) in names[:1]]
            return next((found.pop(key) for key in keys), None)

        if isinstance(servers := take(*DP_FLAGS), int):
            divides_attention = take("enable-dp-attention")
            if servers > 1:
                found["attn-dp-size" if divides_attention else INSTANCES] = servers
        elif servers is not None:
            found[DP_FLAGS[0]] = servers
        names = {strip_dashes(key): key for key in found}
        tensor_key = next((names[name] for name in TP_FLAGS if name in names), "")
        tensor = found.get(tensor_key)
        if take("enable-ep-moe") and isinstance(tensor, int):
            found["ep-size"] = tensor
        data = found.get(names.get("attn-dp-size") or names.get(strip_dashes(DP)) or "")
        if isinstance(tensor, int) and isinstance(data, int) and data > 1 and tensor % data == 0:
            found[tensor_key] = tensor // data
        if draft := take("speculative-draft-model"):
            found[DRAFT_FLAG] = draft
        return found | _chain(found)


def _chain(args: dict[str, EngineArg]) -> dict[str, EngineArg]:
    """Remove the flags of a chain of drafts, and return its number of drafted tokens; nothing for a tree of drafts."""
    names = {strip_dashes(key): key for key in args}
    method, steps, breadth, verified = (
        args.get(names.get(name, "")) for name in ("speculative-algorithm", STEPS, BREADTH, VERIFIED)
    )
    is_ngram = str(method).upper() == NGRAM
    drafted = verified if is_ngram else steps
    if not isinstance(drafted, int) or not (is_ngram or breadth == 1):
        return {}
    for name in (VERIFIED,) if is_ngram else (STEPS, BREADTH, VERIFIED):
        args.pop(names.get(name, ""), None)
    return {DRAFTED: drafted}


PROGRAM = SglangProgram.read("flagcore.engines.serving.sglang", KNOBS)


def memory_defaults(task: Task, tensor: IntArray) -> tuple[IntArray, IntArray]:
    """Return SGLang's default chunked_prefill_size and largest decode graph for its tp-size, by the device's memory."""
    gib = Hardware.of(task).memory_bytes / 2**30
    if math.isnan(gib):
        return np.full_like(tensor, 4096), np.full_like(tensor, 160)
    chunk, small, large = next((step[1:] for step in _MEMORY_STEPS if gib < step[0]), _LARGEST_MEMORY_STEP)
    return np.full_like(tensor, chunk), np.where(tensor < 4, small, large)


def chunk_sizes(task: Task, columns: Columns) -> IntArray:
    """Return the tokens of one chunk of prompts, by default SGLang's value; -1 without chunks."""
    default = memory_defaults(task, columns[TP] * columns[DP])[0]
    return np.where(columns[CHUNK] != 0, columns[CHUNK], default)


def memory_share(task: Task, columns: Columns) -> FloatArray:
    """Return SGLang's default share of memory for weights and cache, which excludes its reserve; NaN if unknown."""
    tensor = columns[TP] * columns[DP]
    mib = Hardware.of(task).memory_bytes / 2**20
    graph = np.where(columns[EAGER] == 1, 0, memory_defaults(task, tensor)[1])
    chunk = chunk_sizes(task, columns)
    prefill = or_default(columns[PREFILL], PREFILL_TOKENS)
    reserved_mib = 512 + 1.5 * np.maximum(np.where(chunk > 0, chunk, prefill), 2048) + 2.0 * graph
    reserved_mib = (
        reserved_mib + tensor * columns[PP] / 8 * 1024 + np.where(columns[DP] > 1, 3.0 * graph * columns[DP], 0.0)
    )
    if mib > 60 * 1024:
        reserved_mib = np.maximum(reserved_mib, 10 * 1024)
    return np.round((mib - reserved_mib) / mib, 3)


def pool_tokens(task: Task, instances: IntArray | int) -> FloatArray:
    """Return the tokens of the cache of one instance on CPU cores, where SGLang would use most of the memory."""
    loads = task.spec.serve.loads
    tokens: FloatArray = np.ceil(2 * max_in_flight(loads) / np.maximum(instances, 1)) * longest_request(
        loads, task.spec.model.vision
    )
    return np.maximum(tokens, _MIN_POOL)


def settings(task: Task, columns: Columns) -> Settings:
    """Return SGLang's effective settings for candidates; attention DP groups share chunks and requests."""
    values, other_args = PROGRAM.columns(task, columns), PROGRAM.parse(task.spec).others
    hardware = Hardware.of(task)
    chunk = chunk_sizes(task, values)
    tokens = np.where(chunk > 0, np.maximum(chunk // values[DP], 1), or_default(values[PREFILL], PREFILL_TOKENS))
    ranks = values[TP] * values[PP] * values[DP]
    devices = hardware.share(values[INSTANCES]) if hardware.on_cores else ranks
    element = np.array([2.0, *KV_BYTES.values()])[values[KV]]
    share = knobs.shares(values[MEMORY], memory_share(task, values))
    return Settings.of(
        task,
        values,
        devices=devices,
        max_running=np.where(values[RUNNING] > 0, np.maximum(values[RUNNING] // values[DP], 1), MIN_RUNNING),
        max_batched_tokens=tokens,
        block_size=or_default(values[PAGE], 1),
        chunked=(chunk > 0).astype(np.int64),
        graphs=((values[EAGER] == 0) & (not hardware.on_cores)).astype(np.int64),
        memory_fraction=np.full(ranks.shape, np.nan) if hardware.on_cores else share,
        cache_bytes=_cache_bytes(task, other_args, values, devices, element),
        cache_element_bytes=element,
        drafted=_drafted(other_args, values),
        quantized=knobs.is_fp8(BY_NAME[QUANTIZATION], values),
        tower_shares=knobs.tower_shares(BY_NAME[knobs.TOWER], values),
    )


def _drafted(other_args: Mapping[str, EngineArg], columns: Columns) -> IntArray:
    """Return the drafted tokens in succession; by default the steps of a tree of drafts, or SGLang's number."""
    steps = other_args.get(STEPS)
    default = np.where(columns[SPECULATION] == code(BY_NAME[SPECULATION], NGRAM), NGRAM_TOKENS, DRAFTED_TOKENS)
    if isinstance(steps, int):
        default = np.full_like(default, steps)
    return np.where(columns[SPECULATION] > 0, or_default(columns[DRAFTED], default), 0)


def _cache_bytes(
    task: Task, other_args: Mapping[str, EngineArg], get: Columns, devices: IntArray, element: FloatArray
) -> FloatArray:
    """Return the bytes of cache of one device if its tokens are fixed, NaN if the memory determines them."""
    fixed = other_args.get("max-total-tokens")
    if not isinstance(fixed, int) and not Hardware.of(task).on_cores:
        return np.full(devices.shape, np.nan)
    pools = float(fixed) if isinstance(fixed, int) else pool_tokens(task, get[INSTANCES])
    return pools * cache_bytes_per_token(task.spec.model, 1.0) * element / devices
