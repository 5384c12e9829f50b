"""A whole Megatron-LM, of flag-scale's wheel, that trains on the CPU: `make build/megatron-lm` puts it there."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.product.block_checks import ROOT

PACKAGES = ROOT / "build" / "megatron-lm"
MEGATRON = PACKAGES / "flag_scale" / "third_party" / "Megatron-LM"
SHIM = ROOT / "engines" / "megatron" / "tests" / "trial" / "cpu_as_cuda"
needs_megatron_lm = pytest.mark.skipif(
    not (MEGATRON / "pretrain_gpt.py").is_file(), reason="needs Megatron-LM: make build/megatron-lm"
)
MODEL = {
    "name": "tiny",
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 5000,
}
ARCHITECTURE = """\
  --use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
  --group-query-attention --num-query-groups 2 --kv-channels 16 --seq-length 64 --max-position-embeddings 64
  --position-embedding-type rope --rotary-base 1000000 --no-rope-fusion --swiglu --normalization RMSNorm
  --untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout 0.0 --hidden-dropout 0.0
  --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
  --mock-data --tokenizer-type NullTokenizer --vocab-size 5000 --num-workers 1 --distributed-backend gloo
  --micro-batch-size 1 --global-batch-size 8 --lr 0.0015 --min-lr 0.00001 --lr-decay-style cosine"""
"""The arguments of MODEL on two ranks, over gloo and with local layers."""


def spec_of(folder: Path, *, control: dict[str, Any], space: dict[str, Any], **train: Any) -> dict[str, Any]:
    """A spec whose trials run `run.sh` of a folder on two ranks."""
    paths = (SHIM, MEGATRON, PACKAGES / "flag_scale", PACKAGES)
    fixed: dict[str, Any] = dict.fromkeys(("context_parallel_size", "expert_model_parallel_size"), 1)
    fixed |= {"num_layers_per_virtual_pipeline_stage": None, "use_recompute": False}
    job = {"engine": "megatron", "seq_length": 64, "global_batch_size": 8, "precision": "bf16"}
    return {
        "model": MODEL,
        "cluster": {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "4GiB"},
        "train": {**job, "command": ["bash", "run.sh"], "directory": str(folder), **train},
        "auto_tuner": {"strategy": "predicted", "space": {**fixed, **space}, "control": {"repeats": 0, **control}},
        "envs": {
            "MEGATRON": str(MEGATRON),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": ":".join(map(str, (*paths, os.environ["PYTHONPATH"]))),
        },
    }
