"""SGLang (`sglang.launch_server`), releases from 0.5: its knobs, and flags that express them only together.

Sources: sglang 0.5.23 `srt/arg_groups/` (fields, parallel_hook, rules), 0.5.6 `srt/server_args.py`. The releases that
have a flag follow from `srt/server_args.py` of 0.5.0 to 0.5.15 and `srt/arg_groups/` of 0.5.16 to 0.5.23.
"""

from collections.abc import Mapping

from flagcore_importers.programs import strip_dashes
from flagcore_serving.job import EngineArg
from flagcore_serving.space import knobs
from flagcore_serving.space.hardware import DP, EP, INSTANCES
from flagcore_serving.space.knobs import DRAFTED, EXCHANGE
from flagcore_serving.space.program import Program

from flagcore.domain.spec import Spec, Task
from flagcore.errors import SpecError

PAGE, CHUNK, PREFILL = "page_size", "chunked_prefill_size", "max_prefill_tokens"
RUNNING, MEMORY, POLICY = "max_running_requests", "mem_fraction_static", "schedule_policy"
MIXED, TRTLLM = "enable_mixed_chunk", "trtllm_mha"
HICACHE, STORAGE = "hicache_size", "hicache_storage_backend"
NGRAM, NEED_DRAFT_MODEL = "NGRAM", ("EAGLE", "EAGLE3", "STANDALONE")

TP_FLAGS = ("tp-size", "tensor-parallel-size", "tp")
EP_FLAGS = ("ep-size", "expert-parallel-size", "ep")
DP_FLAGS = ("dp-size", "dp_size", "data-parallel-size", "dp")
"""Flags for the number of servers behind one port or, with `enable-dp-attention`, of attention groups in one server."""
STEPS, BREADTH, VERIFIED = "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"
DRAFT_FLAG = "speculative-draft-model-path"
SPANNING = ("deepep", "deepep_v2", "mooncake", "nixl", "mori", "ascend_fuseep", "flashinfer", "megamoe", "pplx")
"""Values of EXCHANGE with which SGLang sets ep-size to tp-size (0.5.23: `arg_groups/overrides.py`)."""


HICACHE_RATIO = 2.0
"""SGLang's default size of the host's cache relative to that of the device (0.5.23 `arg_groups/hicache_hook.py`)."""
POLICIES = ("write_back", "write_through", "write_through_selective")
"""Values of hicache-write-policy (0.5.23 `arg_groups/fields/memory.py`)."""


def _check_tiers(args: Mapping[str, EngineArg]) -> None:
    """Raise SpecError for a wrong setting of HiCache."""
    ratio, policy = args.get("hicache-ratio", HICACHE_RATIO), args.get("hicache-write-policy", POLICIES[0])
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or ratio <= 0:
        problem, fix = "is not a size relative to the cache of the devices", "write a number above 0"
        raise SpecError(key="serve.engine_args.hicache-ratio", value=ratio, problem=problem, fix=fix)
    if policy not in POLICIES:
        problem, fix = "is not a policy of HiCache", f"use {', '.join(POLICIES)}"
        raise SpecError(key="serve.engine_args.hicache-write-policy", value=policy, problem=problem, fix=fix)


class SglangProgram(Program):
    """SGLang's server. Some knobs correspond to several flags together."""

    def known_args(self, args: Mapping[str, EngineArg]) -> dict[str, EngineArg]:
        """Return `args` with knobs in place of flags that express the knob only in combination.

        SGLang's tp-size is the product of TP and attention DP, and with some libraries for the exchange between experts
        also EP. A chain of drafts has one draft in each step.
        """
        result = dict(args)
        _check_tiers({strip_dashes(name): value for name, value in args.items()})

        def take(*names: str) -> EngineArg:
            keys = [key for key in result if key.lstrip("-") in names or strip_dashes(key) in names[:1]]
            return next((result.pop(key) for key in keys), None)

        if isinstance(servers := take(*DP_FLAGS), int):
            divides_attention = take("enable-dp-attention")
            if servers > 1:
                result["attn-dp-size" if divides_attention else INSTANCES] = servers
        elif servers is not None:
            result[DP_FLAGS[0]] = servers
        result |= _sizes(result)
        if draft := take("speculative-draft-model"):
            result[DRAFT_FLAG] = draft
        return result | _chain(result)

    def schemes_of(self, spec: Spec) -> Mapping[str, str]:
        """See `Program`. If the model has layers for multi-token prediction, EAGLE uses them without a draft model."""
        draft = self.split(spec).others.get(DRAFT_FLAG, spec.serve.weights)
        uses_layers = spec.model.mtp_num_layers > 0 and draft == spec.serve.weights
        return {**self.schemes, "EAGLE": "mtp"} if uses_layers else self.schemes


def _sizes(args: Mapping[str, EngineArg]) -> dict[str, EngineArg]:
    """Return TP in place of tp-size, and the EP size that a library for the exchange between experts implies."""
    names, found = {strip_dashes(key): key for key in args}, dict[str, EngineArg]()

    def key(*flags: str) -> str:
        return next((names[name] for name in flags if name in names), "")

    tensor_key = key(*TP_FLAGS)
    tensor, data = args.get(tensor_key), args.get(key("attn-dp-size", strip_dashes(DP)))
    exchange = args.get(key("moe-a2a-backend", strip_dashes(EXCHANGE)))
    if isinstance(tensor, int) and exchange in SPANNING:
        found[key(*EP_FLAGS, strip_dashes(EP)) or EP] = tensor
    if isinstance(tensor, int) and isinstance(data, int) and data > 1 and tensor % data == 0:
        found[tensor_key] = tensor // data
    return found


def _chain(args: dict[str, EngineArg]) -> dict[str, EngineArg]:
    """Remove the flags of a draft chain from `args`, and return the number of drafted tokens as a knob.

    The flags of a draft tree remain in `args`, and the result is empty.
    """
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


CHUNKS, WIDE_CHUNKS = (2048, 4096, 8192, 16384), (131072, 524288)


def _chunks(task: Task) -> tuple[int, ...]:
    """Return the values of `auto` for the prefill chunk in tokens. SGLang divides a chunk among attention DP groups."""
    return (*CHUNKS, *WIDE_CHUNKS) if knobs.has_wide_experts(task) else CHUNKS


PROGRAM = SglangProgram.read(
    "flagcore_sglang",
    {
        "cache_types": knobs.if_fp8("auto", "fp8_e4m3"),
        "chunks": knobs.Auto(_chunks, f"{', '.join(map(str, CHUNKS))}; larger with experts on several hosts"),
    },
)
KNOBS = PROGRAM.knobs
