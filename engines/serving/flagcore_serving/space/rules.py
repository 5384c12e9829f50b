"""Legality rules and merges of candidates that serving engines share."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from flagcore_importers.programs import strip_dashes
from flagcore_models.keys import MODELS
from flagcore_models.layers import attention_counts, network_counts, other_mixers, product_counts

from flagcore.domain.model import Model
from flagcore.domain.space import BoolArray, Columns, IntArray, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore.i18n import N_, Message
from flagcore_serving.space import placement
from flagcore_serving.space.hardware import (
    DP,
    EP,
    INSTANCES,
    PP,
    PREFILL_DECODE,
    TP,
    Hardware,
    longest_request,
    most_images,
)
from flagcore_serving.space.knobs import (
    BACKEND,
    CONTEXT,
    DRAFTED,
    EXCHANGE,
    PREFILL_EXCHANGE,
    REDUNDANT,
    SHARING,
    SPECULATION,
    TOWER,
    TRANSFER,
    wide_values,
)
from flagcore_serving.space.program import Program
from flagcore_serving.space.roles import SPLITS
from flagcore_serving.space.weights import EXPERTS, context_limit, quantization

NAMES = {
    "INSTANCES": INSTANCES,
    "PREFILL_DECODE": PREFILL_DECODE,
    "TP": TP,
    "PP": PP,
    "DP": DP,
    "EP": EP,
    "CONTEXT": CONTEXT,
    "DRAFTED": DRAFTED,
    "EXCHANGE": EXCHANGE,
    "REDUNDANT": REDUNDANT,
    "SHARING": SHARING,
    "SPECULATION": SPECULATION,
}
"""The names of knobs in messages of rules, by their fields."""


def rule(
    name: str, knobs: tuple[str, ...], text: str, broken: Callable[[Columns], BoolArray], /, **values: object
) -> Rule:
    """Return a legality rule. `text`: the template of its message, with NAMES and `values` as fields."""
    return Rule(name=name, knobs=knobs, message=Message(text, **NAMES, **values), broken=broken)


def split_rules(
    task: Task, *, attention_and_experts: bool, pipeline: bool = True, span: bool = False, whole: Collection[str] = ()
) -> tuple[Rule, ...]:
    """Return the legality rules for the number of instances and the parallel sizes.

    `attention_and_experts`: the engine has attention DP and EP, and tensor parallelism splits attention by heads.
    `pipeline`: the engine has pipeline stages. `span`: an instance may span hosts. `whole`: the parts of the model
    whose shards are always whole blocks of quantized weights, as they are padded or not split.
    """
    hardware, model = Hardware.of(task), task.spec.model
    knobs = (INSTANCES, TP, *((PP,) if pipeline else ()), *((DP,) if attention_and_experts else ()))
    cards = rule(
        "cards",
        knobs,
        N_("{knobs} must not exceed the {cards} devices"),
        lambda c: np.prod([c[knob] for knob in knobs], axis=0) > hardware.cards,
        knobs=" x ".join(knobs),
        cards=hardware.cards,
    )
    text = N_("{PP} must not exceed num_layers = {num_layers}")
    layers = rule("pipeline_layers", (PP,), text, lambda c: c[PP] > model.num_layers, num_layers=model.num_layers)
    return (
        cards,
        *_hosts(hardware, knobs, span),
        *((layers,) if pipeline else ()),
        *(_attention_and_experts(task, whole) if attention_and_experts else ()),
    )


def _hosts(hardware: Hardware, knobs: tuple[str, ...], span: bool) -> tuple[Rule, ...]:
    """Return the rule that each instance must fit on a host, or on whole hosts if it may `span` them. There is no such
    rule for one host or for CPU cores. The first of `knobs` is the number of instances."""

    def misplaced(c: Columns) -> BoolArray:
        width = np.maximum(np.prod([c[knob] for knob in knobs[1:]], axis=0), 1)
        hosts_each = width // hardware.per_host
        large = ((width % hardware.per_host != 0) | (c[INSTANCES] * hosts_each > hardware.hosts)) if span else True
        small = c[INSTANCES] > hardware.hosts * (hardware.per_host // width)
        return np.where(width > hardware.per_host, large, small)

    if hardware.hosts == 1 or hardware.on_cores:
        return ()
    text = N_("an instance must fit on a host of {devices} devices")
    if span:
        text = N_("an instance must fit on a host of {devices} devices, or use all devices of several hosts")
    return (rule("hosts", knobs, text, misplaced, devices=hardware.per_host),)


def forbidden(task: Task, program: Program) -> tuple[Rule, ...]:
    """Return the rules for combinations of values in `forbidden` of an engine's `engine.yaml`.

    Each combination has these keys:

    - `message`: what the combination violates.
    - `when`: a mapping from knobs to conditions, all of which must hold; or a list of such mappings, one of which must
      hold.
    - `on_cores`: whether the rule applies only if devices are CPU cores.

    A condition is a value, a list of values, `> NUMBER`, or `{not: CONDITION}`. The value null means not set.
    Conditions on layouts apply to both kinds of instances of PREFILL_DECODE.
    """
    on_cores, has_kinds = Hardware.of(task).on_cores, any(knob.name == PREFILL_DECODE for knob in program.knobs)
    items = program.forbidden.items()
    rules = [_forbidden(program, name, item) for name, item in items if on_cores or not item.get("on_cores")]
    layout_knobs = {*SPLITS.values()}
    recipe = {*wide_values(task, program.parse(task.spec).fixed)} & {knob.name for knob in program.knobs}
    names = tuple(sorted(recipe - {PREFILL_DECODE}))
    combined = Rule(
        name="recipe_of_kinds",
        knobs=(PREFILL_DECODE, *names),
        message=Message(
            "a spec without a space sets {words} together, and with {PREFILL_DECODE}", **NAMES, words=", ".join(names)
        ),
        broken=lambda c: (
            np.any([(c[name] > 0) != (c[names[0]] > 0) for name in names], axis=0)
            | ((c[names[0]] > 0) & (c[PREFILL_DECODE] == 0))
        ),
        search_only=True,
    )
    return (
        *(
            placement.of_each_kind(task, rule, one_suffices=bool({*placement.COPIES} & {*rule.knobs}))
            if has_kinds and layout_knobs & {*rule.knobs}
            else rule
            for rule in rules
        ),
        *((combined,) if names else ()),
    )


def _forbidden(program: Program, name: str, item: Mapping[str, Any]) -> Rule:
    """Return the rule `name` for one item of `forbidden`."""
    cases = item["when"] if isinstance(item["when"], list) else [item["when"]]
    conditions = [{knob: _condition(program, knob, wanted) for knob, wanted in case.items()} for case in cases]

    def broken(c: Columns) -> BoolArray:
        case_holds = [np.all([holds(c[knob]) for knob, holds in case.items()], axis=0) for case in conditions]
        return np.asarray(np.any(case_holds, axis=0))

    knobs = tuple(dict.fromkeys(knob for case in cases for knob in case))
    return rule(name, knobs, item["message"], broken)


def _condition(program: Program, knob: str, wanted: Any) -> Callable[[IntArray], BoolArray]:
    """Return a function that checks for which codes of `knob` the condition `wanted` holds (see `forbidden`)."""
    if isinstance(wanted, Mapping):
        holds = _condition(program, knob, wanted["not"])
        return lambda codes: ~holds(codes)
    if isinstance(wanted, str) and wanted.startswith("> "):
        return lambda codes: codes > int(wanted[2:])
    allowed = [int(program.code(knob, value)) for value in (wanted if isinstance(wanted, list) else [wanted])]
    return lambda codes: np.isin(codes, allowed)


def _attention_and_experts(task: Task, whole: Collection[str]) -> tuple[Rule, ...]:
    model = task.spec.model
    heads = math.gcd(*(each.heads for each in attention_counts(model)))
    linear_heads = math.gcd(*(each.heads for each in other_mixers(model)))
    linear_key = "num_attention_heads" if linear_heads == model.num_attention_heads else "linear_num_key_heads"
    return (
        _divides("attention_heads", "num_attention_heads", heads),
        *_query_groups(model),
        _divides("linear_heads", linear_key, linear_heads),
        *_quantized_blocks(task, whole),
        rule(
            "experts_exist",
            (EP,),
            N_("{EP} > 1 needs a model with experts"),
            lambda c: (c[EP] > 1) & (model.experts == 0),
        ),
    )


def vocabulary(task: Task) -> Rule:
    """Return the rule that TP divides the vocabulary, which engines pad to 64, but not to TP (gpustack/gpustack issue
    3777: GLM-4.5-Air on 6 devices in vLLM; sgl-project/sglang issue 31799: DeepSeek-V4-Pro on 24)."""
    size = task.spec.model.vocab_size
    return _divides("vocabulary", "padded vocab_size" if size % 64 else "vocab_size", -(-size // 64) * 64)


def _divides(name: str, key: str, size: int) -> Rule:
    text = N_("{TP} must divide {key} = {size}")
    return rule(name, (TP,), text, lambda c: size % c[TP].clip(1) != 0, key=key, size=size)


def _query_groups(model: Model) -> tuple[Rule, ...]:
    """Return the rule that ranks have whole key heads, if the layers of a model have such heads."""
    groups = sorted({layer.units for product in product_counts(model) for layer in product.layers} - {0})
    if not groups:
        return ()
    text = N_("num_query_groups = {groups} must be a multiple or a divisor of {TP}")

    def broken(c: Columns) -> BoolArray:
        tensor = c[TP].clip(1)
        return np.asarray(np.any([(each % tensor != 0) & (tensor % each != 0) for each in groups], axis=0))

    return (rule("query_groups", (TP,), text, broken, groups=", ".join(map(str, groups))),)


def _quantized_blocks(task: Task, whole: Collection[str]) -> tuple[Rule, ...]:
    """Return the rule that shards of quantized weights are whole blocks: of the dense layers, experts, shared experts.

    Sources: `validate_fp8_block_shape` and `create_weights` of the formats in vLLM 0.33; SGLang 0.5.23 has the same.
    """
    model, stored = task.spec.model, quantization(task.spec)
    if stored is None or stored.block <= 1:
        return ()
    block = stored.block
    products = [each for network in network_counts(model) for each in network.products(model.hidden_size)]
    split = [each for each in products if each.split == "inputs" and each.group not in {*stored.wide, *whole}]
    blocks = {EXPERTS: 32} if EXPERTS in stored.parts else {}  # 4 bits with a scale per 32 weights

    def broken(c: Columns) -> BoolArray:
        tensor = c[TP].clip(1)
        ranks = np.maximum(tensor * c[DP].clip(1) // c[EP].clip(1), 1)
        shares = [
            (each.inputs, ranks if each.group == EXPERTS else tensor, blocks.get(each.group, block)) for each in split
        ]
        bad = [(parts > 1) & (width % (parts * size) != 0) for width, parts, size in shares]
        return np.asarray(np.any(bad, axis=0) & (tensor > 0))

    parts = ", ".join(f"{width:,}" for width in dict.fromkeys(each.inputs for each in split))
    text = N_("a device's share of the layers' width ({parts}) must be a multiple of {block}, the block of the weights")
    return (rule("quantized_blocks", (TP, DP, EP), text, broken, parts=parts, block=block),)


_NO_TEXT = ("is-embedding", "embedding", "embeddings", "rerank", "reranking")
_POOLING = ("pooling", "classify", "embed", "embedding", "reward", "score")
"""Flags with which a server generates no text, and values of `runner` and `task`."""


def check_text(arguments: Mapping[str, object], prefix: str = "serve.engine_args.") -> None:
    """Raise SpecError if a server with these arguments generates no text. `prefix` is that of the error's key."""
    flags = {strip_dashes(key): value for key, value in arguments.items() if value not in (False, None)}
    pools = [name for name in ("runner", "task") if flags.get(name) in _POOLING]
    if name := next((name for name in (*_NO_TEXT, *pools) if name in flags), ""):
        problem, fix = "starts a server that generates no text", "remove it: load tests need answers"
        raise SpecError(key=f"{prefix}{name}", value=flags[name], problem=problem, fix=fix)


def check_images(task: Task, needed_flag: str = "") -> None:
    """Raise SpecError if the server generates no text, or if it or the model cannot process the images of requests.

    `needed_flag` is the flag for the file with the vision tower, if the engine needs one.
    """
    serve, vision = task.spec.serve, task.spec.model.vision
    check_text(serve.engine_args)
    flags = {strip_dashes(key) for key, value in serve.engine_args.items() if value not in (False, None)}
    if not most_images(serve.loads):
        return
    if "language-model-only" in flags:
        problem = "cannot be sent to a server with language-model-only"
        fix = "remove serve.engine_args.language-model-only, or the images"
    elif needed_flag and needed_flag not in flags:
        problem = f"need the file of a vision tower: {serve.engine} without {needed_flag} takes text only"
        fix = f"set serve.engine_args: {{{needed_flag}: FILE}}, or remove the images"
    elif vision is None:
        problem = f"need a model with a known vision tower ({', '.join(MODELS)})"
        fix = "set model to its Hugging Face directory or config.json, or remove the images"
    else:
        return
    if serve.loads[0].images:
        raise SpecError(key="serve.profile.images", problem=problem, fix=fix)
    trace = serve.loads[0].trace
    raise SpecError(key="serve.profile.trace", value=trace, problem=f"has images, which {problem}", fix=fix)


def ignoring(name: str, knobs: tuple[str, ...], unused: Callable[[Columns], BoolArray | bool], value: int = 0) -> Merge:
    """Return a merge that gives the last of `knobs` the code `value` where it is `unused`, which all of them tell."""
    return Merge(name=name, knobs=knobs, canonical=lambda c: {knobs[-1]: np.where(unused(c), value, c[knobs[-1]])})


def tower_merge(task: Task) -> Merge:
    """Return the merge that ignores the knob `TOWER` if the model has no vision tower or the TP size is 1."""
    return ignoring("tower_of_one_rank", (TP, TOWER), lambda c: (c[TP] <= 1) | (task.spec.model.vision is None))


def merges_of_kinds() -> tuple[Merge, ...]:
    """Return merges that ignore the knobs that PREFILL_DECODE replaces. If it is not set, they ignore TRANSFER."""

    def is_set(c: Columns) -> BoolArray:
        return c[PREFILL_DECODE] > 0

    replaced = (INSTANCES, *SPLITS.values())
    return (
        *(ignoring(f"{knob}_of_kinds", (PREFILL_DECODE, knob), is_set, 1) for knob in replaced),
        ignoring("no_transfer", (PREFILL_DECODE, TRANSFER), lambda c: ~is_set(c)),
        ignoring("no_prefill_exchange", (PREFILL_DECODE, PREFILL_EXCHANGE), lambda c: ~is_set(c)),
    )


def exchange_merge(task: Task, program: Program) -> tuple[Merge, ...]:
    """Return the merge that exchanges tokens with experts on several hosts as published runs do, unless the spec says
    how. Instances on one host keep the engine's own exchange."""
    words = program.exchanges.get(task.cluster.groups[0].chip.vendor)
    given = {*task.spec.space, *(task.spec.baseline or {}), *program.parse(task.spec).fixed}
    knob, version = program.knob_of(EXCHANGE)[0], program.version(task.spec)
    if not words or given & {EXCHANGE, PREFILL_EXCHANGE} or Hardware.of(task).hosts == 1:
        return ()
    if knob is None or not knob.is_available(version):
        return ()
    of_prefill, of_others, own = (program.code(EXCHANGE, word) for word in (*words, program.defaults[EXCHANGE]))

    def published(c: Columns) -> Columns:
        prefill, others = placement.exchanging(task, c)
        exchange = np.where(others, of_others, np.where(prefill, own, 0))
        first = np.where(prefill, of_prefill, own)
        differs = (c[PREFILL_DECODE] > 0) & (exchange > 0) & (first != exchange)
        return {EXCHANGE: exchange, PREFILL_EXCHANGE: np.where(differs, first, 0)}

    knobs = (TP, DP, EP, PREFILL_DECODE, EXCHANGE, PREFILL_EXCHANGE)
    return (Merge(name="exchange_between_hosts", knobs=knobs, canonical=published),)


def context_rules(task: Task, *, scales_yarn: bool = True) -> tuple[Rule, ...]:
    """Return the rules for the context length.

    The context must hold the longest request, because engines silently truncate longer answers, and must not exceed the
    context of the model (`scales_yarn`: see `context_of`). Raises SpecError if a request exceeds it.
    """
    check_images(task)
    loads, limit = task.spec.serve.loads, context_limit(task.spec, scales_yarn=scales_yarn)
    longest_counted = longest_request(task, estimated=False)
    longest = max(longest_request(task), *(load.longest or 0 for load in loads if load.lengths), 0)
    fits = rule(
        "context_length",
        (CONTEXT,),
        N_("{CONTEXT} must be at least {longest}, the tokens of the longest request"),
        lambda c: (c[CONTEXT] > 0) & (c[CONTEXT] < longest),
        longest=longest,
    )
    if limit is None:
        return (fits,)
    text = Message(
        "the model's context of {limit} tokens ({weights})", limit=limit, weights=str(task.spec.serve.weights)
    )
    if longest_counted > limit:
        key = "trace" if any(load.trace for load in loads) else "input_len"
        problem = f"leads to a request of {longest_counted} tokens, prompt and answer, which exceed {text}"
        fix = "shorten the requests, or extend the context with the engine's flags for rope scaling"
        raise SpecError(key=f"serve.profile.{key}", value=getattr(loads[0], key), problem=problem, fix=fix)
    exceeds = rule(
        "model_context", (CONTEXT,), N_("{CONTEXT} must not exceed {text}"), lambda c: c[CONTEXT] > limit, text=text
    )
    return fits, exceeds


def speculation_rules(
    task: Task, program: Program, need_model: Sequence[str], model_flag: str, own_layers: str
) -> tuple[Rule, ...]:
    """Return the rules for speculation.

    `need_model`: methods that need the flag `model_flag`. `own_layers`: the method that needs a model with layers for
    multi-token prediction.
    """
    drafts, layers = [program.code(SPECULATION, word) for word in need_model], program.code(SPECULATION, own_layers)
    has_model = model_flag in program.parse(task.spec).others
    longest = longest_request(task)
    too_long = rule(
        "drafts_in_context",
        (DRAFTED,),
        N_("{DRAFTED} must be less than {longest}, the tokens of the longest request"),
        lambda c: c[DRAFTED] >= longest,
        longest=longest,
    )
    needs_draft = rule(
        "speculation_needs_a_draft",
        (SPECULATION,),
        N_("{SPECULATION} = {words} needs {model_flag} in serve.engine_args"),
        lambda c: np.isin(c[SPECULATION], drafts) & (not has_model),
        words=", ".join(need_model),
        model_flag=model_flag,
    )
    return (
        *([too_long] if any(knob.name == DRAFTED for knob in program.knobs) else []),
        *([needs_draft] if need_model else []),
        rule(
            "no_prediction_layers",
            (SPECULATION,),
            N_("{SPECULATION} = {own_layers} needs a model with multi-token prediction (model.mtp_num_layers)"),
            lambda c: (c[SPECULATION] == layers) & (task.spec.model.mtp_num_layers == 0),
            own_layers=own_layers,
        ),
    )


def block_rule(program: Program, knob: str, message: str, is_bad: Callable[[IntArray], BoolArray]) -> Rule:
    """Return the rule for the block sizes that attention backends support.

    `program.block_sizes` lists the sizes of some backends. For all others `is_bad` returns which sizes are unsupported.
    `message`: the rule's message, with the field {knob}.
    """
    sizes_by_code = {program.code(BACKEND, name): sizes for name, sizes in program.block_sizes.items()}

    def broken(c: Columns) -> BoolArray:
        bad = is_bad(c[knob])
        for backend, sizes in sizes_by_code.items():
            bad = np.where(c[BACKEND] == backend, ~np.isin(c[knob], sizes), bad)
        return (c[knob] > 0) & bad

    return rule(knob, (knob, BACKEND), message, broken, knob=knob)


def no_drafts() -> Merge:
    """Return the merge that ignores the number of drafted tokens if there is no speculation."""
    return ignoring("no_speculation", (SPECULATION, DRAFTED), lambda c: c[SPECULATION] <= 0)


def same_as_unset(program: Program, defaults: Mapping[str, KnobValue] | None = None) -> list[Merge]:
    """Return merges that treat a knob with the engine's default value as not set.

    `defaults`: default values that depend on the task, in addition to those of `program`. The exchange of tokens has no
    such merge, because `exchange_merge` sets it for instances on several hosts.
    """

    def merge(name: str, value: KnobValue) -> Merge:
        default = program.code(name, value)
        return ignoring(f"{name}_by_default", (name,), lambda c: c[name] == default)

    values = {name: each for name, each in {**program.defaults, **(defaults or {})}.items() if name != EXCHANGE}
    return [merge(knob.name, values[knob.name]) for knob in program.knobs if knob.name in values]
