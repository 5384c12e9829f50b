"""llama.cpp: the user's own llama-server, or the server of the xllamacpp wheel with the same flags.

Flags and defaults: llama.cpp `tools/server/README.md` (00dc8057). Sources of the rules: the same, and runs of the
server of xllamacpp 2026.10.11549.
"""

import math
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec

import numpy as np
from flagcore_importers import programs
from flagcore_importers.programs import strip_dashes
from flagcore_models.gguf import context_length
from flagcore_models.layers import latent_layers, layers_of, mixer_counts
from flagcore_models.mixers.attention import Attention
from flagcore_models.mixers.gated_delta_net import GatedDeltaNet
from flagcore_models.networks.experts import Experts
from flagcore_models.public import GGUF_BITS, find_public
from flagcore_serving.engine import ServingEngine
from flagcore_serving.job import EngineArg
from flagcore_serving.launch.server import Instance, address
from flagcore_serving.space import knobs
from flagcore_serving.space.hardware import INSTANCES, PP, TP, Hardware, count, longest_request
from flagcore_serving.space.knobs import CONTEXT, DRAFTED, KV, SPECULATION, Auto, or_default
from flagcore_serving.space.program import Program
from flagcore_serving.space.rules import (
    check_images,
    context_rules,
    forbidden,
    ignoring,
    rule,
    same_as_unset,
    speculation_rules,
    split_rules,
)
from flagcore_serving.space.settings import GRAPH_TOKENS, Settings
from flagcore_serving.space.weights import context_at, unusable_weights

from flagcore.domain.launch import PORT
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.errors import FlagError, NoDevice
from flagcore.i18n import N_, _
from flagcore_llamacpp.server import AUTO_SLOTS, FLAGS_BY_NAME

PARALLEL, THREADS, BATCH_THREADS = "parallel", "threads", "threads_batch"
N_BATCH, N_UBATCH = "batch_size", "ubatch_size"
NO_TENSOR_MODE = re.compile(
    "deepseek|kimi|glm_moe_dsa|nemotron_h|granitemoehybrid|lfm2_moe|minimax_m2|mistral4|grok|olmo2|olmoe|mamba|jamba|"
    "falcon_h1|minicpm3|gemma3n|bitnet"
)
"""Beginnings of a model_type that `--split-mode tensor` refuses, as it does latent attention and Mamba (llama.cpp
`multi-gpu.md` @5815cb84; `llama-arch.cpp`: llm_arch_supports_sm_tensor)."""
SPLIT, LAYERS, UNIFIED, HOST_EXPERTS = "split_mode", "n_gpu_layers", "kv_unified", "n_cpu_moe"
ALL = 9999
"""The value of LAYERS and of HOST_EXPERTS for all layers."""
NEED_DRAFT_MODEL = ("draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark")

MAX_SLOTS, SLOT_GRAIN = 256, 256
"""The maximum number of slots, and the multiple to which the context of a slot is rounded up."""
UBATCH, HOST_CACHE_MIB, DRAFTS = 512, 8192, 3
"""llama.cpp's defaults: tokens of a physical batch, MiB of evicted prompts in the host's memory, and drafted tokens."""
SPIN_COUNT = 10_000
"""How often libgomp's threads check a barrier before they sleep. With libgomp's default, a server beside two busy
processes on two cores took 2.5 times longer per iteration; with threads that sleep at once, 1.8 times longer on idle
cores. With this value, the server was as fast as the better of both settings in each case (xllamacpp, two threads, 4
and 16 sequences)."""
PACKAGE = "xllamacpp"


class LlamaProgram(Program):
    """The user's own llama-server of any release, or the server of the xllamacpp wheel, whose flags are checked."""

    def known_args(self, args: Mapping[str, EngineArg]) -> dict[str, EngineArg]:
        """See `Program`. `ctx-size` is the context of all slots, a cache has two types, which are mostly equal, and
        `cpu-moe` keeps the experts of all layers on the host."""
        result = {self.full_name(strip_dashes(name)): value for name, value in args.items()}
        keys, values = (result.get(f"cache-type-{part}") for part in ("k", "v"))
        if keys == values and keys in self.cache_types:
            del result["cache-type-k"], result["cache-type-v"]
            result[KV] = keys
        if result.get("cpu-moe") is True:
            del result["cpu-moe"]
            result[HOST_EXPERTS] = ALL
        slots, total = (_int(result.get(name)) or 0 for name in (PARALLEL, "ctx-size"))
        if slots > 0 and total and total % (slots * SLOT_GRAIN) == 0 and "kv-unified" not in result:
            del result["ctx-size"]
            result[CONTEXT] = total // slots
        return result

    def flags_of(self, spec: Spec) -> Collection[str]:
        return FLAGS_BY_NAME if spec.serve.command is None else ()

    def flags_in(self, folders: tuple[str, ...]) -> Collection[str]:
        return {strip_dashes(name) for name in FLAGS_BY_NAME}

    def version(self, spec: Spec) -> str:
        wheel = "" if spec.serve.command is not None else programs.package_version(sys.executable, PACKAGE)
        return spec.serve.engine_version or wheel

    def ready(self, spec: Spec) -> None:
        serve = spec.serve
        if serve.weights is None or not os.path.isfile(serve.weights):
            fix = "set the path of a GGUF file; examples/tiny_gguf.py creates a small one"
            raise unusable_weights(spec, "is not a file", fix)
        self.parse(spec)
        if serve.command is not None:
            programs.find_command(spec, serve.command)
        elif find_spec(PACKAGE) is None:
            raise NoDevice(
                f"{PACKAGE} is not installed; run pip install 'flagcore[llamacpp]', or set serve.command, such "
                "as [llama-server]"
            )
        else:
            programs.check_version(spec, programs.package_version(sys.executable, PACKAGE))


def _batches(task: Task) -> tuple[int, ...]:
    fixed = PROGRAM.split(task.spec).fixed.get(N_UBATCH)
    return tuple(dict.fromkeys(max(size, _int(fixed) or 0) for size in (512, 2048)))


SLOTS = Auto(
    lambda task: knobs.powers_in_flight(task, count=6, maximum=MAX_SLOTS),
    "six powers of two up to the requests in flight",
)
LAYERS_OF_DEVICES = Auto(
    lambda task: (-1,) if Hardware.of(task).on_cores else (task.spec.model.num_layers + 1,), "all; on cores auto"
)
EXPERT_LAYERS = Auto(
    lambda task: (
        tuple(task.spec.model.num_layers * part // 4 for part in range(5))
        if task.spec.model.experts and not Hardware.of(task).on_cores
        else (0,)
    ),
    "quarters of the layers; on cores and without experts 0",
)
PROGRAM = LlamaProgram.read(
    "flagcore_llamacpp",
    {
        "slots": SLOTS,
        "layers": LAYERS_OF_DEVICES,
        "expert_layers": EXPERT_LAYERS,
        "batches": Auto(_batches, "512, 2048, and at least ubatch_size of engine_args"),
    },
)
KNOBS = PROGRAM.knobs


def total_context(task: Task) -> int:
    """Return the total context of all slots in tokens, as set in `engine_args`, or 0 if it is not set there.

    A `ctx-size` of 0 is the context with which the model was trained. If that is unknown, the result is 0, too.
    """
    given, weights = PROGRAM.parse(task.spec).others.get("ctx-size"), task.spec.serve.weights
    trained = context_at(weights) if given == 0 and weights is not None else None
    return trained or _int(given) or 0


def slot_context(task: Task, context: int | None) -> int:
    """Return the context of a slot in tokens: `context` or the longest request, rounded up to SLOT_GRAIN."""
    return -(-(context or longest_request(task)) // SLOT_GRAIN) * SLOT_GRAIN


def streams(columns: Columns) -> IntArray:
    """Return the number of caches: one that all slots share if it is unified, or else one for each slot."""
    slots, on = columns[PARALLEL], PROGRAM.code(UNIFIED, "on")
    is_unified = (columns[UNIFIED] == on) | ((columns[UNIFIED] == 0) & (slots <= 0))
    return np.where(is_unified, 1, or_default(slots, AUTO_SLOTS))


def slot_share(columns: Columns, total: int) -> IntArray:
    """Return the context of one slot from the `total` of all slots: an even share, or all if the cache is unified. It
    is rounded up to SLOT_GRAIN (`llama-context.cpp`)."""
    return _padded(total // streams(columns))


def _padded(cells: IntArray) -> IntArray:
    return -(-cells // SLOT_GRAIN) * SLOT_GRAIN


def _cache_bytes(task: Task, values: Columns, context: IntArray, batch: IntArray) -> FloatArray:
    """Return the bytes of the caches and states of all slots. `context`: cells of one cache; `batch`: tokens of a pass.

    A layer with a window caches the windows of the slots that share it and a batch, unless `swa-full` is set (llama.cpp
    `llama-kv-cache-iswa.cpp`). States are in 32 bits.
    """
    element, caches, slots = PROGRAM.element_bytes(values), streams(values), or_default(values[PARALLEL], AUTO_SLOTS)
    is_full = PROGRAM.parse(task.spec).others.get("swa-full") is True
    total = np.zeros(context.shape)
    for mixer, number in mixer_counts(task.spec.model).items():
        if not isinstance(mixer, Attention):
            total = total + number * (slots * mixer.state_bytes + caches * context * mixer.token_bytes(1.0) * element)
            continue
        windows = _padded(np.minimum(context, (mixer.window or 0) * (slots // caches) + batch))
        cells = windows if mixer.window and not is_full else context
        total = total + number * caches * cells * (mixer.cached_on(1.0) + mixer.index_bytes) * element
    return total


def host_cache_mib(task: Task) -> float:
    """Return how many MiB of evicted prompts an instance may store in host memory.

    The default is 0 if prompts never repeat, because storing them would only cost time.
    """
    cache_mib = _int(PROGRAM.parse(task.spec).others.get("cache-ram"))
    if cache_mib is not None:
        return cache_mib if cache_mib >= 0 else math.inf
    return HOST_CACHE_MIB if any(load.trace or load.turns > 1 for load in task.spec.serve.loads) else 0


def _host_experts(task: Task, columns: Columns) -> FloatArray:
    """Return how many layers that are on devices leave their routed experts in the memory of the host.

    llama.cpp counts all layers from the first one, whether they have experts or not (`common/arg.cpp`). Layers that are
    not on devices are also the first ones.
    """
    model, on_cores = task.spec.model, Hardware.of(task).on_cores
    has_experts = [isinstance(each.network, Experts) for each in layers_of(model)]
    before = np.array([0, *np.cumsum(has_experts)], dtype=np.float64)
    first = np.where(columns[LAYERS] < 0, 0, model.num_layers + 1 - columns[LAYERS]).clip(0, model.num_layers)
    on_host = np.maximum(columns[HOST_EXPERTS].clip(max=model.num_layers), first)
    return np.asarray((before[on_host] - before[first]) * (not on_cores))


def _trained_context(spec: Spec) -> int | None:
    """Return the context with which the model was trained, llama.cpp's default, or None if the weights are missing."""
    weights = spec.serve.weights
    try:
        return None if weights is None else context_length(weights)
    except FlagError:
        return None


def _is_repository(weights: str) -> bool:
    """Return whether weights are a public name of GGUF files, such as ggml-org/gpt-oss-20b-GGUF."""
    return "gguf" in weights.lower() and not os.path.exists(weights) and find_public(weights) is not None


RUNNER = "flagcore_llamacpp.server"


def _flag(name: str, value: EngineArg) -> Sequence[str]:
    """Return a flag of `engine_args` as command-line words.

    True becomes the bare flag, and False its opposite, unless the flag takes the values on and off. None becomes no
    word.
    """
    flag, spelling = FLAGS_BY_NAME.get(name), f"--{name}"
    if value is None:
        return ()
    if not isinstance(value, bool):
        return (spelling, *map(str, value if isinstance(value, list) else [value]))
    if flag and (flag.kind == "on/off" or "on" in flag.words):
        return (spelling, "on" if value else "off")
    if value:
        return (spelling,)
    if flag and flag.off:
        return ((flag.names if {spelling, f"-{name}"} & {*flag.off} else flag.off)[-1],)
    positive = name.removeprefix("no-")
    return () if positive in PROGRAM.reserved else (f"--{positive}" if positive != name else f"--no-{name}",)


def _int(value: EngineArg) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _slot_context(task: Task, total: int) -> Rule:
    longest = longest_request(task)
    return rule(
        "slot_context",
        (PARALLEL, UNIFIED),
        N_("ctx-size = {total} over parallel slots must be at least {longest} per slot, the longest request"),
        lambda c: slot_share(c, total) < longest,
        total=total,
        longest=longest,
    )


def _knob_words(task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> list[str]:
    """Return the flags for knob values."""
    words = [*knobs.arguments([knob for knob in KNOBS if knob.name != CONTEXT], values)]
    if values.get(HOST_EXPERTS) == ALL:
        place = words.index("--n-cpu-moe")
        words[place : place + 2] = ["--cpu-moe"]
    slots, context = _int(values.get(PARALLEL)), _int(values.get(CONTEXT))
    if (slots or context) and "ctx-size" not in PROGRAM.parse(task.spec).others:
        words += ["--ctx-size", str((slots or AUTO_SLOTS) * slot_context(task, context))]
    if values.get(KV) is not None:
        words += ["--cache-type-k", str(values[KV]), "--cache-type-v", str(values[KV])]
    if values.get(SPLIT) is None and count(values, TP) > 1:
        words += ["--split-mode", "tensor"]
    if values.get(THREADS) is None and cores and count(values, INSTANCES) > 1:
        words += ["--threads", str(len(cores))]
    return words


def _other_words(task: Task, values: Mapping[str, KnobValue], *, is_embedded: bool) -> list[str]:
    """Return the flags of `engine_args`, and those that trials need besides. `is_embedded`: the wheel's server."""
    spec, others, words = task.spec, PROGRAM.parse(task.spec).others, list[str]()
    if "cache-ram" not in others and not host_cache_mib(task) and not spec.serve.elsewhere:
        words += ["--cache-ram", "0"]
    if is_embedded and not others.keys() & {"verbosity", "log-verbosity"}:
        words += ["--verbosity", "4"]  # the level that logs batch sizes and attention
    if values.get(SPECULATION) is None and SPECULATION in spec.space:  # the draft model is for other candidates
        others = {name: value for name, value in others.items() if not name.startswith("spec-")}
    return words + [word for name, value in others.items() for word in _flag(name, value)]


class LlamaCpp(ServingEngine):
    """llama.cpp."""

    name = "llamacpp"
    where = "flagcore_llamacpp.reports:REPORTS"
    program = PROGRAM
    modules: Mapping[str, str] = {PACKAGE: PACKAGE}
    split_by = PP
    host_times = (0.2e-3, 0.2e-3)  # a model of one layer on one core, 1 to 16 sequences; and the HTTP server of 16

    def settings(self, task: Task, columns: Columns) -> Settings:
        """Return llama.cpp's effective settings for each candidate.

        A slot corresponds to a sequence, and a logical batch to an iteration.
        """
        values = PROGRAM.columns(task, columns)
        hardware, total = Hardware.of(task), total_context(task)
        slots, batch = or_default(values[PARALLEL], AUTO_SLOTS), PROGRAM.values(values, N_BATCH)
        context = or_default(values[CONTEXT], slot_context(task, None))
        pass_tokens, caches = np.minimum(or_default(values[N_UBATCH], UBATCH), batch), streams(values)
        cells = slot_share(values, total) if total else _padded(slots * context // caches)
        if trained := _trained_context(task.spec):  # all slots share it if their number is not set
            is_unset = (values[PARALLEL] == 0) & (values[CONTEXT] == 0) & (total == 0)
            context, cells = np.where(is_unset, trained, context), np.where(is_unset, trained, cells)
        all_layers, devices = task.spec.model.num_layers + 1, values[TP] * values[PP]  # the last one is the output head
        if hardware.on_cores:
            share = hardware.share(values[INSTANCES])
            devices = np.where(values[THREADS] > 0, np.minimum(values[THREADS], share), share)
        cache = _cache_bytes(task, values, cells, pass_tokens) / devices
        context = cells if total else context
        mtp = PROGRAM.code(SPECULATION, "draft-mtp")  # words before it draft from n-grams
        return Settings.of(
            task,
            values,
            PROGRAM,
            devices=devices,
            max_running=slots,
            max_batched_tokens=batch,
            pass_tokens=pass_tokens,
            context_len=context,
            graph_tokens=np.full_like(devices, GRAPH_TOKENS),
            cache_bytes=cache,
            drafted=np.where(values[SPECULATION] >= mtp, or_default(values[DRAFTED], DRAFTS), 0),
            token_bytes=cache / (caches * cells),
            longest_bytes=context * cache / (caches * cells),
            on_device=np.where(values[LAYERS] < 0, 1.0, np.minimum(values[LAYERS] / all_layers, 1.0)),
            experts_on_host=_host_experts(task, values),
            host_cache=np.full(devices.shape, host_cache_mib(task) * 2.0**20),
            writes_through=np.zeros(devices.shape, dtype=np.bool_),  # a prompt moves to the host, and back to a slot
        )

    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
        spec = task.spec
        is_embedded = spec.serve.command is None and not spec.serve.elsewhere
        command = (sys.executable, "-m", RUNNER) if is_embedded else PROGRAM.start_command(spec)
        weights = spec.serve.weights or ""
        argv = [
            *command,
            "--hf-repo" if _is_repository(weights) else "--model",
            weights,
            "--host",
            address(task),
            "--port",
            PORT,
            "--metrics",
        ]
        argv += [*_knob_words(task, values, cores), *_other_words(task, values, is_embedded=is_embedded)]
        return Instance(argv=tuple(argv), environment={"GOMP_SPINCOUNT": str(SPIN_COUNT)})

    def rules(self, task: Task) -> tuple[Rule, ...]:
        """Return llama.cpp's legality rules for candidates."""
        check_images(task, "mmproj")
        hardware, total = Hardware.of(task), total_context(task)
        model, row = task.spec.model, PROGRAM.code(SPLIT, "row")
        states = [each for each in mixer_counts(model) if each.state_bytes and not isinstance(each, GatedDeltaNet)]
        whole = bool(states) or latent_layers(model) > 0 or NO_TENSOR_MODE.match(model.family or "") is not None
        return (
            rule(
                "split_tensors",
                (TP, SPLIT),
                N_("llama.cpp does not split the tensors of this architecture: use {PP}"),
                lambda c: (c[TP] > 1) & (c[SPLIT] != row) & whole,
            ),
            *split_rules(task, attention_and_experts=False),
            *forbidden(task, PROGRAM),
            rule(
                "batch_holds_slots",
                (PARALLEL, N_BATCH),
                N_("batch_size must be at least parallel, or llama.cpp aborts"),
                lambda c: (c[N_BATCH] > 0) & (c[N_BATCH] < or_default(c[PARALLEL], AUTO_SLOTS)),
            ),
            rule(
                "ubatch_in_batch",
                (N_BATCH, N_UBATCH),
                N_("ubatch_size must not exceed batch_size (default {default})"),
                lambda c: c[N_UBATCH] > PROGRAM.values(c, N_BATCH),
                default=PROGRAM.defaults[N_BATCH],
            ),
            rule(
                "threads_on_cores",
                (INSTANCES, THREADS, BATCH_THREADS),
                N_("threads (and threads_batch) x {INSTANCES} must not exceed the {cards} cores"),
                lambda c: (np.maximum(c[THREADS], c[BATCH_THREADS]) > hardware.share(c[INSTANCES])) & hardware.on_cores,
                cards=hardware.cards,
            ),
            *context_rules(task),
            rule(
                "context_grain",
                (CONTEXT,),
                N_("{CONTEXT} must be a multiple of {grain}, to which llama.cpp rounds it up"),
                lambda c: c[CONTEXT] % SLOT_GRAIN != 0,
                grain=SLOT_GRAIN,
            ),
            *((_slot_context(task, total),) if total else ()),
            rule(
                "host_experts",
                (HOST_EXPERTS,),
                N_("n_cpu_moe must be 0 for a model without experts"),
                lambda c: (c[HOST_EXPERTS] > 0) & (task.spec.model.experts == 0),
            ),
            *speculation_rules(task, PROGRAM, NEED_DRAFT_MODEL, "spec-draft-model", "draft-mtp"),
        )

    def warnings(self, task: Task) -> Sequence[str]:
        weights, form = task.spec.serve.weights or "", task.spec.serve.precision
        if _is_repository(weights) and form in GGUF_BITS:
            text = N_(
                "{weights} is taken in {form}, {bits} bits per weight; a tag, such as :Q5_K_M, names another format"
            )
            line = _(text, weights=weights, form=form.upper(), bits=f"{GGUF_BITS[form]:.3g}")
            return [*super().warnings(task), line]
        if not weights or os.path.isfile(weights) or weights.endswith(".gguf") or _is_repository(weights):
            return super().warnings(task)
        text = N_(
            "serve.weights: {weights} is no GGUF file, which llama-server needs; set the path of one, or a repository "
            "such as unsloth/Qwen3-8B-GGUF:Q4_K_M"
        )
        return [*super().warnings(task), _(text, weights=weights)]

    def merges(self, task: Task) -> tuple[Merge, ...]:
        """Return merges that ignore knobs without effect, and that treat llama.cpp's defaults as not set."""
        default_codes = [PROGRAM.code(SPLIT, name) for name in ("none", "layer", "tensor")]

        def is_default_ubatch(c: Columns) -> BoolArray:
            return np.equal(c[N_UBATCH], np.minimum(UBATCH, PROGRAM.values(c, N_BATCH)))

        on_cores, layers = Hardware.of(task).on_cores, task.spec.model.num_layers
        nothing_to_offload = ignoring("nothing_to_offload", (LAYERS,), lambda c: True, -1)
        return (
            ignoring("batch_threads_as_threads", (THREADS, BATCH_THREADS), lambda c: c[BATCH_THREADS] == c[THREADS]),
            *same_as_unset(PROGRAM),
            # TP and PP already imply these modes: none for one device, layer for stages, tensor for TP.
            ignoring("split_by_default", (SPLIT,), lambda c: np.isin(c[SPLIT], default_codes)),
            ignoring("ubatch_by_default", (N_BATCH, N_UBATCH), is_default_ubatch),
            *((nothing_to_offload, ignoring("nothing_on_host", (HOST_EXPERTS,), lambda c: True)) if on_cores else ()),
            ignoring("experts_of_all_layers", (HOST_EXPERTS,), lambda c: c[HOST_EXPERTS] >= layers, ALL),
        )


ENGINE = LlamaCpp()
