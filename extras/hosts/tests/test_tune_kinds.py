"""`flag tune` of a mixed job through FlagScale's options, on two kinds of hosts with real agents.

Both kinds are this machine. Small programs stand for torchrun and for FlagScale's program, which logs as Megatron does.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from flagcore_hosts.connection import agent_command
from flagcore_hosts.launcher import SSH

from flagcore import api
from tests.product.tasks import SHAPE

pytestmark = [pytest.mark.slow, pytest.mark.spread]

PROGRAM = """
import os, sys
words = sys.argv[1:]
def values(flag):
    rest = words[words.index(flag) + 1 :]
    return rest[: next((n for n, word in enumerate(rest) if word.startswith("--")), len(rest))]
assert "--enable-hetero" in words
(kind,) = values("--hetero-current-device-type")
assert kind == os.environ["KIND"], (kind, os.environ["KIND"])
steps = int(values("--train-iters")[0])
if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
    split = [int(each) for each in values("--hetero-pipeline-layer-split")]
    for step in range(1, steps + 1):
        ms = 100.0 * max(split)
        print(f" iteration {step}/ {steps} | elapsed time per iteration (ms): {ms} | lm loss: 7.0E+00 |", flush=True)
"""
TORCHRUN = """#!{python}
import os, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
start = sys.argv.index("train_gpt.py")
os.environ.update(RANK=options["node-rank"], WORLD_SIZE=options["nnodes"])
assert options["nproc-per-node"] == "1"
os.execv(sys.executable, [sys.executable, *sys.argv[start:]])
"""
ARGUMENTS = ("--enable-hetero", "--num-layers", "4", "--train-iters", "9")


def test_meshes_are_tuned_on_two_kinds_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SSH, "channel", lambda host: ["sh", "-c", agent_command()])
    monkeypatch.setattr(SSH, "logs_in", False)  # both hosts are this machine
    monkeypatch.setattr(SSH, "owner", "")  # other tests use it, too
    (tmp_path / "hosts").write_text("localhost slots=1 type=fast\n127.0.0.1 slots=1 type=slow\n")
    (tmp_path / "train_gpt.py").write_text(PROGRAM)
    (tmp_path / "torchrun").write_text(TORCHRUN.format(python=sys.executable))
    (tmp_path / "torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    kinds = [{"chip": "cpu", "name": kind, "envs": {"KIND": kind}} for kind in ("fast", "slow")]
    spec = {
        "model": SHAPE,
        "cluster": {"hostfile": str(tmp_path / "hosts"), "groups": kinds},
        "train": {
            "engine": "megatron",
            "seq_length": 64,
            "global_batch_size": 4,
            "precision": "fp32",
            "engine_version": "0.15.0+flagscale",
            "command": ["torchrun", "train_gpt.py", *ARGUMENTS],
            "directory": str(tmp_path),
        },
        "auto_tuner": {
            "launcher": "ssh",
            "space": {"meshes": ["fast + slow", "fast"], "micro_batch_size": [1]},
            "control": {
                "max_trials": 2,
                "repeats": 0,
                "train_iters": 3,
                "compare_hosts": False,
                "use_experience": False,
            },
        },
    }
    outcome = api.tune(spec, run_dir=tmp_path / "run")
    hosts = {}
    for file in sorted((tmp_path / "run" / "trials").glob("*/launch.json")):
        started = json.loads(file.read_text())
        words = started["on_host"][started["hosts"][0]]["argv"]
        hosts[tuple(words[words.index("--hetero-device-types") + 1 :][: len(started["hosts"])])] = started["hosts"]
    assert hosts[("fast", "slow")] == ["localhost", "127.0.0.1"]
    assert hosts[("fast",)] == ["localhost"]
    times = {str(trial["candidate"]["meshes"]): trial["measured"] for trial in outcome.data["trials"]}
    assert times["None"]["step_time_s"]["median"] == 0.2  # two layers on each kind
    assert times["fast"]["step_time_s"]["median"] == 0.4
