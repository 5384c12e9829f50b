"""Secrets of configurations, scripts and manifests get into no export and imported spec that others can read."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagcore import api
from flagcore.errors import UsageError
from tests.planted import SHELL, VARIABLES, WORDS, leaking_files, leaks, secret
from tests.product.api.test_export import SMALL_TRAINING, server, written
from tests.product.cli.conftest import Flag, flag  # noqa: F401 (fixture)
from tests.product.tasks import SHAPE

MEGATRON = (
    "torchrun --nnodes=1 --nproc-per-node=2 pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 4 "
    "--vocab-size 512 --micro-batch-size 1 --seq-length 64 --global-batch-size 12 --max-position-embeddings 64 --bf16"
)
VLLM = (
    f"vllm serve ./model --api-key {secret(70)} --hf-token={secret(71)} --config serve.yaml "
    f'--hf-overrides \'{{"api_key": "{secret(72)}"}}\' --otlp-traces-endpoint http://me:{secret(73)}@h:4317'
)
DEEPSPEED = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
EXPORTS = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in VARIABLES.items())
OWN = f"#!/bin/bash\n{EXPORTS}hf auth login --token {secret(74)} || true\ncurl -u me:{secret(75)} http://x || true\n"
CONTAINER = {"image": "vllm/vllm-openai:v0.10.0", "command": ["sh", "-c", VLLM]}
HEADER = {"name": "Authorization", "value": f"Bearer {secret(76)}"}
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "x", "annotations": {"token": secret(77)}},
    "spec": {
        "containers": [
            {
                **CONTAINER,
                "name": "c",
                "env": [{"name": name, "value": value} for name, value in VARIABLES.items()],
                "livenessProbe": {"httpGet": {"path": "/health", "httpHeaders": [HEADER]}},
            }
        ]
    },
}
INPUTS = {
    "serve.sh": OWN + VLLM,
    "train.sh": f"{OWN}{MEGATRON} {shlex.join(WORDS)}\n",
    "job.sbatch": f"#!/bin/bash\n#SBATCH --export=HF_TOKEN={secret(78)}\n{EXPORTS}srun {MEGATRON}\n",
    "pod.yaml": yaml.safe_dump(POD),
    "compose.yaml": yaml.safe_dump(
        {"services": {"v": {**CONTAINER, "environment": VARIABLES, "labels": {"token": secret(79)}}}}
    ),
}
FILES = {
    "serve.yaml": yaml.safe_dump({"api-key": secret(80), "otlp-headers": f"Authorization=Bearer {secret(81)}"}),
    "ds.json": json.dumps({**DEEPSPEED, "wandb": {"enabled": True, "api_key": secret(82)}}),
    "pretrain_gpt.py": "from megatron.training import pretrain\n",
    "train.py": "import deepspeed\n",
}
COMMANDS = {
    "vLLM": shlex.split(VLLM),
    "Megatron-LM": [*shlex.split(MEGATRON), *WORDS],
    "Docker": ["docker", "run", "-e", f"PAT=ghp_{secret(83)}x", "vllm/vllm-openai:v0.10.0", "--model", "./model"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that commands name, and a shell with secrets."""
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def specs(folder: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield specs with secrets, and targets to which they are exported. Each target occurs once or twice."""
    one = {"chip": "H100-SXM", "nodes": 1, "devices_per_node": 2}
    small = {"auto_tuner": {"space": {"tensor_model_parallel_size": [2]}}, "envs": VARIABLES}
    yield server(folder, "vllm", {}, **small), ("vllm", "dynamo", "flagscale", "compose", "kubernetes", "slurm")
    yield written(folder, {**SMALL_TRAINING, **small}), ("flagscale", "kubernetes")
    script: dict[str, Any] = {**SMALL_TRAINING["train"], "command": ["bash", "own.sh"]}
    (folder / "own.sh").write_text(f"{OWN}{MEGATRON}\n")
    shape = {**SHAPE, "num_layers": 8}
    yield written(folder, {**small, "model": shape, "cluster": one, "train": script}), ("megatron", "slurm")
    words = ["deepspeed", "train.py", "--deepspeed", "ds.json"]
    deepspeed = {**SMALL_TRAINING["train"], "engine": "deepspeed", "command": words}
    yield written(folder, {**SMALL_TRAINING, "cluster": one, "train": deepspeed, "envs": VARIABLES}), ("deepspeed",)


def test_no_export_has_a_secret_that_others_can_read(folder: Path) -> None:
    """A configuration with secrets of the user's is written for its owner only. A command with one is refused."""
    for number, (spec, targets) in enumerate(specs(folder)):
        for target in targets:
            options = {"image": "i:1"} if target in ("kubernetes", "dynamo", "compose") else {}
            done = api.export(spec, target, output=folder / f"out-{number}-{target}", options=options)
            assert leaks(str(done.notes)) == []
    assert leaking_files(folder, inputs={*FILES, "own.sh", "job.yaml"}) == {}
    private = {each.name for each in folder.rglob("out-*/*") if each.stat().st_mode & 0o077 == 0}
    assert private == {"candidate.json"}
    command = {**SMALL_TRAINING["train"], "command": [*shlex.split(MEGATRON), *WORDS]}
    with pytest.raises(UsageError, match="pass it in a variable"):
        api.export(written(folder, {**SMALL_TRAINING, "train": command}), "slurm", output=folder / "refused")


def test_no_imported_spec_and_no_note_has_a_secret(folder: Path, flag: Flag) -> None:  # noqa: F811
    server(folder)
    screens = [flag("import", "-o", f"{name}.yaml", "--", *words) for name, words in COMMANDS.items()]
    for name, text in INPUTS.items():
        (folder / name).write_text(text)
        screens.append(flag("import", name, "-o", f"{name}.out"))
    assert [each.code for each in screens] == [0] * len(screens), screens
    assert [leaks(each.out + each.err) for each in screens] == [[]] * len(screens)
    assert leaking_files(folder, inputs={*FILES, *INPUTS}) == {}
