"""`flag init --pid`: a spec from a running process, without its secrets."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from flagcore.errors import SpecError, UsageError
from tests.cli.conftest import Ran, flag

__all__ = ["flag"]

pytestmark = pytest.mark.slow

SECRETS = ("hf_abcdefghijklmnopqrstuvwx", "key-of-the-server", "pass-of-the-proxy")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that has the command line of another program and waits."""
    running: list[subprocess.Popen[bytes]] = []

    def start(program: str, *words: str, **variables: str) -> int:
        script = tmp_path / program
        script.write_text("import sys\nprint('up', flush=True)\nsys.stdin.read()\n")
        process = subprocess.Popen(
            [sys.executable, str(script), *words],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": "/h", **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        running.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_running_server_becomes_a_spec_without_secrets(start: Start, flag: Callable[..., Ran], tmp_path: Path) -> None:
    variables = {"HF_TOKEN": SECRETS[0], "VLLM_USE_V1": "1", "https_proxy": f"http://me:{SECRETS[2]}@proxy:1"}
    words = ("serve", "models/own", "--tensor-parallel-size", "2", "--api-key", SECRETS[1])
    (tmp_path / "models" / "own").mkdir(parents=True)
    (tmp_path / "models" / "own" / "config.json").write_text(json.dumps(CONFIG))
    pid = start("vllm", *words, **variables)
    done = flag("init", "--pid", str(pid))
    assert done.code == 0, done.err
    spec = yaml.safe_load(done.out)
    assert spec["serve"]["engine"] == "vllm"
    assert spec["model"] == str(tmp_path / "models/own")
    assert spec["auto_tuner"]["baseline"] == {"tensor_model_parallel_size": 2}
    assert spec["envs"] == {"VLLM_USE_V1": "1"}
    assert not [secret for secret in SECRETS if secret in done.out + done.err]
    assert {"HF_TOKEN", "https_proxy"} <= {line.split(":")[0] for line in done.err.splitlines()}


def test_a_running_job_of_torchrun_has_its_devices(start: Start, flag: Callable[..., Ran]) -> None:
    sizes = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 1024"
    pid = start("torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *sizes.split(), "--global-batch-size", "8")
    done = flag("init", "--pid", str(pid))
    assert done.code == 0, done.err
    spec = yaml.safe_load(done.out)
    assert spec["cluster"]["devices_per_node"] == 2
    assert spec["train"]["command"][0].endswith("/torchrun")


def test_other_processes_and_options_are_usage_errors(start: Start, flag: Callable[..., Ran]) -> None:
    pid = start("other.py", "--x")
    for words in (("--pid", str(pid)), ("--pid", "999999999"), ("--pid", str(pid), "--nodes", "2")):
        done = flag("init", *words)
        assert done.code == 2
        assert "Traceback" not in done.err
    assert flag("init", "--pid", str(pid), "--engine", "vllm").code == SpecError.exit_code == UsageError.exit_code


def test_nothing_of_another_users_process_is_read(start: Start, flag: Callable[..., Ran]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read every process")
    assert flag("init", "--pid", "1").code == 2
