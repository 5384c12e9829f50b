"""Commands of fine-tuning frameworks start a process on each device of a plan."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_importers.command import read_command
from flagcore_training.commands import with_processes

from flagcore.domain.space import Candidate
from flagcore.errors import FlagError, LaunchError
from flagcore.plugins import find_engine
from tests.tasks import planned

AXOLOTL = "base_model: Qwen/Qwen3-8B\nsequence_len: 8192\nmicro_batch_size: 2\n"
ON_HOSTS = (
    "--num_machines={nnodes} --machine_rank={node_rank} --main_process_ip={master_addr} "
    "--main_process_port={master_port}"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "nodes", "start"),
    [
        ("swift sft --model Qwen/Qwen3-4B --deepspeed zero2 --max_length 99", 1, "env NPROC_PER_NODE=4 swift sft"),
        ("NPROC_PER_NODE=2 swift sft --model Qwen/Qwen3-4B --max_length 99", 1, "env NPROC_PER_NODE=4 swift sft"),
        ("NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-4B --max_length 99", 1, "swift sft"),
        ("accelerate launch --num_processes 2 trl sft --model_name_or_path Qwen/Qwen3-4B --max_length 99", 2, "8 trl"),
        (
            "python sft.py --model_name_or_path Qwen/Qwen3-4B --dataset_name a --max_length 99 --deepspeed zero.json",
            1,
            "",
        ),
    ],
)
def test_a_kept_command_starts_a_process_on_each_device_of_the_plan(
    folder: Path, words: str, nodes: int, start: str
) -> None:
    (folder / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    data = read_command(None, [words], chip="H100-SXM").data
    data["cluster"] |= {"nodes": nodes, "devices_per_node": 4}
    data["train"]["global_batch_size"] = 16
    platform = planned({**data, "auto_tuner": {}})
    neutral = {knob.name: knob.neutral for knob in platform.engine.knobs}
    candidate = Candidate.of({**neutral, **data["auto_tuner"]["baseline"], "micro_batch_size": 1})
    if not start:
        with pytest.raises(LaunchError, match="accelerate launch"):
            platform.engine.launch(platform, candidate, str(folder), for_real=True)
        return
    argv = platform.engine.launch(platform, candidate, str(folder), for_real=True).argv
    assert f"{start} " in f"{' '.join(argv)} "
    assert [each for each in argv if each.startswith("NPROC")] == [each for each in start.split() if "NPROC" in each]


def test_a_plan_without_a_command_is_not_exported(folder: Path) -> None:
    (folder / "own.yaml").write_text(AXOLOTL)
    data = read_command(None, ["own.yaml"], chip="H100-SXM").data
    for engine, problem in (("deepspeed", r"train\.command"), ("fsdp2", "none that could be started")):
        train = {**data["train"], "engine": engine, "command": None, "directory": None}
        platform = planned({**data, "train": train, "auto_tuner": {}})
        neutral = Candidate.of({knob.name: knob.neutral for knob in platform.engine.knobs})
        with pytest.raises(FlagError, match=problem):
            platform.engine.launch(platform, neutral, str(folder), for_real=True)


def argv_of(data: dict[str, Any], folder: Path, *, nodes: int, devices: int, **values: Any) -> list[str]:
    """Return the command of the baseline with other values, for a number of hosts and of devices of a host."""
    data["cluster"] |= {"nodes": nodes, "devices_per_node": devices}
    data["train"]["global_batch_size"] = 32
    platform = planned({**data, "auto_tuner": {}})
    neutral = {knob.name: knob.neutral for knob in platform.engine.knobs}
    candidate = Candidate.of({**neutral, **data["auto_tuner"]["baseline"], "micro_batch_size": 1, **values})
    return [*platform.engine.launch(platform, candidate, str(folder), for_real=True).argv]


@pytest.mark.parametrize(
    ("words", "started"),
    [
        (
            "accelerate launch --num_processes 4 a.py --x 1",
            f"accelerate launch {ON_HOSTS} --num_processes 16 a.py --x 1",
        ),
        ("trl sft --config a.yaml", f"trl sft --config a.yaml --num_processes=16 {ON_HOSTS}"),
        ("axolotl train a.yaml", f"axolotl train a.yaml -- --num_processes=16 {ON_HOSTS}"),
        (
            "axolotl train a.yaml --launcher torchrun -- --nproc_per_node=2",
            "axolotl train a.yaml --launcher torchrun -- --nproc_per_node=8",
        ),
        ("torchrun --standalone --nproc-per-node=gpu a.py", "torchrun --nproc-per-node=gpu a.py"),
        (
            "torchrun --nnodes 1 --nproc_per_node=4 a.py --nnodes_of_a 1",
            "torchrun --nnodes 2 --nproc_per_node=8 a.py --nnodes_of_a 1",
        ),
        ("env A=1 torchrun a.py", "env A=1 torchrun --nproc_per_node=8 a.py"),
        ("automodel a.yaml", "automodel a.yaml --nproc_per_node=8"),
        (
            "deepspeed --hostfile hosts a.py",
            "deepspeed --num_gpus=8 --no_ssh --node_rank={node_rank} --master_addr={master_addr} "
            "--master_port={master_port} --hostfile hosts a.py",
        ),
        ("deepspeed --include a:0,1 a.py", "deepspeed --include a:0,1 a.py"),
        ("python a.py --launcher slurm", "python a.py --launcher slurm"),
        ("python a.py --launcher deepspeed", "python a.py --launcher deepspeed"),
        ("torchrun --nproc_per_node 4 a.py --num_nodes 1", "torchrun --nproc_per_node 8 a.py --num_nodes 1"),
    ],
)
def test_a_launcher_gets_the_options_of_its_hosts_and_processes(words: str, started: str) -> None:
    assert " ".join(with_processes(words.split(), 2, 8)) == started


def test_deepspeeds_launcher_needs_a_list_of_hosts() -> None:
    assert with_processes(["deepspeed", "a.py"], 1, 4) == ("deepspeed", "--num_gpus=4", "a.py")
    with pytest.raises(LaunchError, match="hostfile"):
        with_processes(["deepspeed", "a.py"], 2, 4)


@pytest.mark.parametrize(
    ("words", "has", "has_not"),
    [
        ("trl sft {} --accelerate_config zero2", ["multi_gpu", "--deepspeed="], ["zero_stage"]),
        (
            "accelerate launch --use_deepspeed --zero_stage 2 sft.py {} --dataset_name a",
            ["--num_processes=4 sft.py", "--deepspeed="],
            ["zero_stage", "use_deepspeed"],
        ),
        (
            "deepspeed --module openrlhf.cli.train_sft --pretrain Qwen/Qwen3-4B --max_len 99 --zero_stage 2",
            ["--zero_stage 3", "--num_gpus=4"],
            ["ds_config"],
        ),
    ],
)
def test_settings_of_a_launcher_make_room_for_a_file_of_deepspeed(
    folder: Path, words: str, has: list[str], has_not: list[str]
) -> None:
    """accelerate 1.15 refuses its own settings beside a file, and OpenRLHF has no file."""
    data = read_command(
        None, [words.format("--model_name_or_path Qwen/Qwen3-4B --max_length 99")], chip="H100-SXM"
    ).data
    text = " ".join(argv_of(data, folder, nodes=1, devices=4, zero_stage=3))
    assert all(each in text for each in has)
    assert not any(each in text for each in has_not)


def test_a_file_of_accelerate_keeps_only_what_is_its_own(folder: Path) -> None:
    own = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"zero_stage": 2}}
    (folder / "own.yaml").write_text(yaml.safe_dump(own))
    words = "accelerate launch --config_file own.yaml sft.py --model_name_or_path Qwen/Qwen3-4B --dataset_name a"
    data = read_command(None, [f"{words} --max_length 99"], chip="H100-SXM").data
    (folder / "new").mkdir()
    argv = argv_of(data, folder / "new", nodes=1, devices=4)
    written = yaml.safe_load((folder / "new" / "own.yaml").read_text())
    assert written == {"distributed_type": "MULTI_GPU", "num_processes": 4, "deepspeed_config": {}}
    assert any(each.startswith("--per_device_train_batch_size=") for each in argv)


def test_a_command_without_fsdp_is_no_job_of_several_devices_that_share_weights(folder: Path) -> None:
    data = read_command(None, ["trl sft --model_name_or_path Qwen/Qwen3-4B --max_length 99"], chip="H100-SXM").data
    assert data["train"]["engine"] == "fsdp2"
    assert argv_of(data, folder, nodes=1, devices=1)[-1] == "--num_processes=1"
    with pytest.raises(LaunchError, match="FSDP"):
        argv_of(data, folder, nodes=1, devices=4, data_parallel_shard_size=4)
    platform = planned({**data, "auto_tuner": {}})
    assert any("FSDP" in line for line in platform.engine.warnings(platform.task))


@pytest.mark.parametrize("engine", ["deepspeed", "torchtitan"])
def test_a_program_of_the_users_without_its_command_is_only_planned(engine: str) -> None:
    cluster = {"chip": "H100-SXM", "nodes": 1, "devices_per_node": 8}
    train = {"engine": engine, "seq_length": 2048, "global_batch_size": 32, "precision": "bf16"}
    task = planned({"model": "meta-llama/Meta-Llama-3.1-8B", "cluster": cluster, "train": train}).task
    assert find_engine(engine).plans.only(task.spec)
    assert any("train.command" in line for line in find_engine(engine).warnings(task))
