"""Megatron's arguments by name, from a command or another tool's file, and what they mean for a spec.

They determine a baseline, the options of the job, and the shape of the model with Megatron's defaults.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from flagcore_training.adapters import adapter_section
from flagcore_training.knobs import note_effects

from flagcore.errors import join_errors
from flagcore.spec.plain_data import Notes, package_yaml
from flagcore_megatron.program.user_command import is_on, knows, not_predicted
from flagcore_megatron.space.split import SPLIT
from flagcore_megatron.space.stages import PATTERN, check_symbols

TABLES: Any = package_yaml(__package__, "arguments.yaml")


class Flags:
    """Megatron's arguments by name: the last part of a key, with underscores. If a name is repeated, the last is used.

    `entries` are full keys and values. Nulls and empty mappings count as missing. `usual_key` is the key to report for
    a missing argument; it contains `{name}` or `{flag}`.
    """

    def __init__(self, source: Notes, entries: Iterable[tuple[str, Any]], usual_key: str = "--{flag}") -> None:
        self.source, self._usual_key = source, usual_key
        self.given: dict[str, tuple[str, Any]] = {}
        """The key and the value of each flag."""
        self.empty: list[str] = []
        """Keys with nulls and empty mappings."""
        self.asked: set[str] = set()
        """Names of flags that were asked for."""
        for key, value in entries:
            if value is None or value == {}:
                self.empty.append(key)
                continue
            if previous := self.given.get(name := flag_name(key)):
                source.note(previous[0], f"dropped ({previous[1]}): {key} comes later")
            self.given[name] = (key, value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a flag, or `default` if it is missing."""
        self.asked.add(name)
        return self.given.get(name, ("", default))[1]

    def has(self, name: str) -> bool:
        """Return whether the arguments contain a flag."""
        return name in self.given

    def key(self, name: str) -> str:
        """Return the full key of a flag, or `usual_key` for a missing flag."""
        usual_key = self._usual_key.format(name=name, flag=name.replace("_", "-"))
        return self.given.get(name, (usual_key, None))[0]

    def note(self, name: str, text: str, at: str = "") -> None:
        """Add an import note about a flag."""
        self.source.note(self.key(name), text, at)


def flag_name(key: str) -> str:
    """Return the name of the flag for a key: the last part of the key, with underscores."""
    return key.rpartition(".")[2].lstrip("-").replace("-", "_")


SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
)
"""The parallel sizes, in the order in which a baseline lists them."""
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def baseline_of(flags: Flags, model: Mapping[str, Any], *, on_meshes: bool = False) -> dict[str, Any]:
    """Return the knobs in Megatron's arguments as a baseline. Missing knobs are off or 1.

    `model`: the section of a spec. With `on_meshes`, the sizes are those of meshes, not of the whole job.
    """
    baseline = {key: value for key in SIZES if (value := flags.get(key)) not in (None, 0)}
    if per_stage := _layers_of_virtual_stages(flags, baseline.get("pipeline_model_parallel_size", 1)):
        baseline["num_layers_per_virtual_pipeline_stage"] = per_stage
    if not has_experts(model) and (experts := baseline.pop("expert_model_parallel_size", None)) is not None:
        flags.note(
            "expert_model_parallel_size", f"dropped ({experts}): the model has no experts", "auto_tuner.baseline"
        )
    baseline["micro_batch_size"] = flags.get("micro_batch_size", 1)
    baseline["use_distributed_optimizer"] = bool(flags.get("use_distributed_optimizer"))
    if sequence := flags.get("sequence_parallel"):
        if baseline.get("tensor_model_parallel_size", 1) == 1 and not on_meshes:
            flags.note("sequence_parallel", "off in the baseline: it needs tensor parallelism", "auto_tuner.baseline")
        else:
            baseline["sequence_parallel"] = True
    elif sequence is not None:
        baseline["sequence_parallel"] = False
    baseline |= _recompute(flags)
    return baseline


def has_experts(model: Mapping[str, Any]) -> bool:
    """Return whether the section `model` of a spec has layers with experts."""
    return bool(model.get("num_moe_experts"))


def _layers_of_virtual_stages(flags: Flags, stages: object) -> int:
    """Return the number of layers per virtual stage if the arguments give the number of virtual stages; else 0."""
    virtual, layers = flags.get("num_virtual_stages_per_pipeline_rank"), flags.get("num_layers")
    if type(virtual) is not int or type(layers) is not int or type(stages) is not int or virtual < 1 or stages < 1:
        return 0
    return 0 if layers % (virtual * stages) else layers // (virtual * stages)


def _recompute(flags: Flags) -> dict[str, Any]:
    """Return the recompute knobs. Block recompute of 0 layers is off.

    `recompute_activations` means selective, as in Megatron-LM core_v0.15 `validate_args` (training/arguments.py).
    """
    knobs = {name: value for name in RECOMPUTE if (value := flags.get(name)) is not None}
    if flags.get("recompute_activations"):
        knobs = {**knobs, RECOMPUTE[0]: "selective"}
    if flags.get("checkpoint_activations"):  # the name of old releases
        knobs = {RECOMPUTE[0]: "full", RECOMPUTE[1]: "uniform", RECOMPUTE[2]: 1, **knobs}
    if RECOMPUTE[0] not in knobs:
        return {"use_recompute": False}
    if knobs[RECOMPUTE[0]] == "full":
        knobs.setdefault(RECOMPUTE[2], 1)  # the default of old releases; others require it
    if knobs.get("recompute_num_layers") == 0:
        if knobs.get("recompute_method") == "block":
            flags.note("recompute_num_layers", "0: nothing is recomputed", "auto_tuner.baseline")
            return {"use_recompute": False}
        flags.note("recompute_num_layers", "dropped (0): it must be at least 1", "auto_tuner.baseline")
        del knobs["recompute_num_layers"]
    return {"use_recompute": True, **knobs}


def baseline_problem(baseline: dict[str, Any], train: dict[str, Any], model: dict[str, Any], devices: int) -> str:
    """Return why the parallel sizes of a job do not fit its devices, batch or layers, or an empty string."""
    tensor, stages, context, expert_size = sizes = [baseline.get(key, 1) for key in SIZES[:4]]
    shape = (model["num_layers"], model["num_attention_heads"])
    numbers = (*sizes, baseline["micro_batch_size"], train["global_batch_size"], *shape)
    if not all(type(each) is int and each > 0 for each in numbers):
        return ""  # the rules of the spec report such values
    if not devices or devices % (tensor * stages * context):
        return f"TP {tensor} x PP {stages} x CP {context} does not divide {devices} devices"
    if model["num_attention_heads"] % tensor:
        return f"TP {tensor} does not divide {model['num_attention_heads']} attention heads"
    experts = model.get("num_moe_experts")
    if type(experts) is int and experts % expert_size:
        return f"EP {expert_size} does not divide {experts} experts"
    if devices % (expert_size * stages):
        return f"EP {expert_size} x PP {stages} does not divide {devices} devices"
    samples = devices // (tensor * stages * context) * baseline["micro_batch_size"]
    if train["global_batch_size"] % samples:
        return f"{samples} samples at once do not divide a global batch of {train['global_batch_size']}"
    settings = train.get("settings", {})
    has_split = any(map(re.compile("num_layers_in_|account_for_|.*layout").match, settings))
    has_split |= "|" in str(settings.get(PATTERN)) or bool(baseline.get(SPLIT))
    if model["num_layers"] % stages and not has_split:
        return f"{model['num_layers']} layers cannot be split evenly over {stages} stages"
    return ""


def options(flags: Flags, *, on_meshes: bool = False) -> dict[str, Any]:
    """Return the keys of `train` that a spec needs in addition to the command.

    With `on_meshes`, each mesh has its own recompute.
    """
    result: dict[str, Any] = {"precision": _precision(flags)}
    has_flash, backend = flags.get("use_flash_attn", flags.get("use_flash_attention")), flags.get("attention_backend")
    if backend in ("unfused", "local") or (has_flash is False and flags.get("transformer_impl") == "local"):
        result["attention"] = "unfused"
    elif backend in ("flash", "fused") or (backend is None and has_flash):
        result["attention"] = "flash"
    for key in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if isinstance(layers := flags.get(key), int) and layers < 1:  # megatron-core 0.16 `transformer_config.py`
            flags.source.report(flags.key(key), "must be larger than 0", value=layers, fix="leave it out")
        elif layers is not None:
            flags.note(key, f"{layers} applies to all candidates: only pipelines that it fits are tried", "train")
    _note_unread(flags, on_meshes=on_meshes)
    dropouts = dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.1)  # Megatron's defaults
    settings: dict[str, Any] = {name: value for name, value in dropouts.items() if not flags.has(name)}
    kind, rank = flags.get("peft_type"), flags.get("lora_r", flags.get("lora_dim"))
    if kind is not None or rank is not None:
        result["adapter"] = adapter_section(str(kind), rank, flags.get("lora_target_modules"))
    return {**result, **({"settings": settings} if settings else {})}


def _note_unread(flags: Flags, *, on_meshes: bool) -> None:
    """Add notes on the flags that predictions do not include: their effects, and those that no table knows."""
    others = "_per_stage_micro_batch" if on_meshes else "\0"
    given = {name.replace("_", "-"): each for name, each in flags.given.items() if not name.endswith(others)}
    note_effects(not_predicted(given), flags.source)
    off = [key for name, (key, value) in given.items() if not is_on(name, value)]
    for key in (*off, *flags.empty):  # others are among the effects
        if (name := flag_name(key)) not in flags.asked and not knows(name):
            flags.source.note(key, "unknown to flagcore: not in the predictions", "train")


def _precision(flags: Flags) -> str:
    precision = "fp32"
    for name in ("fp16", "bf16"):
        value = flags.get(name)
        if not isinstance(value, (bool, type(None))):
            flags.source.report(flags.key(name), "must be true or false", value=value)
        precision = name if value else precision
    if flags.get("fp4", flags.get("fp4_format")):
        return "mxfp4" if flags.get("fp4_recipe") == "mxfp4" else "nvfp4"
    fp8_format, recipe = flags.get("fp8", flags.get("fp8_format")), flags.get("fp8_recipe")
    if not fp8_format:
        return precision
    if recipe not in (None, "mxfp8"):
        flags.note("fp8_recipe", f"{recipe}: the times of all recipes but mxfp8 are predicted alike", "train.precision")
    return "mxfp8" if recipe == "mxfp8" else "fp8"


_MISSING = "give it, or the arguments that the script needs, as in `flag import -- bash FILE ARGUMENT`"
_PATTERN_TERM = re.compile(r"(?:(\d{1,4}) *\* *)?\[([01, ]*)\](?: *\* *(\d{1,4}))?")
"""A term of a pattern of layers, such as [0]*3 in ([0]*3+[1]*58)."""
_REPEATED = re.compile(r"\(([^()]*)\) *\* *(\d{1,4})")


def shape(flags: Flags, vocabulary: object) -> dict[str, Any]:
    """Return the section `model` of a spec from Megatron's arguments.

    Raises SpecError for a missing size or an unsupported pattern of layers.
    """
    section: dict[str, Any] = {key: value for key in TABLES["model"] if (value := flags.get(key)) is not None}
    if letters := pattern_of(flags)[0]:
        section["num_layers"] = len(letters)
    problems = []
    if not {"num_layers", "hidden_size", "num_attention_heads"} & section.keys():
        problem, fix = "are not in the command: it reads them from a checkpoint, or is another program", "give --model"
        raise flags.source.error("--num-layers, --hidden-size and --num-attention-heads", problem, fix=fix)
    for key in ("num_layers", "hidden_size", "num_attention_heads"):
        if key not in section:
            problems.append(flags.source.error(flags.key(key), "is missing", fix=_MISSING))
        elif not isinstance(section[key], int):
            problems.append(flags.source.error(flags.key(key), "must be a number", value=section[key]))
    if problems:
        raise join_errors(problems)
    section["vocab_size"] = vocabulary
    is_gated = bool(flags.get("swiglu") or flags.get("quick_geglu"))
    section["gated_linear_unit"] = is_gated
    section["ffn_hidden_size"] = _width(flags, section["hidden_size"], is_gated)
    section["untie_embeddings_and_output_weights"] = bool(flags.get("untie_embeddings_and_output_weights"))
    section |= _attention(flags) | _experts(flags, section["num_layers"])
    return section


PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Arguments with a letter for each layer, the first of which is that of newer releases."""


def pattern_of(flags: Flags) -> tuple[str, int]:
    """Return the letters of a hybrid model's layers, and its depths of multi-token prediction. Others have none.

    A slash begins each depth, and bars are the borders of pipeline stages (megatron-core 0.20
    @d98e8a64 `hybrid_layer_allocation.py`).
    """
    name = next((name for name in PATTERNS if isinstance(flags.get(name), str)), "")
    text = check_symbols(flags.get(name, ""), flags.key(name)) if name else ""
    letters, *depths = text.split("/")
    return letters.replace("|", ""), len(depths)


def with_layers(flags: Flags, section: dict[str, Any], others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the section `model` for a model with parts that a shape cannot describe: keys of a config.json.

    `others`: keys of parts other than the layers. Other models keep their shape `section`.
    """
    (letters, depths), window = pattern_of(flags), flags.get("window_size")
    keys: dict[str, Any] = {**(others or {}), **({"hybrid_override_pattern": letters} if letters else {})}
    section = {**section, "mtp_num_layers": depths} if depths else section
    keys |= _mixers(flags, section, letters)
    if window is not None:
        size = re.match(r"\D*(\d+)", str(window))
        keys["sliding_window"] = int(size[1]) if size else None
        frequency = flags.get("window_attn_skip_freq", 1)
        keys["layer_types"] = _alternating(frequency, section["num_layers"], "sliding_attention")
    keys |= {key: value for key in ("moe_latent_size", "attention_output_gate") if (value := flags.get(key))}
    if not keys:
        return section
    untied, names = section.get("untie_embeddings_and_output_weights"), TABLES["config_keys"]
    plain = {names.get(key, key): value for key, value in section.items() if value is not None}
    for key in ("untie_embeddings_and_output_weights", "multi_latent_attention"):
        plain.pop(key, None)
    return {"model_type": "hybrid", **plain, "tie_word_embeddings": not untied, **keys}


def _mixers(flags: Flags, section: Mapping[str, Any], letters: str) -> dict[str, Any]:
    """Return the keys of layers with state spaces, linear attention or sparse attention."""
    variant, keys = str(flags.get("experimental_attention_variant") or ""), dict[str, Any]()
    if "M" in letters:
        keys |= _sizes(flags, "mamba")
        keys["mamba_num_heads"] = keys["mamba_num_heads"] or 2 * section["hidden_size"] // keys["mamba_head_dim"]
    if variant == "gdn2":
        flags.note("experimental_attention_variant", "gdn2 is predicted as gdn", "model")
    if variant in ("gdn", "gdn2", "gated_delta_net") or "G" in letters:
        keys |= _sizes(flags, "linear")
        if not letters:
            frequency = flags.get("linear_attention_freq")
            keys["layer_types"] = _alternating(frequency, section["num_layers"], "linear_attention")
    if variant == "dsa" or "D" in letters:
        keys |= _sizes(flags, "sparse")
    return keys


def _sizes(flags: Flags, table: str) -> dict[str, Any]:
    return {key: flags.get(name, default) for name, (key, default) in TABLES[table].items()}


def _alternating(frequency: object, layers: int, kind: str) -> list[str]:
    """Return the kind of each layer: `full_attention`, or `kind`.

    A frequency N means full attention in each N-th layer, and in none if it is 1; a list has 1 for each layer of
    `kind`.
    """
    if isinstance(frequency, int) or str(frequency).strip().isdecimal():
        number = int(str(frequency))
        is_own = [number <= 1 or (layer + 1) % number != 0 for layer in range(layers)]
    else:
        is_own = [bool(int(each)) for each in _pattern(frequency, layers)] or [True] * layers
    return [kind if each else "full_attention" for each in is_own]


def _attention(flags: Flags) -> dict[str, Any]:
    """Return the keys of `model` for attention: query groups, QKV bias, and the sizes of latent attention."""
    section: dict[str, Any] = {}
    groups, is_grouped = flags.get("num_query_groups"), flags.get("group_query_attention")
    is_latent = bool(flags.get("multi_latent_attention"))
    if is_grouped and is_latent:
        flags.note("group_query_attention", f"not used ({is_grouped}): latent attention has no query groups", "model")
    elif is_grouped:
        section["num_query_groups"] = groups or 1
    if groups is not None and (is_latent or not is_grouped):
        flags.note("num_query_groups", "not used: without group_query_attention, every head has its own keys", "model")
    if _has_biases(flags) and not is_latent:
        section["add_qkv_bias"] = True
    elif flags.get("add_qkv_bias"):
        flags.note("add_qkv_bias", "not in the predictions: latent attention has no such biases", "model")
    if is_latent:
        section["multi_latent_attention"] = True
        section |= {key: size for key, own in TABLES["latent"].items() if (size := flags.get(key, own)) is not None}
    return section


def _has_biases(flags: Flags) -> bool:
    """Return whether queries, keys and values have biases."""
    text = "linear layers have no biases except those of add_qkv_bias"
    if has_all := not flags.get("disable_bias_linear") and flags.get("add_bias_linear", True):
        text = "is not set: linear layers have biases; flagcore models only those of queries, keys and values"
    flags.note("disable_bias_linear", text, "model")
    return bool(has_all or flags.get("add_qkv_bias"))


def _width(flags: Flags, hidden: int, gated: bool) -> Any:
    """Return the width of the feed-forward network. If it is missing, the default of FlagScale's Megatron is used."""
    if (width := flags.get("ffn_hidden_size")) is not None:
        return width
    if not gated:
        return 4 * hidden
    multiple, factor = flags.get("multiple_of"), flags.get("hidden_dim_multiplier")
    numbers = [each for each in (multiple, factor) if each is not None]
    if any(isinstance(each, (bool, str, list)) or each <= 0 for each in numbers):
        value = {"multiple_of": multiple, "hidden_dim_multiplier": factor}
        flags.source.report(flags.key("multiple_of"), "must be a positive number", value=value)
        return None
    if multiple is None:
        return int(4 * hidden * 2 / 3 / 64) * 64
    return math.ceil(int(int(4 * hidden * 2 / 3) * (factor or 1)) / multiple) * multiple


def _experts(flags: Flags, layers: int) -> dict[str, Any]:
    experts, frequency = flags.get("num_experts", flags.get("num_moe_experts")), flags.get("moe_layer_freq", 1)
    if experts is None:
        return {}
    sizes = {key: value for key in TABLES["experts"] if (value := flags.get(key)) is not None}
    if (shared := flags.get("n_shared_experts")) and (width := sizes.get("moe_ffn_hidden_size")):
        sizes.setdefault("moe_shared_expert_intermediate_size", shared * width)
    section = {"num_moe_experts": experts, "moe_router_topk": 2, **sizes}
    pattern = _pattern(frequency, layers)
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    if (first := flags.get("first_k_dense_replace") or 0) > 0 and dense == 0:
        dense = min(first, layers)
        pattern = [0] * dense + pattern[dense:]
    if pattern != [0] * dense + [1] * (layers - dense) or dense >= layers:
        key, problem = flags.key("moe_layer_freq"), "must be dense layers first, then MoE layers"
        flags.source.report(key, problem, value=frequency, fix="use e.g. [0]+[1]*26")
    return {**section, "moe_first_dense_layers": dense} if dense else section


def _pattern(frequency: object, layers: int) -> list[Any]:
    """Return a list with 1 for each MoE layer and 0 for each other layer, like Megatron's `moe_freq_type`.

    It is empty if `frequency` is invalid.
    """
    text = str(frequency).strip()
    if outer := _REPEATED.fullmatch(text):
        return _pattern(outer[1], layers) * min(int(outer[2]), 9999)
    if text.removeprefix("-").isdecimal() and int(text):
        return [0 if layer % int(text) else 1 for layer in range(layers)]
    if not text or _PATTERN_TERM.sub("", text).strip("()+ "):
        return []
    layer_kinds: list[Any] = []
    for factor, digits, repeats in _PATTERN_TERM.findall(text):
        count = min(int(factor or 1) * int(repeats or 1), 9999)
        layer_kinds += [int(digit) for digit in re.findall("[01]", digits)] * count
    return layer_kinds
