"""Weight sizes, checks of a Hugging Face directory, and the minimum number of devices for a model."""

import glob
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from flagcore_importers.programs import strip_dashes
from flagcore_models.formats import (
    HEAD,
    IGNORED,
    MTP,
    Share,
    block_sizes,
    config_of,
    format_of_weights,
    quantization_of,
    rules_of,
    shares,
)
from flagcore_models.gguf import context_length
from flagcore_models.keys import context_of, is_mxfp4
from flagcore_models.layers import attention_counts, latent_layers, mixer_counts, weights_by_group
from flagcore_models.mixers.attention import Attention
from flagcore_models.parts.tower import VisionTower
from flagcore_models.public import GGUF_BITS, PUBLISHERS, find_public

from flagcore.domain.model import Model
from flagcore.domain.spec import Spec, Task
from flagcore.errors import FlagError, SpecError
from flagcore.physics.roofline import BYTES
from flagcore_serving.job import QUANTIZERS
from flagcore_serving.space.hardware import Hardware

WIDE_PRECISIONS = ("bf16", "fp16", "fp32")
_CONFIG = "config.json"


def check_directory(spec: Spec) -> None:
    """Raise SpecError unless the weights are a directory with a config.json and agree with the spec's precision.

    A quantized precision needs quantized weights, or flags that quantize them: others are served as they are stored.
    """
    weights, precision = spec.serve.weights, spec.serve.precision
    if weights is None or not os.path.isfile(os.path.join(weights, _CONFIG)):
        fix = "set the path of a Hugging Face directory; nothing is downloaded"
        raise unusable_weights(spec, f"is not a directory with a {_CONFIG}", fix)
    if not (precision in WIDE_PRECISIONS or quantizes(spec) or is_quantized(weights)):
        problem = f"is not the precision of {weights}, and serve.engine_args do not quantize it"
        fix = "set engine_args: {quantization: ...}, or the precision of the weights"
        raise SpecError(key="serve.precision", value=precision, problem=problem, fix=fix)


STORED_FORMATS = ("awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "moe_wna16", "auto-round")
"""Values of `quantization` with which engines read stored weights and convert none. Source: `get_config_filenames` of
the formats in vLLM 0.32 and SGLang 0.5.23: their settings come from a file beside the weights."""


def check_formats(spec: Spec) -> None:
    """Raise SpecError for a quantization in STORED_FORMATS if the weights are known and not quantized."""
    weights = spec.serve.weights
    if weights is None or not (os.path.exists(weights) or find_public(weights)) or is_quantized(weights):
        return
    listed = spec.space.get("quantization", ())
    values: dict[str, object] = {f"auto_tuner.space.quantization[{at}]": value for at, value in enumerate(listed)}
    values["auto_tuner.baseline.quantization"] = (spec.baseline or {}).get("quantization")
    args = spec.serve.engine_args.items()
    values |= {f"serve.engine_args.{key}": value for key, value in args if strip_dashes(key) in ("q", "quantization")}
    if key := next((key for key, value in values.items() if value in STORED_FORMATS), None):
        problem = f"needs weights that are stored in it, but {weights} is not quantized"
        raise SpecError(key=key, value=values[key], problem=problem, fix="use weights that are, or fp8")


def unusable_weights(spec: Spec, problem: str, fix: str) -> SpecError:
    """Return an error about the weights, with the key that gives them."""
    weights = spec.serve.weights
    key = "model" if weights == spec.model.name else "serve.weights"
    return SpecError(key=key, value=weights, problem="is missing" if weights is None else problem, fix=fix)


def quantizes(spec: Spec) -> bool:
    """Return whether flags make the engine quantize the weights."""
    return not QUANTIZERS.isdisjoint(map(strip_dashes, (*spec.serve.engine_args, *(spec.baseline or {}))))


_LONGER = ("hf-overrides", "rope-scaling", "rope-scale", "override-kv", "json-model-override-args")
"""Flags that may extend the context of a model."""
_ALLOWED = ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
"""Environment variables that disable the engines' own check of the context."""


def context_limit(spec: Spec, *, scales_yarn: bool = True) -> int | None:
    """Return the maximum context length of the weights' model in tokens.

    None if it is unknown, or if flags or environment variables may extend it. `scales_yarn`: see `context_of`. Source:
    `_get_and_verify_max_len` in vLLM 0.32 `config/model.py`.
    """
    weights = spec.serve.weights
    names = {strip_dashes(key) for key in spec.serve.engine_args}
    if weights is None or names & set(_LONGER) or any(name in spec.envs for name in _ALLOWED):
        return None
    return context_at(weights, scales_yarn=scales_yarn)


def context_at(weights: str, *, scales_yarn: bool = True) -> int | None:
    """Return the context length of the model at a path or with a public name in tokens, or None if it is unknown."""
    if os.path.isfile(weights) and not weights.endswith(".json"):
        try:
            return context_length(weights)
        except FlagError:
            return None
    public = None if os.path.exists(weights) else find_public(weights)
    return context_of(public[0] if public else _config(weights), scales_yarn=scales_yarn)


def _config(weights: str) -> dict[str, Any]:
    """Return the contents of a config.json, given its path or its directory. Empty if it cannot be read."""
    with suppress(SpecError):
        return config_of(Path(weights))
    return {}


def _names_quantization(weights: str) -> bool:
    files = glob.iglob(os.path.join(glob.escape(weights), "*quant*_config.json"))
    return bool(quantization_of(_config(weights))) or any(files)


def is_quantized(weights: str) -> bool:
    """Return whether a GGUF file, a directory or a public model has quantized weights. Any GGUF file counts."""
    if public := None if os.path.exists(weights) else find_public(weights):
        return public[1] is not None
    return (os.path.isfile(weights) and not weights.endswith(".json")) or _names_quantization(weights)


def has_unknown_format(weights: str) -> bool:
    """Return whether weights are quantized to a format that flagcore does not know."""
    return _names_quantization(weights) and format_of_weights(_config(weights)) is None


ATTENTION, DENSE, SHARED, EXPERTS = "attention", "dense", "shared experts", "experts"
_FOUR_BITS = ("nvfp4", "mxfp4")
"""Formats that checkpoints with experts have for the experts, but, without a list, not for attention (nvidia's, and
amd's: sgl-project/sglang pull request 21529, huggingface.co/amd/Qwen3.5-397B-A17B-MoE-MXFP4)."""
_GROUP = 128
"""The usual group of weights of 4 bits that share a scale (AutoAWQ and GPTQModel's default)."""


class Quantization(NamedTuple):
    """How a checkpoint stores its quantized weights.

    - `block`: the columns or rows that share a scale, of which a shard must be a multiple; 1 if any shard loads.
    - `bytes`: bytes per quantized weight with its scales. None means those of its format.
    - `wide`: the parts of the model that are stored in 16 bits.
    - `parts`: the format of the parts with one of their own, and its bytes per weight if they are not those of the
      format: groups of `Product`, and the output head, which others store in 16 bits.
    - `others`: the format of the other weights; empty if it is the precision of the spec.
    - `weights_only`: whether activations keep 16 bits, so that all but attention is multiplied in 16 bits.
    """

    block: int = 1
    bytes: float | None = None
    wide: frozenset[str] = frozenset()
    parts: Mapping[str, tuple[str, float | None]] = MappingProxyType({})
    others: str = ""
    weights_only: bool = False


def quantization(spec: Spec) -> Quantization | None:
    """Return how the weights of a spec are quantized, or None if they are not, or if that is unknown.

    Sources: the formats' `quantization_config`, and what vLLM 0.33 and SGLang 0.5.23 require of shards
    (`validate_fp8_block_shape`, `check_marlin_supports_layer`). DeepSeek-V4 has `expert_dtype: fp4` for routed experts
    of 4 bits with a scale per 32 weights beside FP8 (vLLM `models/deepseek_v4`), which the precision mxfp4 means, too.
    Attention beside experts in 4 bits has 4 bits, too, if a list does not leave it out, as of nvidia's Qwen3 and amd's
    DeepSeek-R1; nvidia's lists of latent attention leave out parts.
    """
    weights, precision = spec.serve.weights, spec.serve.precision
    if weights is not None and os.path.isfile(weights) and not weights.endswith(".json"):
        return None
    public = _named(spec) if weights is None else None if os.path.exists(weights) else find_public(weights)
    config = public[0] if public else _config(weights) if weights else {}
    has_wide_attention = precision in _FOUR_BITS and spec.model.num_moe_experts is not None
    if not (found := quantization_of(config)):
        block = _GROUP if weights and public and public[1] == "int4" else 1
        wide = frozenset({ATTENTION} if has_wide_attention else ())
        return Quantization(block, wide=wide) if wide or block > 1 else None
    sizes, name = block_sizes(found), format_of_weights(config)
    listed, rules = shares(spec.model, found, precision), rules_of(found)
    is_own = public is None or public[1] == precision
    wide = frozenset(group for group, each in listed.items() if each == (None, 2.0) and group != HEAD)
    is_int4 = name == "int4" and not is_mxfp4(config)
    size = 0.5 + 2.0 / sizes[0] if is_int4 and sizes and sizes[0] != _GROUP else None
    parts = _own_formats(listed, (name or precision, size)) if is_own else {}
    is_latent = public is not None and precision == "nvfp4" and latent_layers(spec.model)
    stored = public[1] if public else name
    has_list = rules.patterns or any(isinstance(found.get(key), list) for key in IGNORED)
    if has_list and stored == precision in _FOUR_BITS and not is_latent and ATTENTION not in wide:
        parts.setdefault(ATTENTION, (precision, None))
    for key, part in (("attention_dtype", ATTENTION), ("head_dtype", HEAD)):
        if is_own and key in found:
            parts[part], wide = (str(found[key]), None), wide - {part}
    if has_fp4_experts := "fp4" in (config.get("expert_dtype"), found.get("expert_dtype")) and (
        precision == "mxfp4" or (name == precision and weights is not None)
    ):
        parts[EXPERTS] = "mxfp4", None
    if has_wide_attention and not (ATTENTION in parts or has_fp4_experts):
        wide |= {ATTENTION}
    return Quantization(
        block=max(sizes, default=1) if weights else 1,
        bytes=size,
        wide=wide,
        parts=parts,
        others=str(name) if has_fp4_experts and name != precision else "",
        weights_only=is_own and any(each and each.only for each in (rules.base, *(each for _, each in rules.patterns))),
    )


def _own_formats(listed: Mapping[str, Share], usual: tuple[str, float | None]) -> dict[str, tuple[str, float | None]]:
    """Return the formats of parts that have another one than the `usual` one, or another number of bytes."""
    known, found = {**BYTES, **STORED_BYTES}, dict[str, tuple[str, float | None]]()
    for group, (stored, size) in listed.items():
        form = stored.format if stored else "bf16"
        found[group] = form, None if size == known.get(form) else size
        if group == MTP or size == 2.0 or (found[group] == usual and group != HEAD):
            del found[group]
    return found


def _named(spec: Spec) -> tuple[dict[str, Any], str | None] | None:
    """Return the config.json and the format of the public checkpoint that a job without weights names by its model and
    its precision: the model's own, or that of the usual publisher of this precision. None if there is none."""
    name, precision = spec.model.name or "", spec.serve.precision
    publisher = PUBLISHERS.get(precision, "")
    for each in (name, f"{publisher}/{name.rpartition('/')[2]}-{precision}"):
        found = find_public(each) if name else None
        if found and (precision == found[1] or (precision == "mxfp4" and "fp4" in str(found[0].get("expert_dtype")))):
            return found
    return None


MAX_WEIGHT_SHARE = 0.85
"""Default maximum share of a device's memory for weights. The rest is for activations, graphs and cache."""


STORED_BYTES = {name: bits / 8.0 for name, bits in GGUF_BITS.items()}
STORED_BYTES |= {"mxfp4": 17 / 32, "int4": 0.53, "awq": 0.53, "gptq": 0.53, "w4a16": 0.53}
"""Bytes per stored weight in formats that are converted for compute: GGUF formats, which store blocks, and 4-bit
formats with one scale per 32 (mxfp4) or 128 weights."""


def weight_bytes(task: Task) -> float:
    """Return the size of a task's weights in bytes.

    If the spec names a file, this is the file size. Otherwise it is the number of weights times the bytes per weight,
    plus a vision tower in 16 bits.
    """
    weights = task.spec.serve.weights
    if weights is not None and os.path.isfile(weights):
        return float(os.path.getsize(weights))
    found, vision = quantization(task.spec), task.spec.model.vision
    stored = found or Quantization()
    precision, formats = stored.others or task.spec.serve.precision, {**BYTES, **STORED_BYTES}
    width = stored.bytes or formats.get(precision, 2.0)
    widths = dict.fromkeys({"", *stored.wide}, 2.0) if found else {}
    widths |= {part: size or formats.get(form, 2.0) for part, (form, size) in stored.parts.items()}
    model, saved = task.spec.model, 0.0
    if HEAD in stored.parts and model.untie_embeddings_and_output_weights:
        saved = (2.0 - widths[HEAD]) * model.vocab_size * model.hidden_size
    text = sum(number * widths.get(group, width) for group, number in weights_by_group(task.spec.model).items())
    return text - saved + (2.0 * VisionTower(vision=vision).weights if vision else 0.0)


def cache_bytes_per_token(model: Model, element_bytes: float, tokens: float = 1.0, computed: float = 0.0) -> float:
    """Return the KV cache bytes per token in sequences of `tokens` tokens, in total over all devices.

    Replication is not included. `computed`: prompt tokens of one iteration, which sliding windows hold in addition.
    """
    total = 0.0
    for mixer, number in mixer_counts(model).items():
        size = mixer.token_bytes(element_bytes)
        if isinstance(mixer, Attention):
            size = float(mixer.cached(tokens, computed) * (mixer.cached_on(1.0) * element_bytes + mixer.index_bytes))
        total += number * size
    return total


def cached_heads(model: Model) -> int:
    """Return the number of heads of cached keys. More tensor ranks than these have copies of the cache."""
    return max((each.cached_heads for each in attention_counts(model)), default=1)


def min_devices(task: Task) -> int:
    """Return the minimum number of devices (a power of two) that hold the weights, or 1 if their memory is unknown.

    The result does not exceed the number of devices, and divides the number of attention heads.
    """
    hardware, heads = Hardware.of(task), math.gcd(*(each.heads for each in attention_counts(task.spec.model)))
    if hardware.on_cores or math.isnan(hardware.memory_bytes):
        return 1
    devices, weights = 1, weight_bytes(task)
    while weights > MAX_WEIGHT_SHARE * hardware.memory_bytes * devices and devices * 2 <= hardware.cards:
        if heads % (devices * 2):
            break
        devices *= 2
    return devices
