"""Answers of vLLM's CPU build with real weights: planted faults are found, and what is harmless or declared passes."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_serving.job import Load
from flagcore_serving.launch.server import read_job
from flagcore_serving.trial import __main__ as program
from flagcore_vllm.engine import ENGINE

from engines.serving.tests.engines.tasks import serving
from engines.vllm.tests.test_vllm import HERE, PATIENCE, PROGRAM
from flagcore.domain.space import Candidate
from flagcore.domain.spec import Control
from tests.product.tasks import platform

pytestmark = [pytest.mark.long, pytest.mark.skipif(not PROGRAM.exists(), reason="needs vLLM: make setup-vllm")]

SIZES = {"layers": 4, "hidden": 256, "heads": 4, "kv-heads": 2, "ffn": 512, "vocab": 2048, "context": 1024}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
SCALED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {},
    "ignore": [],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
}


def weights(folder: Path, scale: float | None, *, experts: bool) -> str:
    """Write a Qwen3 of random weights into a folder. `scale`: of the FP8 cache of each layer."""
    sizes = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
    subprocess.run([sys.executable, str(HERE / "examples/tiny_hf.py"), str(folder), *sizes], check=True, timeout=60)
    draw, hidden, head = np.random.default_rng(0), SIZES["hidden"], SIZES["hidden"] // SIZES["heads"]
    tensors: dict[str, Any] = {}

    def add(name: str, *shape: int) -> None:
        values = draw.normal(size=shape, scale=shape[-1] ** -0.5) if len(shape) > 1 else np.ones(shape)
        tensors[f"{name}.weight"] = values.astype(np.float32)

    add("model.embed_tokens", SIZES["vocab"], hidden)
    for start in (f"model.layers.{layer}" for layer in range(SIZES["layers"])):
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"{start}.{name}", hidden)
        for name, heads in (("q", SIZES["heads"]), ("k", SIZES["kv-heads"]), ("v", SIZES["kv-heads"])):
            add(f"{start}.self_attn.{name}_proj", heads * head, hidden)
            if name != "v":
                add(f"{start}.self_attn.{name}_norm", head)
            if scale and name != "q":
                tensors[f"{start}.self_attn.{name}_proj.{name}_scale"] = np.array([scale], dtype=np.float32)
        add(f"{start}.self_attn.o_proj", hidden, hidden)
        if experts:
            add(f"{start}.mlp.gate", EXPERTS["num_experts"], hidden)
        places = [f"experts.{number}." for number in range(EXPERTS["num_experts"])] if experts else [""]
        width = EXPERTS["moe_intermediate_size"] if experts else SIZES["ffn"]
        for place in places:
            for name in ("gate_proj", "up_proj"):
                add(f"{start}.mlp.{place}{name}", width, hidden)
            add(f"{start}.mlp.{place}down_proj", hidden, width)
    add("model.norm", hidden)
    add("lm_head", SIZES["vocab"], hidden)
    tensors["lm_head.weight"] *= 0.5  # random weights are more sensitive to rounding than trained ones
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": SCALED} if scale else {}
    config |= {**EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} if experts else {}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def write_safetensors(file: Path, tensors: dict[str, Any]) -> None:
    """Write fp32 tensors: the length of the header, the header in JSON, and the data."""
    header, at = dict[str, Any](), 0
    for name, value in tensors.items():
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": (at, at + value.nbytes)}
        at += value.nbytes
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(each.tobytes() for each in tensors.values()))


FP8, TWO = {"kv_cache_type": "fp8"}, {"tensor_model_parallel_size": 2}
CASES: dict[bool, tuple[tuple[str, float | None, str, dict[str, Any]], ...]] = {
    False: (
        ("fewer at once", None, "rounding", {"max_num_seqs": 2}),
        ("fp8", 0.01, "changes", FP8),
        ("wrong scale", 0.001, "changes", FP8),
        ("lost_block", None, "rounding", {}),
        ("two ranks", None, "rounding", TWO),
        ("lost_part", None, "rounding", TWO),
    ),
    True: (("fewer at once", None, "rounding", {"max_num_seqs": 2}), ("dropped_tokens", None, "rounding", {})),
}
"""By whether the model has experts: the trials after the baseline, each with the scale of its cache, what its knobs may
change, and its knobs. Names with an underscore are faults of `planted`."""


@pytest.mark.timeout(8 * PATIENCE)
@pytest.mark.parametrize("experts", [False, True])
def test_planted_faults_are_found(experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).with_name('planted')}:{os.environ['PYTHONPATH']}")
    arguments: dict[str, Any] = {
        "command": (str(PROGRAM), "serve"),
        "engine_args": {"enforce_eager": True, "max_model_len": 256, "dtype": "bfloat16"},
        "loads": (Load(input_len=128, output_len=8, num_prompts=8, concurrency=4),),
        "control": Control(max_time_per_task=PATIENCE),
    }

    def folder(name: str, scale: float | None = None, **values: Any) -> str:
        model, trial = weights(tmp_path / name / "model", scale, experts=experts), tmp_path / name / "trial"
        trial.mkdir()
        where = platform(serving("vllm", on_cores=True, devices=2, weights=model, **arguments))
        ENGINE.launch(where, Candidate.of({**ENGINE.defaults(where.task), **values}), str(trial))
        program.run(read_job(trial), trial)
        return str(trial)

    base, where = folder("base"), serving("vllm", on_cores=True, **arguments)
    found = {}
    for name, scale, change, values in CASES[experts]:
        monkeypatch.setenv("PLANTED_FAULT", name if "_" in name else "")
        found[name] = ENGINE.answers(where, change, folder(name, scale, **values), base)
        print(name, found[name])
    refused = {name for name, each in found.items() if each and each.difference > each.limit}
    assert refused == {"dropped_tokens"} if experts else refused == {"wrong scale", "lost_block", "lost_part"}
    assert None not in found.values()
