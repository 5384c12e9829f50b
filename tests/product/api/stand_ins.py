"""Stand-ins of the programs that exports name.

A stand-in records its words, its folder and its rank, and ends. `flag import` must know all words, which its tables
compare with the options that the program has, files must exist, and the ranks of all nodes must add up.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from flagcore_importers.command import read_command
from torch.distributed import run

from extras.kubernetes.tests.test_manifest import found

PROGRAMS = """
torchrun deepspeed accelerate llamafactory-cli swift megatron axolotl automodel uv vllm llama-server sglang vllm-router
caddy ray python3 srun scontrol lmdeploy mindie_llm_server trtllm-serve
"""
STAND_IN = f"""#!{sys.executable} -SE
import json, os, subprocess, sys
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
if name == "python3" and words[:1] != ["-m"]:
    os.execv({sys.executable!r}, ["python3", *words])
nodes = int(os.environ.get("NODES", "1"))
if name == "scontrol":
    print("\\n".join(f"node{{n}}" for n in range(nodes)))
elif name == "srun":
    while words and (words[0].startswith("--") or "=" in words[0]):
        words.pop(0)
    for n in range(nodes):
        subprocess.run(words, check=True, env={{**os.environ, "SLURM_NODEID": str(n), "SLURM_STEP_ID": "0"}})
elif name == "ray" and words[0] == "status":  # the cluster is there twice, and then gone
    with open(os.environ["RECORD"] + os.environ["NODE_RANK"], "a+") as file:
        file.write("x")
        print("\\n".join([" 1 node_"] * nodes * (file.tell() < 3)))
elif name != "ray":
    variables = {{key: os.environ.get(key, "") for key in ("NODE_RANK", "MASTER_ADDR")}}
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps([name, words, os.getcwd(), variables]) + "\\n")
"""


@dataclass(frozen=True)
class Started:
    """A program that was started."""

    name: str
    words: list[str]
    folder: str
    variables: dict[str, str]


def started(script: Path, folder: Path, nodes: int) -> list[Started]:
    """Run a script on stand-ins, and return what it started. On several nodes, Slurm's stand-in starts each of them."""
    binaries, record = folder / "bin", folder / "record"
    binaries.mkdir(exist_ok=True)
    for file in folder.glob("record*"):
        file.unlink()
    record.write_text("")
    for name in PROGRAMS.split():
        (binaries / name).write_text(STAND_IN)
        (binaries / name).chmod(0o755)
    (folder / "pretrain_gpt.py").touch()
    variables = {"PATH": f"{binaries}:/usr/bin:/bin", "NODES": str(nodes), "RECORD": str(record), "HOME": str(folder)}
    variables |= {"SLURM_JOB_NODELIST": "nodes"} if nodes > 1 or script.suffix == ".sbatch" else {}
    done = subprocess.run(["bash", script], env=variables, cwd=folder, capture_output=True, text=True, timeout=60)
    stopped = "has ended: all are stopped" in done.stderr  # servers, which run until they are stopped
    assert done.returncode == 0 or stopped, done.stderr[-2000:]
    return [Started(*json.loads(line)) for line in record.read_text().splitlines()]


def start_all(exported: Path, folder: Path, nodes: int) -> None:
    """Start the scripts, pods and services of an export for a number of nodes, and check what they start.

    Programs run in `folder`, if the export does not name theirs.
    """
    for file in filter(Path.is_file, exported.rglob("*")):
        text = file.read_text()
        if file.suffix in (".sh", ".sbatch"):
            check(started(file, folder, nodes), nodes)
        elif file.suffix == ".yaml" and ("apiVersion" in text or "services:" in text):
            for number, (command, variables) in enumerate(_containers([*yaml.safe_load_all(text)])):
                ranks = {"JOB_COMPLETION_INDEX": str(max(number - 1, 0)), "LWS_WORKER_INDEX": str(number)}
                ranks |= {"RANK": str(number), "VC_TASK_INDEX": str(max(number - 1, 0))}  # of PyTorchJob, and Volcano
                lines = [f"export {name}={shlex.quote(value)}" for name, value in {**variables, **ranks}.items()]
                pod = folder / "pod.sh"
                pod.write_text("\n".join([*lines, f"export LWS_LEADER_ADDRESS=first\n{command}\n"]))
                programs = started(pod, folder, nodes)
                if programs or not (number and "ray start" in command):  # the others lend their devices
                    check(programs, 1)


def _containers(documents: list[Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the command of each container whose program has a stand-in, without the folder of an image's own program,
    and its variables."""
    for each in (container for listed in found(documents, "containers") for container in listed):
        if each.get("command", [])[:2] == ["sh", "-c"]:
            variables = {one["name"]: one.get("value", "") for one in each.get("env", ())}
            yield re.sub(r"\bexec /\S+/", "exec ", each["command"][2]), variables
    for listed in found(documents, "services"):
        for words in (service["entrypoint"] for name, service in listed.items() if name.startswith("instance")):
            yield f"exec {shlex.join([os.path.basename(words[0]), *words[1:]])}", {}


def check(programs: list[Started], nodes: int) -> None:
    """Check what a script started: `flag import` knows all options, files exist, and each node has its own rank."""
    assert programs
    for each in {each.name: each for each in programs}.values():
        words = [each.name, *each.words]
        if each.name == "torchrun":
            assert run.get_args_parser().parse_args(each.words).training_script
        if {"caddy", "vllm-router", "sglang_router.launch_router"} & {*words}:
            continue
        notes = read_command(None, words, chip="H100-SXM").notes
        assert not [note for note in notes if "unknown to flagcore" in note.text]
        assert not re.search(r"\bhead:29500|\{(node_rank|master_addr|nnodes|host_\d)\}", " ".join(words))
        assert nodes == 1 or "localhost:" not in " ".join(words)
        files = [word.partition("=")[2] or word for word in words if word.endswith((".yaml", ".json", ".toml", ".py"))]
        assert not [file for file in files if not Path(each.folder, file).is_file()]
    ranks = Counter(each.variables["NODE_RANK"] for each in programs if each.name == "torchrun")
    assert not ranks or nodes == 1 or ranks == {str(number): 1 for number in range(nodes)}
