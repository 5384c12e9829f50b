"""Checks exported Megatron-LM scripts with the parser and the checks of a Megatron-LM tree, without devices.

    git -C Megatron-LM archive core_v0.19.0 megatron | tar x -C tree
    python tools/megatron_exports.py tree 0.19.0

The tree's `parse_args`, `validate_args` and `core_transformer_config_from_args` run with stand-ins for Transformer
Engine and the device only. It needs the packages that the tree imports (torch, triton, einops, six, regex and
transformers), and Python 3.12 for 0.18 and later.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from flagcore import api
from flagcore.errors import FlagError

JOBS: dict[str, dict[str, Any]] = {
    "dense": {"model": "Qwen/Qwen3-8B"},
    "dense on two hosts": {"model": "Qwen/Qwen3-8B", "nodes": 2},
    "dense in FP8": {"model": "meta-llama/Meta-Llama-3.1-70B", "nodes": 8, "precision": "fp8"},
    "dense in MXFP8": {"model": "Qwen/Qwen3-8B", "chip": "B200", "precision": "mxfp8"},
    "long": {"model": "Qwen/Qwen3-8B", "nodes": 2, "length": 65536},
    "Megatron-FSDP": {"model": "Qwen/Qwen3-8B", "settings": {"use_megatron_fsdp": True}},
    "muon": {"model": "Qwen/Qwen3-8B", "settings": {"optimizer": "muon"}},
    "experts": {"model": "Qwen/Qwen3-30B-A3B", "nodes": 2},
    "one expert": {"model": "meta-llama/Llama-4-Scout-17B-16E-Instruct", "nodes": 8},
    "graphs": {"model": "Qwen/Qwen3-30B-A3B", "nodes": 2, "settings": {"cuda_graph_impl": "transformer_engine"}},
    "latent attention": {"model": "deepseek-ai/DeepSeek-V3", "nodes": 32},
    "sparse attention": {"model": "deepseek-ai/DeepSeek-V3.2", "nodes": 32},
    "Gated DeltaNet": {"model": "Qwen/Qwen3-Next-80B-A3B-Instruct", "nodes": 4},
    "hybrid": {"model": "nvidia/Nemotron-H-8B-Base-8K"},
    "vision": {"model": "Qwen/Qwen2.5-VL-7B-Instruct"},
}
"""Jobs on H100, unless they name another chip."""
PRINT = '#!/bin/sh\nprintf "%s\\n" "${CUDA_DEVICE_MAX_CONNECTIONS:-}" "$@"\n'


def exported(job: dict[str, Any], release: str, folder: Path) -> tuple[int, str, list[str]]:
    """Return the number of ranks, CUDA_DEVICE_MAX_CONNECTIONS and the arguments of the export of a job."""
    nodes = job.get("nodes", 1)
    train = {"engine": "megatron", "seq_length": job.get("length", 4096), "global_batch_size": 64 * nodes}
    train |= {"engine_version": release, "precision": job.get("precision", "bf16"), "settings": job.get("settings", {})}
    cluster = {"chip": job.get("chip", "H100-SXM"), "nodes": nodes, "devices_per_node": 8}
    spec, starter = folder / "job.yaml", folder / "torchrun"
    spec.write_text(json.dumps({"model": job["model"], "cluster": cluster, "train": train}))
    starter.write_text(PRINT)
    starter.chmod(0o755)
    with contextlib.redirect_stdout(io.StringIO()):
        api.export(spec, "megatron", output=folder / "out", name="job", options={})
    (script,) = (folder / "out").glob("*.sh")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "NODE_RANK": "0", "MASTER_ADDR": "first"}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=True)
    connections, *words = done.stdout.splitlines()
    start = next(place for place, word in enumerate(words) if word.endswith(".py"))
    return 8 * nodes, connections, words[start:]


def stand_ins() -> None:
    """Replace what needs Transformer Engine, its kernels or a device."""
    import megatron.core.models.common.embeddings.rope_utils as rope
    import megatron.core.transformer.transformer_config as config
    import megatron.core.utils as utils
    import torch

    utils.get_te_version = lambda: Version("2.17.0")
    rope.fused_apply_rotary_pos_emb = rope.fused_apply_rotary_pos_emb_thd = print
    config._validate_dsa_kernel_backend_dependencies = lambda _name: None
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (10, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=10, minor=0, name="stand-in")


def problem(ranks: int, connections: str, words: list[str]) -> str:
    """Return why Megatron-LM refuses arguments, or an empty text."""
    import megatron.training.arguments as arguments

    os.environ.update({"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"})
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if connections:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    sys.argv, said = words, io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            args = arguments.parse_args()
            arguments.validate_args(args, {})
            arguments.core_transformer_config_from_args(args)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Check all jobs, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="folder with Megatron-LM's package megatron")
    parser.add_argument("release", help="its release, such as 0.19.0")
    given, failed = parser.parse_args(), 0
    sys.path.insert(0, str(given.tree.resolve()))
    stand_ins()
    for name, job in JOBS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = problem(*exported(job, given.release, Path(folder)))
            except FlagError as error:
                print(f"{name}: no export: {error}")
                continue
        failed += bool(found)
        print(f"{name}: {found or 'accepted'}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
