"""A folder in which a reader may do what the pages say: the examples, the files that pages show, and finished runs."""

import csv
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner

from extras.flagscale.tests import accounting
from flagcore.cli.main import flag
from tests.product.block_checks import BLOCKS, ROOT, TEXT, Block

RECIPE = ROOT / "extras" / "bridge" / "tests" / "configs" / "llama3_8b.yaml"
TREES = ("conf", "examples/my-model/conf")
"""Paths of FlagScale configurations on the pages."""
SMALLER = {"nproc_per_node: 8": "nproc_per_node: 2", '"1:2"': "1", "    SOME_VISIBLE_DEVICES: 0,1,2,3,4,5,6,7\n": ""}
MEASURED = {"idx": 1, "tensor_model_parallel_size": 2, "micro_batch_size": 1, "performance": 150.0}
OWN = "own"
"""The run of SPEC, with a torchrun that prints Megatron's log lines."""
SPEC = """\
model: {num_layers: 4, hidden_size: 512, ffn_hidden_size: 1408, num_attention_heads: 8, vocab_size: 16384}
cluster: {chip: cpu, devices_per_node: 2, memory_per_device: 3GiB}
train: {engine: megatron, seq_length: 64, global_batch_size: 16, precision: bf16, command: [bash, own.sh]}
auto_tuner:
  space: {use_recompute: false}
  control: {train_iters: 4, max_trials: 3, max_time_per_task: 60}
"""
SCRIPT = """\
bin/torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --bf16 \\
  --mock-data --micro-batch-size 1 --global-batch-size 16 --seq-length 64 --max-position-embeddings 64 --lr 1e-3 \\
  --train-samples 1000000 --save checkpoints --tensorboard-dir logs 2>&1 | tee train.log
"""
RECIPES = {
    "examples/train_full/qwen3_full_sft.yaml": """\
model_name_or_path: Qwen/Qwen3-4B
stage: sft
finetuning_type: full
deepspeed: examples/train_full/stage2.json
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
""",
    "examples/train_full/stage2.json": '{"zero_optimization": {"stage": 2}}',
    "fft.yaml": "{base_model: Qwen/Qwen3-8B, sequence_len: 4096, micro_batch_size: 1, bf16: true, fsdp_version: 2}",
}
"""Configurations of fine-tuning frameworks that a page imports."""
OWN_FILES = ("docs/plugin-data.md", "docs/write-a-plugin.md", "docs/write-an-engine.md", "docs/hooks.md")
"""Pages with their own tests, which write the files."""
ALSO = ("train-cpu", "job", "serve", "other")
"""Further names of the same run on other pages."""


def build(folder: Path) -> Path:
    """Make the example folder in an empty folder, and tune `own.yaml` there."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for block in shown_files(BLOCKS):
        assert block.file is not None
        (folder / block.file).write_text(block.text)
    (log_line,) = re.findall(r"^ iteration .*elapsed time per .*$", TEXT["docs/files.md"], re.MULTILINE)
    steps = "\n".join(re.sub(r"\d+/", f"{number}/", log_line, count=1) for number in range(1, 5))
    (folder / "bin").mkdir()
    (folder / "bin" / "torchrun").write_text(f"#!/bin/sh\nsleep 0.5\ncat <<'LOG'\n{steps}\nLOG\n")  # 4 steps of 0.4 s
    (folder / "bin" / "torchrun").chmod(0o755)
    (folder / "pretrain_gpt.py").touch()
    (folder / "own.yaml").write_text(SPEC)
    (folder / "own.sh").write_text(SCRIPT)
    (folder / "examples" / "train_full").mkdir()
    for name, text in RECIPES.items():
        (folder / name).write_text(text)
    for name in TREES:
        _tree(folder / name)
    (folder / "checkpoints").mkdir()
    shutil.copy(RECIPE, folder / "checkpoints" / "run_config.yaml")
    (folder / "outputs" / "auto_tuner").mkdir(parents=True)
    with (folder / "outputs" / "auto_tuner" / "history.csv").open("w", newline="") as stream:
        table = csv.DictWriter(stream, [*MEASURED, "max_mem", "error"])
        table.writeheader()
        table.writerow(MEASURED)
    lines = [f"{name}-{number} slots=1 type={name}\n" for name in ("new", "old") for number in (1, 2)]
    (folder / "hosts.txt").write_text("".join(lines))  # the groups of the pages
    _model(folder / "Qwen3-8B")
    serve = "vllm serve Qwen/Qwen3-8B -tp 2"
    (folder / "serve.sbatch").write_text(f"#!/bin/sh\n#SBATCH --nodes=1 --gpus-per-node=2\n{serve}\n")
    service = {"image": "vllm/vllm-openai:v0.11.0", "command": "--model Qwen/Qwen3-8B -tp 2"}
    (folder / "compose.yaml").write_text(json.dumps({"services": {"vllm": service}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(flag, ["tune", "own.yaml", "--quiet", "--json"])
        assert done.exit_code == 0, done.output or done.exception
        assert json.loads(done.output)["best"]["measured"]["step_time_s"]["median"] == pytest.approx(0.4126)
    for name in ALSO:
        shutil.copytree(folder / "runs" / OWN, folder / "runs" / name)
    return folder


def shown_files(blocks: Iterable[Block]) -> list[Block]:
    """Return the blocks with a caption that pages for users show, each file once: a translation shows the same."""
    files = [block for block in blocks if block.file and block.page not in OWN_FILES]
    return sorted(files, key=lambda block: block.page.endswith(".zh.md"), reverse=True)


def _tree(folder: Path) -> None:
    """Copy a tree of FlagScale's, for two devices of this machine, under the name that pages give it."""
    accounting.write_tree(accounting.TREES["train_dense"], folder)
    text = (folder / "tune.yaml").read_text()
    for old, new in SMALLER.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "tune.yaml").unlink()
    (folder / "train_auto_tuner.yaml").write_text(text)


def _model(folder: Path) -> None:
    """Write the config.json of a model of that name."""
    sizes = {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
    folder.mkdir()
    config = {"model_type": "qwen3", **sizes, "num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config))
