"""Production defaults from published recipes, and the settings of published runs.

The defaults are used in plans and for job records that omit settings. Sources: "General Performance Tips" and
"Fine-grained Recomputation" in Megatron-LM's `core/transformer/moe/README.md`; Megatron-Bridge's recipes
(`comm_overlap.py`, `mixed_precision.py`); `best_practice/DeepSeekV3` of yanring/Megatron-MoE-ModelZoo; the report of
DeepSeek-V3 (arXiv 2412.19437, 3.2.3).
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
from flagcore_models.layers import indexer_of, latent_layers
from flagcore_training.adapters import as_noted
from flagcore_training.layout import WHOLE_STEP
from flagcore_training.lengths import OFFLINE

from flagcore.contracts import Platform
from flagcore.domain.engine import RefusedValues, ValueRule
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Candidate, Columns, FloatArray, KnobValue
from flagcore.domain.spec import SettingValue, Spec, Task, TrainSpec
from flagcore.errors import SpecError
from flagcore.i18n import _
from flagcore.spec.plain_data import package_yaml
from flagcore_megatron.program.arguments import known_releases
from flagcore_megatron.program.user_command import implementation_of_command
from flagcore_megatron.space.flags import release_problem, setting_from_text
from flagcore_megatron.space.knobs import BY_NAME, SETTINGS, candidate_columns
from flagcore_megatron.space.meshes import CP, EP, MESHES, PP, TP, Meshes
from flagcore_megatron.space.options import check, graphs, is_hybrid, release, settings_in_force, words
from flagcore_megatron.space.rules import EXPERT_OVERLAP, settings_with_rules
from flagcore_megatron.space.split import EXPERT_TENSOR
from flagcore_megatron.space.stages import (
    LAYOUT,
    PATTERN,
    SPLIT_SETTINGS,
    VIRTUAL_STAGES,
    even_split,
    parse_layout,
    pattern_text,
    published_split,
)

IMPLEMENTATION = "transformer_engine"
WITH_TE = ("sm_", "gfx")
"""The beginnings of architectures for which Transformer Engine itself is built. Others have layers with its names."""
NARROW = ("fp8", "mxfp8", "nvfp4", "mxfp4")
"""Precisions below 16 bits."""


def overlaps(
    task: Task, kind: str, settings: Mapping[str, SettingValue], *, sharded: bool, sequence_parallel: bool
) -> dict[str, SettingValue]:
    """Return the settings for overlapping communication with compute, and those for the experts' matrix products.

    `sharded` is whether the distributed optimizer is used.
    """
    precision, dense = task.spec.train.precision, not task.spec.model.experts
    overlap_reduce = bool(settings.get("overlap_grad_reduce", sharded))
    is_eight_bit = precision in NARROW and "accumulate_allreduce_grads_in_fp32" not in settings
    narrow_gradients = overlap_reduce and sharded and kind == IMPLEMENTATION and is_eight_bit
    flash = task.spec.train.attention == "flash" and kind == IMPLEMENTATION
    return {
        "overlap_grad_reduce": overlap_reduce,
        "overlap_param_gather": overlap_reduce and sharded,
        "grad_reduce_in_bf16": narrow_gradients,  # most of these 8-bit runs would not fit otherwise
        "fp8_param_gather": narrow_gradients and precision not in ("nvfp4", "mxfp4"),
        "moe_grouped_gemm": kind != "local",
        "tp_comm_overlap": flash and sharded and sequence_parallel and dense,
    }


def narrow_hybrids(task: Task) -> dict[str, SettingValue]:
    """Return the parts that keep more bits when models with patterns of layers are trained with fewer bits.

    These are multi-token prediction and, of NVFP4 models with latent experts, the first and the last 16% of the layers,
    attention, and the latent projections. Output projections of other mixers have 8 bits (Megatron-Bridge
    `nemotron_h_bridge.py`, `mixed_precision.py`, `perf_recipes/nemotronh/te_quant.cfg` @067f987d: 14 of 88 layers).
    """
    model, precision = task.spec.model, task.spec.train.precision
    if not is_hybrid(model) or precision not in NARROW:
        return {}
    settings: dict[str, SettingValue] = {"keep_mtp_spec_in_bf16": True} if model.mtp_num_layers else {}
    if precision == "nvfp4" and model.moe_latent_size:
        settings |= {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": round(0.16 * model.num_layers)}
        settings |= {"modules_in_bf16": "attention,latent", "modules_in_mxfp8": "mixer_output"}
    return settings


def as_in_production(platform: Platform) -> Platform:
    """Return `platform` with the vendor's layers and settings, and otherwise the settings of published recipes.

    It is unchanged if the spec names a program.

    A setting is skipped if the spec sets it or compares its values, if the chip or the release does not support it, or
    if it contradicts another setting.
    """
    task, stack = platform.task, platform.support.stack
    train, spec = task.spec.train, task.spec
    if stack is None or train.command is not None or train.implementation not in (None, stack.implementation):
        return platform
    if _refuses(platform.value_rules, "implementation", stack.implementation):
        return platform
    train = replace(train, implementation=stack.implementation)
    is_dense, set_keys = not spec.model.experts, {*train.settings, *spec.space, *(spec.baseline or {})}
    known = {name for name, knob in BY_NAME.items() if not (is_dense and knob.experts_only)}
    recipe = {**_recipe(task, stack.implementation), **stack.settings}
    if recipe.get("cuda_graph_impl") and not is_dense:  # experts have a size that graphs cannot have
        recipe["cuda_graph_scope"] = f"attn,{'mamba,' * is_hybrid(spec.model)}moe_router,moe_preprocess"
    if not indexer_of(spec.model):
        recipe["dsa_kernel_backend"] = None
    for key, value in recipe.items():
        if key not in known or key in set_keys or not _is_supported(platform, key, value):
            continue
        extended = replace(train, assumed={**train.assumed, key: value})
        with suppress(SpecError):
            check(task, settings_in_force(replace(spec, work=extended)))
            train = extended
    return replace(platform, task=replace(task, spec=replace(spec, work=train)))


def _is_supported(platform: Platform, key: str, value: SettingValue) -> bool:
    """Return whether the chip and the release (else the newest) support a setting of a recipe.

    Neutral values set nothing.
    """
    if value in (None, BY_NAME[key].neutral or False) or _refuses(platform.value_rules, f"settings.{key}", value):
        return False
    release = platform.task.spec.train.engine_version or known_releases()[-1]
    return release_problem(BY_NAME[key], value, release) is None


def without_command(spec: Spec) -> TrainSpec:
    """Return the job of `spec` without its command, and with the settings and the program that the command uses."""
    if spec.train.command is None:
        return spec.train
    kind = spec.train.implementation or implementation_of_command(spec) or IMPLEMENTATION
    work = replace(spec.train, command=None, settings=settings_in_force(spec))
    return replace(work, implementation=kind, engine_version=release(spec))


def runs_as(spec: Spec) -> str:
    """Return how a job without a command runs: flagcore's trial program, or the vendor's layers."""
    if (kind := spec.train.implementation) in (None, "local"):
        return _("as flagcore's trial program runs it, without overlap (see train.implementation)")
    names = {"engine": spec.train.engine, "implementation": kind}
    return _("as {engine} runs it with {implementation} layers (train.implementation)", **names)


def assumed(task: Task, candidate: Candidate) -> dict[str, SettingValue]:
    """Return the assumed settings of a plan that are legal for a candidate and affect it."""
    values, settings = candidate.as_dict(), task.spec.train.assumed
    unused = {key for key in settings for need in BY_NAME[key].requires if values[need.knob] not in need.one_of}
    columns, legal = candidate_columns(values), {key: settings[key] for key in settings if key not in unused}
    for rule in settings_with_rules(task) if legal else ():
        if rule.name in legal and rule.broken(columns).any():
            del legal[rule.name]
    return legal


def unusual(task: Task, columns: Columns, predictions: Predictions) -> FloatArray:
    """Return the weight of each candidate's unusual properties. Of several meshes, the largest sizes count.

    These are tensor parallelism over several nodes, which counts twice, and fewer than USUAL_TOKENS tokens per
    context-parallel rank, which counts 5 times: no published run checks such predictions, and 10% is the mean error of
    those of runs that no fit has used. Each kind of model parallelism counts TIE. A data split counts infinitely: only
    flagcore's trial program starts it.
    """
    table, code = Meshes.from_task(task), columns.get(MESHES, np.array(0))
    meshes = table.codes
    sizes = np.stack([np.maximum(columns[name], meshes[name][code].max(axis=-1)) for name in (TP, CP, PP, EP)])
    is_short = (sizes[1] > 1) & (sizes[1] * USUAL_TOKENS > task.spec.train.seq_length)
    spans_nodes = sizes[0] > task.cluster.linked_devices
    weight = 5.0 * is_short + 2.0 * spans_nodes + TIE * (sizes > 1).sum(axis=0)
    return np.asarray(np.where(table.splits_data[code], np.inf, weight))


USUAL_TOKENS, LONG_TOKENS = 4096, 8192
"""The fewest and the most tokens per context-parallel rank of published runs (Megatron-Bridge, NeMo, DGX Cloud,
MoE-ModelZoo, SimuMax). In none of these runs does a tensor-parallel group span nodes."""
TIE = 0.1
"""Chosen by hand, so that the simpler one of two layouts with about the same predicted time comes first."""


def _recipe(task: Task, kind: str) -> dict[str, SettingValue]:
    """Return the settings of published recipes. MoE models recompute cheap modules that store many bytes."""
    model, settings = task.spec.model, task.spec.train.settings
    recipe = overlaps(task, kind, settings, sharded=True, sequence_parallel=True) | narrow_hybrids(task)
    if indexer_of(model):  # `transformer_config.py` of 0.19 asserts the last two
        recipe |= {"dsa_indexer_loss_coeff": 0.001, "apply_rope_fusion": False, "cp_comm_type": "all_gather"}
    recipe |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": _loss_kernel(task)}
    if not model.experts:
        return {**recipe, "moe_grouped_gemm": False}
    modules = "layernorm,moe_act" + (",mla_up_proj" if latent_layers(model) else "")
    if task.spec.train.precision == "fp8":
        recipe["fp8_recipe"] = "blockwise"  # the default, delayed scaling, cannot be combined with such recompute
    recipe |= {EXPERT_TENSOR: 1, "moe_token_dispatcher_type": "flex"}
    recipe["moe_router_fusion"] = not _PLAIN_ROUTERS.search(f"{model.name} flex")
    return {**recipe, EXPERT_OVERLAP: not is_hybrid(model), "recompute_modules": modules}


def _loss_kernel(task: Task) -> str:
    """Return the fused loss of recipes, Transformer Engine's, or Megatron's where its release refuses that."""
    version = task.spec.train.engine_version or known_releases()[-1]
    return "native" if release_problem(BY_NAME["cross_entropy_fusion_impl"], "te", version) else "te"


def _refuses(rules: Sequence[ValueRule], knob: str, value: SettingValue) -> bool:
    refused = (each for each in rules if isinstance(each, RefusedValues))
    return any(each.knob == knob and value in each.values for each in refused)


def published(
    task: Task, values: Mapping[str, KnobValue], notes: str
) -> tuple[Task, dict[str, KnobValue], frozenset[str]]:
    """Return the completed task and knobs of a job record, and the names of the settings that only its notes mention.

    Raises SpecError for an invalid layout of stages.
    """
    (task, assumed_lengths), noted, values = as_noted(task, notes), read_notes(notes), dict(values)
    train = task.spec.train
    # Papers on schedules (arXiv 2104.04473, 2401.10241) used unfused attention: their reported memory confirms it.
    if "pipeline_schedule" in noted:
        train = replace(train, attention="unfused")
        noted = {"overlap_p2p_comm": False, **noted}
        task = replace(task, spec=replace(task.spec, work=train))
    kind = train.implementation or IMPLEMENTATION
    settings = {**(_fine_tuning(task) if OFFLINE.search(notes) else {}), **noted, **train.settings}
    settings = _defaults(task, kind, settings, values) | settings
    if granularity := settings.pop("recompute_granularity", None):
        values.setdefault("recompute_granularity", str(granularity))
    stages = int(values.get("pipeline_model_parallel_size") or 1)
    if layout := settings.get(LAYOUT):
        layout_stages = parse_layout(str(layout), task.spec.model.num_layers, task.spec.model.mtp_num_layers)
        if not values.get(VIRTUAL_STAGES) and len(layout_stages) % stages == 0:
            values[VIRTUAL_STAGES] = len(layout_stages) // stages
    elif not any(settings.get(key) or values.get(key) for key in (*SPLIT_SETTINGS, PATTERN)):
        count = stages * int(values.get(VIRTUAL_STAGES) or 1)
        if (found := published_split(task.spec.model, count)) and is_hybrid(task.spec.model):
            found = {PATTERN: pattern_text(task.spec.model, even_split(task.spec.model.num_layers, count))}
        settings |= found
    spec = replace(task.spec, work=replace(train, implementation=kind, settings=settings))
    return replace(task, spec=spec), values, assumed_lengths | (noted.keys() - train.settings.keys())


def _fine_tuning(task: Task) -> dict[str, SettingValue]:
    """Return the settings of fine-tuning recipes of Megatron-Bridge, as of @067f987d: of 200, 157 overlap no exchange
    of gradients, and 5 set apply_rope_fusion, beside Llama's, whose provider does. Most fuse no router."""
    is_llama = "llama" in (task.spec.model.name or "").lower()
    switches = "overlap_grad_reduce", "overlap_param_gather", "moe_router_fusion"
    return {"apply_rope_fusion": is_llama, "cuda_graph_impl": "none", **dict.fromkeys(switches, False)}


def _defaults(
    task: Task, kind: str, settings: Mapping[str, SettingValue], values: Mapping[str, KnobValue]
) -> dict[str, SettingValue]:
    """Return the settings that a job record omits.

    Experts over several nodes use the flex dispatcher, whose exchange overlaps other micro-batches where stages are
    interleaved, as in recipes. Experts are split like other layers, unless such a run could not have been made.
    """
    flash, sharded = task.spec.train.attention == "flash", bool(values.get("use_distributed_optimizer"))
    tensor, experts, stages = (int(values.get(knob) or 1) for knob in (TP, EP, PP))
    split, devices = bool(values.get("sequence_parallel")) and tensor > 1, task.cluster.devices
    whole = experts > 1 and devices % (tensor * experts * stages) and not devices % (experts * stages)
    is_wide, modules = experts > task.cluster.linked_devices, words(settings.get("recompute_modules"))
    is_repeated = values.get("recompute_granularity") == "full" or "moe" in modules
    model, is_whole = task.spec.model, graphs(settings) == WHOLE_STEP
    dispatcher = settings.get("moe_token_dispatcher_type") or ("flex" if is_wide else "alltoall")
    described = f"{model.name} {dispatcher} {settings.get('moe_flex_dispatcher_backend')}"
    run = f"{described} {task.spec.train.precision} PP{stages} EP{experts} {task.cluster.groups[0].chip.name}"
    is_other = is_repeated or any(key.startswith(("cuda_graph", "optimizer", "use_megatron")) for key in settings)
    recipes = _tables()["whole_step"] if is_whole else {} if is_other or not sharded else _tables()["recipes"]
    recipe: dict[str, SettingValue] = next((found for text, found in recipes.items() if re.search(text, run)), {})
    is_latent, depths = latent_layers(model) > 0, model.mtp_num_layers
    can_overlap = min(stages, int(values.get(VIRTUAL_STAGES) or 1)) > 1 and depths < 2 and not is_hybrid(model)
    states = settings.keys() & {"exp_avg_dtype", "main_params_dtype"}
    return {
        **({EXPERT_TENSOR: 1} if whole and EXPERT_TENSOR not in values else {}),
        **narrow_hybrids(task),
        **({"dsa_indexer_loss_coeff": 0.001} if indexer_of(model) else {}),  # `glm5_bridge.py`
        "apply_rope_fusion": is_latent == bool(_YARN[is_latent].search(described)),
        **overlaps(task, kind, settings, sharded=sharded, sequence_parallel=split),
        "moe_token_dispatcher_type": dispatcher,
        "moe_router_fusion": kind != "local" and not _PLAIN_ROUTERS.search(described),
        **({EXPERT_OVERLAP: True} if is_wide and can_overlap and not is_repeated else {}),
        # Megatron-Bridge's mixed precision copies it to the optimizer of a 16-bit job; Megatron's recipes name both
        **({"fp8_recipe": "tensorwise"} if states == {"exp_avg_dtype"} and task.spec.train.precision == "bf16" else {}),
        "cp_comm_type": "p2p",
        **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0 if flash else 0.1),  # older models had some
        **{key: value for key, value in recipe.items() if key not in values},
    }


_YARN = {True: re.compile(r"(?i)deepseek|kimi"), False: re.compile(r"(?i)gpt[-_ ]?oss")}
"""Models with YaRN, by whether they have latent attention. Latent attention has a fused rotary embedding only with YaRN
(megatron-core 0.16 `transformer_config.py`), other attention only without (Megatron-Bridge `utils/fusions.py`)."""

_PLAIN_ROUTERS = re.compile(r"(?i)nemotron(?!.*ultra)|moonlight.*alltoall|olmoe|glm-?4|qwen3-next")
"""Models whose recipes leave the router unfused, as Megatron does by default; some only with one dispatcher. Of
Megatron-Bridge's performance recipes @067f987d, those of most others fuse it, and one of Nemotron-3 Nano and Super."""

_PAIR_PATTERN = re.compile(
    r"(?<![\w-])-{0,2}([a-z][\w-]*)\s*=\s*(\[[^\]]*\]|[^\s;,]+(?:,\w+(?![\w-]*\s*=))*)", re.IGNORECASE
)
_LAYOUT_PATTERN = re.compile(r"(?<![\w-])(\w*layout)\s*=\s*([^\s;]+)", re.IGNORECASE)
_NEGATION_PATTERN = r"(?:no|non|not|without|disabled?)[- _]+"
_OFF_PATTERN = r"[- _]*(?:off|disabled)\b"


@lru_cache(maxsize=4096)
def read_notes(notes: str) -> Mapping[str, SettingValue]:
    """Return the settings that the text `notes` mentions.

    `name = value` takes precedence over phrases. Of several mentions of a setting, the first is used.
    """
    settings: dict[str, SettingValue] = {}
    remaining = notes[:10_000]
    for pattern in (_LAYOUT_PATTERN, _PAIR_PATTERN):
        for pair in pattern.finditer(remaining):
            _add_missing(settings, _parse_pair(pair[1], pair[2]))
        remaining = pattern.sub(";", remaining)
    remaining = remaining.lower()
    for flag in _switch_patterns():
        if match := flag.search(remaining):
            value = "false" if match["no"] or match["off"] else "true"
            _add_missing(settings, setting_from_text(_setting_name(match["name"]), value))
            remaining = remaining[: match.start()] + ";" + remaining[match.end() :]
    for phrase, phrase_settings in _tables()["phrases"].items():
        match = re.search(phrase, remaining)
        if match and not re.search(_NEGATION_PATTERN + "$", remaining[: match.start()]):
            _add_missing(settings, _settings_of_phrase(phrase_settings, match))
    enabled = [name for key, name in _tables()["implied"].items() if settings.get(key, False) is not False]
    _add_missing(settings, dict.fromkeys(enabled, True))
    return settings


@cache
def _tables() -> dict[str, Any]:
    return dict(package_yaml(__package__, "notes.yaml"))


@cache
def _switch_patterns() -> list[re.Pattern[str]]:
    """Return patterns that match the names of switches, in descending order of their length."""
    switches = [knob.name for knob in SETTINGS if knob.kind == "flag"]
    aliases = [name for name, key in _tables()["names"].items() if key in switches]
    return [
        re.compile(
            rf"(?<![\w-])(?:--)?(?P<no>{_NEGATION_PATTERN})?"
            rf"(?P<name>{name.replace('_', '[- _]')})(?![\w=])(?P<off>{_OFF_PATTERN})?"
        )
        for name in sorted((*switches, *aliases), key=len, reverse=True)
    ]


def _add_missing(settings: dict[str, SettingValue], new: Mapping[str, SettingValue]) -> None:
    settings.update({key: value for key, value in new.items() if key not in settings})


def _parse_pair(name: str, text: str) -> Mapping[str, SettingValue]:
    key, value = _setting_name(name), re.sub(r"""[\[\]'"()]""", "", text).strip()
    if key == LAYOUT:
        return {LAYOUT: text}
    implied: Mapping[str, SettingValue] | None = _tables()["values"].get(key, {}).get(value.lower())
    if implied is not None:
        return implied
    if key == "use_megatron_fsdp" and value.isdecimal():
        return {key: int(value) > 1}
    return setting_from_text(key, value) or setting_from_text(key, value.lower())


def _settings_of_phrase(phrase_settings: Mapping[str, SettingValue], match: re.Match[str]) -> dict[str, SettingValue]:
    """Return the settings that a phrase stands for. `{1}` is replaced by the match's first group; invalid values are
    skipped."""
    settings: dict[str, SettingValue] = {}
    for key, value in phrase_settings.items():
        if value != "{1}":
            settings[key] = value
        elif match[1]:
            settings |= setting_from_text(key, re.sub(r" *[+,] *", ",", match[1]))
    return settings


def _setting_name(name: str) -> str:
    plain = re.sub(r"[- ]+", "_", name.strip("-").lower())
    return str(_tables()["names"].get(plain, plain))
