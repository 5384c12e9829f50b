"""What differs between releases of SGLang: the values of knobs, the order of requests, the switch of experts.

Sources: the choices in `srt/server_args.py` of sglang 0.4.0 to 0.5.15 and in `srt/arg_groups/` of 0.5.16 to 0.5.23
(wheels of PyPI, 2026-11-23). A word that is not in `WORDS` is in all releases that have its knob.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flagcore.domain.knob import in_versions
from flagcore.domain.space import Rule
from flagcore.domain.spec import Task
from flagcore.engines.serving.sglang import knobs as own
from flagcore.engines.serving.space.hardware import DP, EP, TP
from flagcore.engines.serving.space.knobs import code

WORDS: Mapping[str, Mapping[str, str]] = {
    own.KV: {
        ">=0.4.2": "fp8_e4m3",
        ">=0.5.4": "bf16 bfloat16",
        ">=0.5.5,<0.5.21": "fp4_e2m1",
        ">=0.5.16": "fp4_mx_block16 mxfp8 nvfp4",
    },
    own.POLICY: {
        ">=0.5.1": "lof",
        ">=0.5.3": "priority",
        ">=0.5.8": "routing-key",
        ">=0.5.20": "hrrn",
        ">=0.5.21": "shortest-prefill-first",
    },
    own.BACKEND: {
        ">=0.4.5": "fa3",
        ">=0.4.6": "flashmla",
        ">=0.4.6.post1,<0.5.20": "cutlass_mla",
        ">=0.4.6.post5": "aiter",
        ">=0.4.7": "intel_amx",
        ">=0.4.9": "ascend",
        ">=0.4.10": "trtllm_mla",
        ">=0.5.1": "trtllm_mha wave",
        ">=0.5.1,<0.5.20": "dual_chunk_flash_attn",
        ">=0.5.3": "fa4 flex_attention nsa",
        ">=0.5.4": "intel_xpu",
        ">=0.5.12": "compressed dsv4 tokenspeed_mla",
        ">=0.5.13": "cutedsl_mla dsa",
        ">=0.5.17": "hpc_ops",
        ">=0.5.19": "minicpm_flashattn minicpm_flashinfer",
        ">=0.5.20": "qsa",
        ">=0.5.22": "llada2_cfg_flashinfer",
    },
    own.MOE: {
        ">=0.5.3": "flashinfer_cutedsl",
        ">=0.5.4": "cutlass deep_gemm",
        ">=0.5.10": "flashinfer_trtllm_routed",
        ">=0.5.11": "aiter",
        ">=0.5.12": "marlin",
        ">=0.5.13": "experimental_sgl_trtllm",
        ">=0.5.16": "experimental_sgl_marlin humming",
        ">=0.5.17": "hpc_ops",
        ">=0.5.18": "megamoe",
        ">=0.5.19": "intel_xpu",
        ">=0.5.20": "flashinfer_megamoe",
        ">=0.5.23": "lora_cutedsl lora_marlin lora_triton",
    },
    own.SPECULATION: {
        ">=0.4.3.post2": "NEXTN",
        ">=0.4.5": "EAGLE3",
        ">=0.5.2": "STANDALONE",
        ">=0.5.3": "NGRAM",
    },
    own.QUANTIZATION: {
        "<0.5.20": "marlin",
        ">=0.4.2": "modelopt w8a8_int8",
        ">=0.4.4": "w8a8_fp8",
        ">=0.4.5": "moe_wna16",
        ">=0.4.6": "modelopt_fp4",
        ">=0.4.6.post5,<0.5.16": "qoq",
        ">=0.4.9.post6": "petit_nvfp4 w4afp8",
        ">=0.5.1": "mxfp4",
        ">=0.5.4": "compressed-tensors modelopt_fp8",
        ">=0.5.5": "auto-round",
        ">=0.5.7": "modelslim",
        ">=0.5.8": "quark_int4fp8_moe",
        ">=0.5.9": "mxfp8",
        ">=0.5.10": "modelopt_mixed",
        ">=0.5.11": "unquant",
        ">=0.5.12": "mlx_q4 mlx_q8 quark",
        ">=0.5.13": "quark_mxfp4",
        ">=0.5.14": "nvfp4_online",
        ">=0.5.15": "auto-round-int8 mxfp_w4a8",
        ">=0.5.16": "humming",
    },
}
"""The releases with values of knobs."""
_EXPERT_SWITCH = "<0.4.10"
_LONGEST_PREFIX_FIRST = "<0.4.3.post4"


def has_expert_switch(version: str) -> bool:
    """Return whether expert parallelism is a switch in a release: all devices of the server share the experts."""
    return bool(version) and in_versions(_EXPERT_SWITCH, version)


def policy(task: Task) -> str:
    """Return the default order of waiting requests."""
    version = own.PROGRAM.version(task.spec)
    return "lpm" if version and in_versions(_LONGEST_PREFIX_FIRST, version) else "fcfs"


def rules(task: Task) -> tuple[Rule, ...]:
    """Return the rules of the release of a task; an unknown release breaks none."""
    version = own.PROGRAM.version(task.spec)
    missing = {name: words for name in WORDS if (words := missing_words(name, version))}
    codes = {name: [code(own.BY_NAME[name], word) for word in words] for name, words in missing.items()}
    listed = "; ".join(f"{name} = {', '.join(words)}" for name, words in missing.items())
    is_switch = has_expert_switch(version)
    return (
        Rule(
            name="value_release",
            knobs=tuple(WORDS),
            message=f"sglang {version} does not have {listed}",
            broken=lambda c: np.any([np.isin(c[name], codes.get(name, ())) for name in WORDS], axis=0),
        ),
        Rule(
            name="expert_switch",
            knobs=(TP, DP, EP),
            message=f"sglang {version} splits experts over all of {TP} x {DP} or not at all",
            broken=lambda c: is_switch & (c[EP] > 1) & (c[EP] != c[TP] * c[DP]),
        ),
    )


def missing_words(name: str, version: str) -> list[str]:
    """Return the values of a knob that a release does not have; none for an unknown release."""
    rows = WORDS[name].items()
    return [word for versions, words in rows if not in_versions(versions, version) for word in words.split()]
