"""Each export starts on stand-ins of the programs that it names, or is refused with what is missing.

A stand-in records its words, its folder and its rank, and ends. `flag import` must know all words, which its tables
compare with the options that the program has, files must exist, and the ranks of all nodes must add up.
"""

import json
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from flagcore_importers.command import read_command

from extras.kubernetes.tests.test_manifest import found
from flagcore import api
from flagcore.errors import UsageError
from tests.product.api.test_exports_accepted import exports as exports
from tests.product.api.test_exports_accepted import shell_commands

PROGRAMS = """
torchrun deepspeed accelerate llamafactory-cli swift megatron axolotl automodel uv vllm llama-server sglang vllm-router
caddy ray python3 srun scontrol
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


FACTORY = {
    "model_name_or_path": "Qwen/Qwen3-4B",
    "stage": "sft",
    "finetuning_type": "lora",
    "cutoff_len": 2048,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": True,
    "deepspeed": "zero.json",
}
AXOLOTL = {"base_model": "Qwen/Qwen3-4B", "adapter": "qlora", "load_in_4bit": True, "sequence_len": 2048}
AXOLOTL |= {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
ZERO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
TITAN = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nlocal_batch_size = 1\nseq_len = 4096\n"
VERL = (
    "python3 -m verl.trainer.main_ppo data.train_batch_size=64 data.max_prompt_length=512 data.max_response_length=512 "
    "actor_rollout_ref.model.path=Qwen/Qwen3-4B actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True "
    "trainer.n_gpus_per_node=8 trainer.nnodes={nodes}"
)
SWIFT = "--model Qwen/Qwen3-4B --tuner_type lora --max_length 2048 --per_device_train_batch_size 1 --dataset a"
JOBS = {
    "LLaMA-Factory": ("ASCEND_RT_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli train job.yaml", "910B3", 1),
    "ms-swift": (f"NPROC_PER_NODE=8 swift sft {SWIFT} --deepspeed zero2", "H100-SXM", 1),
    "axolotl": ("axolotl train axolotl.yaml", "RTX4090", 1),
    "torchtitan": (
        "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-endpoint head:29500 "
        "-m torchtitan.train --job.config_file t.toml",
        "H100-SXM",
        2,
    ),
    "verl": (VERL.format(nodes=1), "H100-SXM", 1),
    "verl on two nodes": (VERL.format(nodes=2), "MI300X", 2),
}
"""Commands of other programs, with a chip and the number of hosts."""
OF_JOBS = ("", "slurm", "kubernetes", "flagscale", "compose")
"""The targets: the engine of the job, and those of launchers."""


@pytest.mark.costly
@pytest.mark.parametrize("job", JOBS)
def test_a_command_of_a_framework_starts_with_the_chosen_values(job: str, tmp_path: Path) -> None:
    words, chip, nodes = JOBS[job]
    files = {"job.yaml": FACTORY, "axolotl.yaml": AXOLOTL, "zero.json": ZERO}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "t.toml").write_text(TITAN)
    (tmp_path / "run.sh").write_text(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        data = read_command(None, ["run.sh"], chip=chip).data
        (tmp_path / "spec.yaml").write_text(json.dumps(data))
        engine = next(data[kind]["engine"] for kind in ("train", "rl") if kind in data)
        for target in OF_JOBS:
            out = tmp_path / (target or "engine")
            if target in ("flagscale", "compose"):  # these start other kinds of jobs
                with pytest.raises(UsageError, match="--to"):
                    api.export("spec.yaml", target, output=out)
                continue
            options = {"image": "i"} if target == "kubernetes" else {}
            made = api.export("spec.yaml", target or engine, output=out, options=options).files
            for script in [file for file in made if file.suffix in (".sh", ".sbatch")]:
                check(started(script, tmp_path, nodes), nodes)
            for number, text in enumerate(shell_commands(out / "spec.yaml") if target == "kubernetes" else ()):
                pod, manifest = tmp_path / "pod.sh", yaml.safe_load((out / "spec.yaml").read_text())
                env = {each["name"]: each.get("value", "") for each in found(manifest, "env")[0]}
                lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
                pod.write_text("\n".join([*lines, f"export JOB_COMPLETION_INDEX={number - 1}", text, ""]))
                programs = started(pod, tmp_path, nodes)
                assert programs or (number and "ray start" in text)  # the others lend their devices


def check(programs: list[Started], nodes: int) -> None:
    """Check what a script started: `flag import` knows all options, files exist, and each node has its own rank."""
    assert programs
    for each in programs[:1]:
        words = [each.name, *each.words]
        notes = read_command(None, words, chip="H100-SXM").notes
        assert not [note for note in notes if "unknown to flagcore" in note.text]
        assert not {"head:29500", "{node_rank}", "{master_addr}"} & set(words)
        files = [word.partition("=")[2] or word for word in words if word.endswith(FILES)]
        assert not [file for file in files if not Path(each.folder, file).is_file()]
    ranks = Counter(each.variables["NODE_RANK"] for each in programs if each.name == "torchrun")
    assert not ranks or nodes == 1 or ranks == {str(number): 1 for number in range(nodes)}


FILES = (".yaml", ".json", ".toml", ".py")
