"""TensorRT-LLM (`trtllm-serve`) with the PyTorch backend; no server was run.

Sources: NVIDIA/TensorRT-LLM `tensorrt_llm/commands/serve.py` @00209af1, tensorrt_llm 1.2 `llmapi/llm_args.py`,
`docs/source/commands/trtllm-serve/trtllm-serve.rst` @0434755f, and nvidia.github.io/TensorRT-LLM (`llm-api/reference`
and `features/kvcache` of 1.4).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from flagcore_importers.programs import strip_dashes
from flagcore_models.keys import has_fp8_cache
from flagcore_serving.job import EngineArg
from flagcore_serving.launch.server import Instance, address
from flagcore_serving.space import knobs, rules
from flagcore_serving.space.hardware import DP, PP, TP, count
from flagcore_serving.space.knobs import DRAFTED, EAGER, KV, PREFIX, SPECULATION, as_words, or_default
from flagcore_serving.space.program import Program
from flagcore_serving.space.settings import Settings

from flagcore.domain.launch import PORT
from flagcore.domain.space import Columns, KnobValue, Rule
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore.i18n import N_
from flagcore_servers.untested import OneVendor, expert_parallel, pairs, prefill_tokens, whole_prompts

BATCH, TOKENS, BLOCK = "max_batch_size", "max_num_tokens", "tokens_per_block"
MEMORY, CHUNKED, GRAPHS = "free_gpu_memory_fraction", "enable_chunked_prefill", "cuda_graph_max_batch_size"
OFFLOAD, DISK = "host_cache_gib", "disk_cache_gib"
IN_BYTES = {f"kv-cache-config.{tier}_cache_size": f"{tier}_cache_gib" for tier in ("host", "disk")}
"""Fields in bytes, and the knobs for them."""
ATTENTION_DP, REUSE, NO_GRAPHS = "enable-attention-dp", "kv-cache-config.enable_block_reuse", "cuda-graph-config"
NEED_DRAFT_MODEL = ("Eagle3", "DraftTarget", "PARD")
CLI = (
    *("backend", "chat_template", "custom_module_dirs", "custom_tokenizer", "enable_chunked_prefill", "gpus_per_node"),
    *("fail_fast_on_attention_window_too_large", "host", "log_level", "max_batch_size", "max_beam_width", "port"),
    *("max_num_tokens", "max_seq_len", "media_io_kwargs", "num_postprocess_workers", "otlp_traces_endpoint", "pp_size"),
    *("ep_size", "kv_cache_free_gpu_memory_fraction", "reasoning_parser", "revision", "server_role", "tokenizer"),
    *("tool_parser", "tp_size", "trust_remote_code"),
)
"""The options of `trtllm-serve`. All other fields of `LlmArgs` are set by `--set PATH=VALUE` (since 1.4)."""


class TrtllmProgram(Program):
    """`trtllm-serve`."""

    def known_args(self, args: Mapping[str, EngineArg]) -> dict[str, EngineArg]:
        """See `Program`. With attention DP, the ranks of tensor parallelism are those of data parallelism. The sizes of
        captured batches count as their largest, and null in place of a configuration of graphs as eager mode. Raises
        SpecError for a wrong size of a tier."""
        result = dict[str, EngineArg]()
        for name, value in args.items():
            key = self.full_name(strip_dashes(name))
            is_off = str(value).lower() in ("false", "null", "none")
            if key == REUSE:
                result[PREFIX] = not is_off
            elif key == NO_GRAPHS and is_off:
                result[EAGER] = True
            elif key in IN_BYTES:
                result[IN_BYTES[key]] = _gib(name, value)
            elif key == f"{NO_GRAPHS}.batch_sizes":
                result[GRAPHS] = max(map(int, re.findall(r"\d+", str(value))), default=0)
            elif value is not None and value != "null":
                result[key] = value
        if str(result.pop(ATTENTION_DP, False)).lower() == "true":
            for name in [name for name in result if (knob := self.knob_of(strip_dashes(name))[0]) and knob.name == TP]:
                result[DP] = result.pop(name)
        return result


def _gib(name: str, value: EngineArg) -> int:
    if isinstance(value, int) and value >= 0:
        return -(-value // 2**30)
    problem, fix = "is not a size", "write bytes as a whole number of at least 0"
    raise SpecError(key=f"serve.engine_args.{name}", value=value, problem=problem, fix=fix)


PROGRAM = TrtllmProgram.read(__package__, {"cache_types": knobs.if_fp8("auto", "fp8")})


def _spelled(words: tuple[str, ...]) -> Iterator[str]:
    for flag, value in pairs(words):
        head, dot, tail = flag.partition(".")
        name = head.replace("-", "_") + dot + tail
        if "=" in name:
            yield from ("--set", name)
        elif name.endswith("_cache_gib"):
            yield from ("--set", f"{name.removesuffix('gib')}size={int(value or 0) * 2**30}")
        elif name in CLI:
            yield from (f"--{name}", *([] if value is None else [value]))
        else:
            yield from ("--set", f"{name}={'true' if value is None else value}")


class TensorRtLlm(OneVendor):
    """TensorRT-LLM."""

    name = "trtllm"
    where = "flagcore_servers.trtllm:REPORTS"
    program = PROGRAM
    modules: Mapping[str, str] = {"tensorrt_llm": "tensorrt_llm>=1.4"}
    vendor = "nvidia"

    def settings(self, task: Task, columns: Columns) -> Settings:
        """Return TensorRT-LLM's effective settings. Limits on a batch, and tiers of the cache, are those of each rank.
        The cache takes a share of the memory that all else leaves free (`pyexecutor/_util.py`: `_cal_max_memory`);
        evicted blocks move to the tiers behind it.
        """
        values = PROGRAM.columns(task, columns)
        ranks = values[TP] * values[PP] * values[DP]
        stated = has_fp8_cache(task.spec.model, ("modelopt",))  # NVIDIA/TensorRT-LLM issue 8843
        is_default = values[KV] <= PROGRAM.code(KV, "auto")
        drafted = np.where(values[SPECULATION] > 0, or_default(values[DRAFTED], 1), 0)
        return Settings.of(
            task,
            values,
            PROGRAM,
            max_running=PROGRAM.values(values, BATCH),
            max_batched_tokens=prefill_tokens(task, values[TOKENS], int(PROGRAM.defaults[TOKENS] or 0)),
            block_size=PROGRAM.values(values, BLOCK),
            chunked=values[CHUNKED],
            graph_tokens=np.where(values[EAGER] == 0, PROGRAM.values(values, GRAPHS) * (1 + drafted), 0),
            cache_element_bytes=np.where(is_default & stated, 1.0, PROGRAM.element_bytes(values)),
            rest_share=knobs.shares(values[MEMORY], 0.9),
            drafted=drafted,
            host_cache=values[OFFLOAD] * ranks * 2.0**30,
            disk_cache=values[DISK] * ranks * 2.0**30,
            writes_through=ranks < 1,
        )

    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
        spec, data = task.spec, count(values, DP)
        argv = [*PROGRAM.start_command(spec), spec.serve.weights or "", "--host", address(task), "--port", PORT]
        argv += knobs.arguments(PROGRAM.knobs, {**values, TP: count(values, TP) * data})
        argv += ["--enable_attention_dp", "true"] if data > 1 else []
        needed = int(prefill_tokens(task, np.zeros(1, dtype=np.int64), 0)[0])
        if values.get(TOKENS) is None and needed > 8192 and not values.get(CHUNKED):
            argv += ["--max_num_tokens", str(needed)]
        argv += as_words(PROGRAM.parse(spec).others, has_negation=False)
        return Instance(argv=tuple(argv), environment={} if spec.serve.elsewhere else {"HF_HUB_OFFLINE": "1"})

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return TensorRT-LLM's legality rules for candidates."""
        return (
            *rules.split_rules(task, attention_and_experts=True),
            *rules.forbidden(task, PROGRAM),
            rules.rule(
                "attention_dp",
                (TP, DP),
                N_("{TP} must be 1 with {DP} > 1: enable_attention_dp makes each rank a group"),
                lambda c: (c[DP] > 1) & (c[TP] > 1),
            ),
            expert_parallel(task),
            whole_prompts(task, TOKENS, CHUNKED),
            *rules.speculation_rules(task, PROGRAM, NEED_DRAFT_MODEL, "speculative-config.speculative_model", "MTP"),
            *rules.context_rules(task),
        )

    def form(self, instance: Instance) -> Instance:
        """Return a server with `--set PATH=VALUE` in place of flags that `trtllm-serve` does not have."""
        start = next(number for number, word in enumerate(instance.argv) if word.startswith("--"))
        return replace(instance, argv=(*instance.argv[:start], *_spelled(instance.argv[start:])))


ENGINE = TensorRtLlm()
