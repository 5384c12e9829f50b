"""Outputs of plans of servers where the simulation is compiled, and where it is not: for `make test-compiled`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from flagcore_serving.model import simulation

IS_COMPILED = str(simulation.__file__).endswith(".so")
COMPILED = str(Path(str(simulation.__file__)).parents[2])
MODEL = ("estimate", "--model", "Qwen/Qwen3-8B", "--chip", "H20", "--devices", "8", "--json")
COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": MODEL,
    "sglang": (*MODEL, "--engine", "sglang"),
    "llamacpp": (*MODEL, "--engine", "llamacpp", "--set", "cluster.devices_per_node=1"),
    "open loop": (*MODEL, "--set", "serve.profile.concurrency=null", "--set", "serve.profile.request_rate=8"),
    "highest rate": (
        *MODEL,
        "--set",
        "serve.profile.concurrency=null",
        "--set",
        "serve.profile.request_rate=auto",
        "--set",
        "serve.slo.ttft_s.p99=2",
    ),
    "apart": (*MODEL, "--set", "auto_tuner.space={prefill_decode: auto}"),
    "shared prefix": (*MODEL, "--set", "serve.profile.prefix_len=512"),
}
MAIN = "import sys; from flagcore.cli.main import main; sys.exit(main())"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_COMPILED, reason="only in `make test-compiled`")]


@pytest.mark.parametrize("name", COMMANDS)
def test_outputs_are_those_of_the_sources(name: str) -> None:
    compiled, plain = (_output(COMMANDS[name], is_compiled) for is_compiled in (True, False))

    assert compiled
    assert compiled == plain


def _output(arguments: tuple[str, ...], is_compiled: bool) -> str:
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    kept = [each for each in folders if is_compiled or each != COMPILED]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(kept)}
    command = [sys.executable, "-c", MAIN, *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=600).stdout
