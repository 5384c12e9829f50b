"""The number format of quantized weights, from the keys of a Hugging Face config.json."""

import re
from collections.abc import Mapping
from typing import Any

from flagcore.domain.model import Model
from flagcore_models.keys import section_of


def format_of_weights(config: Mapping[str, Any]) -> str | None:
    """Return the number format of quantized weights, or None if they are not quantized or the format is unknown.

    Weights of 4 bits that are converted before computing, including mxfp4 of transformers (17/32 bytes), are reported
    as int4. Reads the keys of transformers (AWQ, GPTQ, bitsandbytes, mxfp4, fp8), compressed-tensors (`config_groups`;
    mxfp4 has one scale for 32 weights, vLLM 0.33 `_is_mxfp4`), ModelOpt, and Quark (vLLM 0.32 `quantization/quark`)
    but for its mxfp4.
    """
    found = section_of(config, "quantization_config") or section_of(
        section_of(config, "text_config"), "quantization_config"
    )
    group = next(iter(section_of(found, "config_groups").values()), None)
    weights = section_of({"group": group}, "group").get("weights")
    if not found:
        return None
    if not isinstance(weights, Mapping):
        method, algorithm, bits = (found.get(key) for key in ("quant_method", "quant_algo", "bits"))
        if bits == 4 or method == "mxfp4" or found.get("load_in_4bit") is True:
            return "int4"
        if bits == 8 or found.get("load_in_8bit") is True:
            return "int8"
        if method in ("fp8", "fbgemm_fp8") or algorithm == "FP8":
            return "fp8"
        if method == "quark":
            kind = section_of(section_of(found, "global_quant_config"), "weight").get("dtype")
            return {"fp8_e4m3": "fp8", "int8": "int8", "int4": "int4", "uint4": "int4"}.get(str(kind))
        return "nvfp4" if algorithm == "NVFP4" else None
    kind = "fp" if weights.get("type") == "float" else "int"
    name = f"{kind}{weights.get('num_bits')}"
    four = "mxfp4" if weights.get("group_size") == 32 else "nvfp4"
    return {"fp4": four, "fp8": "fp8", "int8": "int8", "int4": "int4"}.get(name)


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Return whether a Hugging Face config.json has weights in mxfp4 of transformers."""
    return section_of(config, "quantization_config").get("quant_method") == "mxfp4"


def has_fp8_cache(model: Model, methods: tuple[str, ...]) -> bool:
    """Return whether the config.json of a model quantized by one of the `methods` says that the KV cache has FP8."""
    stated, start = dict(model.unread), "quantization_config."
    cache = [stated.get(start + key, "") for key in ("kv_cache_scheme", "kv_cache_quant_algo")]
    is_fp8 = "FP8" in cache or bool(re.search(r"'num_bits': 8\b", cache[0]) and "'type': 'float'" in cache[0])
    return is_fp8 and stated.get(f"{start}quant_method", "").startswith(methods)
