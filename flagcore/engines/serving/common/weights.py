"""Checks of weights in a Hugging Face directory."""

from __future__ import annotations

import json
import os

from flagcore.domain.spec import Spec
from flagcore.engines.serving.common.knobs import bare
from flagcore.errors import SpecError

_WIDE = ("bf16", "fp16", "fp32")
_CONFIG = "config.json"
_NARROWS = ("quantization", "quantization-config", "torchao-config", "hf-overrides", "model-loader-extra-config")
"""Flags that make an engine serve weights narrower than they are stored."""


def check_directory(spec: Spec) -> None:
    """Raise SpecError unless the weights are a directory with a config.json, quantized if the spec says so.

    Engines serve weights as they are stored: with fp8 in the spec and plain weights, predictions of fp8 would be
    compared with measurements of bf16.
    """
    weights, precision = spec.serve.weights, spec.serve.precision
    if weights is None or not os.path.isfile(os.path.join(weights, _CONFIG)):
        problem = "is missing" if weights is None else f"is not a directory with a {_CONFIG}"
        fix = "give a Hugging Face directory; nothing is downloaded"
        raise SpecError(key="serve.weights", value=weights, problem=problem, fix=fix)
    names = {bare(key) for key in spec.serve.engine_args}
    if precision not in _WIDE and not names & set(_NARROWS) and not _quantized(weights):
        problem = f"is not the precision of {weights}, and serve.engine_args do not quantize it"
        fix = "set engine_args: {quantization: ...}, or the precision of the weights"
        raise SpecError(key="serve.precision", value=precision, problem=problem, fix=fix)


def _quantized(weights: str) -> bool:
    try:
        with open(os.path.join(weights, _CONFIG), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return False
    inner = config.get("text_config") if isinstance(config, dict) else None
    return any(isinstance(part, dict) and part.get("quantization_config") for part in (config, inner))
