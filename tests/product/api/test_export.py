"""Exports start as they stand: each file is checked by the tool's own parser, schema or program."""

import gzip
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_kubernetes.job import KINDS
from flagcore_testing import fakes

from engines.megatron.tests.command.real import MEGATRON, PACKAGES, SHIM, needs_megatron_lm
from extras.kubernetes.tests.test_manifest import checked, found
from flagcore import api
from flagcore.api.commands import export as targets
from flagcore.errors import UsageError
from flagcore.launchers import network
from tests.checks import program
from tests.product.block_checks import ROOT
from tests.product.tasks import SHAPE

EXPORTED = Path(__file__).parent / "exported"
SCHEMAS = json.loads(gzip.decompress((EXPORTED / "schemas.json.gz").read_bytes()))
"""The JSON Schemas, without descriptions, of Deployment, StatefulSet and Service (Kubernetes 1.33, strict, from
kubernetes-validate 1.37.0), and of compose files (`schema/compose-spec.json` of compose-spec/compose-spec @170098b).
All have the Apache License 2.0."""
PLAN = ROOT / "examples" / "train-1024-probe.yaml"
SMALL_TRAINING: dict[str, Any] = {
    "model": SHAPE,
    "cluster": {"chip": "H100-SXM", "nodes": 3, "devices_per_node": 2},
    "train": {"engine": "megatron", "seq_length": 64, "global_batch_size": 12, "precision": "bf16"},
}
ON_CPU = (
    "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm --no-rope-fusion --num-workers 1 "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --min-lr 1e-5 --lr-decay-style cosine"
)


def written(folder: Path, data: dict[str, Any]) -> Path:
    file = folder / "job.yaml"
    file.write_text(json.dumps(data))
    return file


def server(
    folder: Path, engine: str = "vllm", args: Mapping[str, Any] = {"enforce_eager": True}, **changes: Any
) -> Path:
    weights = folder / "model"
    weights.mkdir()
    config = {"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 3072}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}
    (weights / "config.json").write_text(json.dumps(config))
    serve = {"engine": engine, "weights": str(weights), "engine_args": args}
    cluster = {"chip": "H100-SXM", "devices_per_node": 4}
    tuner = {"space": {"instances": [1, 2], "tensor_model_parallel_size": [1, 2, 4], "max_num_seqs": [64, 128]}}
    return written(folder, {"model": str(weights), "cluster": cluster, "serve": serve, "auto_tuner": tuner, **changes})


def exported(spec: Path, target: str, candidate: str = "best", **options: Any) -> dict[str, str]:
    """Return the text of each exported file by its name."""
    folder = spec.parent / f"out-{target}"
    files = api.export(spec, target, candidate, output=folder, **options).files
    return {str(file.relative_to(folder)): file.read_text() for file in files}


def only(files: dict[str, str]) -> str:
    (text,) = files.values()
    return text


def started(script: str, folder: Path, name: str, **variables: str) -> list[str]:
    """Return the arguments with which a script starts a program; the program prints them."""
    program(folder / "bin" / name, f'printf "%s\\n" "$@" > {folder}/argv')
    file = folder / "script"
    file.write_text(script)
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", **variables}
    subprocess.run(["bash", file], check=True, env=environment, cwd=folder, timeout=30)
    return (folder / "argv").read_text().splitlines()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of 1,024 devices, with a small space."""
    data = yaml.safe_load(PLAN.read_text())
    data["auto_tuner"]["space"] |= {"tensor_model_parallel_size": [4, 8], "pipeline_model_parallel_size": [4, 8]}
    return written(tmp_path_factory.mktemp("plan"), data)


def test_the_script_of_a_plan_starts_a_node_with_its_rank(plan: Path, tmp_path: Path) -> None:
    words = started(only(exported(plan, "megatron")), tmp_path, "torchrun", NODE_RANK="5", MASTER_ADDR="first")
    assert {"--nnodes=128", "--node-rank=5", "--master-addr=first", "--mock-data"} <= set(words)
    assert subprocess.run(["bash", tmp_path / "script"], env={}, capture_output=True, cwd=tmp_path).returncode != 0


def test_slurm_starts_one_task_per_node_with_its_rank(plan: Path, tmp_path: Path) -> None:
    script = only(exported(plan, "slurm"))
    options = {line[10:] for line in script.splitlines() if line.startswith("#SBATCH")}
    assert options == {"job-name=job", "nodes=128", "ntasks-per-node=1", "gpus-per-node=8", "exclusive", "mem=0"}
    program(tmp_path / "bin" / "scontrol", "echo node-a; echo node-b")
    program(tmp_path / "bin" / "srun", 'shift 2; SLURM_NODEID=7 exec "$@"')
    words = started(script, tmp_path, "torchrun", SLURM_JOB_NODELIST="node-[a-b]")
    assert {"--node-rank=7", "--master-addr=node-a", "--nnodes=128"} <= set(words)


def test_a_job_starts_again_as_often_as_its_export_says(tmp_path: Path) -> None:
    again = {"restarts": "2"}
    script, log = only(exported(written(tmp_path, SMALL_TRAINING), "slurm", options=again)), tmp_path / "log"
    assert "#SBATCH --requeue" in script
    assert "# a restart begins at step 0" in script
    program(tmp_path / "bin" / "srun", f"echo >> {log}; exit 7")
    program(tmp_path / "bin" / "scontrol", "echo node")
    variables = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node"}
    assert subprocess.run(["bash", "-c", script], env=variables, check=False).returncode == 7
    assert len(log.read_text()) == 3
    text = only(exported(written(tmp_path, SMALL_TRAINING), "kubernetes", options={**again, "image": "x"}))
    assert yaml.safe_load(text)["spec"]["failurePolicy"]["maxRestarts"] == 2
    alone = {**SMALL_TRAINING, "cluster": {**SMALL_TRAINING["cluster"], "nodes": 1}}
    script = only(exported(written(tmp_path, alone), "megatron", options=again))
    assert {"export PET_MAX_RESTARTS=2", "export PET_STANDALONE=1"} <= {*script.splitlines()}
    with pytest.raises(UsageError, match="is for training"):
        exported(server(tmp_path), "compose", options=again)


def test_a_plan_on_two_chips_is_a_heterogeneous_job_of_slurm(tmp_path: Path) -> None:
    groups = [{"chip": chip, "nodes": 2, "devices_per_node": 8} for chip in ("H100-SXM", "A800-80GB")]
    for each in groups:
        each["nic_bytes_per_second"] = 5e10
    train = {**SMALL_TRAINING["train"], "engine_version": "0.15", "seq_length": 4096, "global_batch_size": 128}
    space = {"meshes": ["H100-SXM tp2 dp8 + A800-80GB tp2 dp8"], "micro_batch_size": 1, "use_recompute": "auto"}
    model = {**SHAPE, "num_layers": 8}
    data = {"model": model, "cluster": {"groups": groups}, "train": train, "auto_tuner": {"space": space}}
    script = only(exported(written(tmp_path, data), "slurm"))
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options[2] == "#SBATCH hetjob"
    assert all("--nodes=2 --ntasks-per-node=1 --gpus-per-node=8" in options[each] for each in (1, 3))
    last = 'while [ "$1" != : ]; do shift; done; shift 2; SLURMD_NODENAME=d exec "$@"'  # a task of the second component
    program(tmp_path / "bin" / "scontrol", 'echo "$3" | tr , "\\n"')
    program(tmp_path / "bin" / "srun", last)
    nodes = {"SLURM_JOB_NODELIST_HET_GROUP_0": "a,b", "SLURM_JOB_NODELIST_HET_GROUP_1": "c,d"}
    words = started(script, tmp_path, "torchrun", **nodes)
    assert {"--node-rank=3", "--master-addr=a", "--nnodes=4"} <= set(words)
    assert words[words.index("--hetero-current-device-type") + 1] == "A800-80GB"


@pytest.mark.parametrize(
    ("start", "is_script"),
    [
        ("exec torchrun --node-rank=$NODE_RANK --nnodes=3 --nproc-per-node=2", True),
        ("srun torchrun --node-rank=$SLURM_NODEID --nnodes=3 --nproc-per-node=2", True),
        ("srun torchrun --rdzv-endpoint head:29500 --nnodes=3 --nproc-per-node=2", False),
        ("srun -N 3 --ntasks-per-node=2 python -u", False),  # torchrun starts these ranks
    ],
)
def test_a_command_is_started_once_per_node_with_the_rank_of_the_node(
    start: str, is_script: bool, tmp_path: Path
) -> None:
    sizes = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 512 --micro-batch-size 1"
    batch = "--seq-length 64 --global-batch-size 12 --max-position-embeddings 64 --bf16"
    header, command = (
        "export NODE_RANK=0 NCCL_SOCKET_IFNAME=$(echo here0)\n",
        f"{start} pretrain_gpt.py {sizes} {batch}",
    )
    (tmp_path / "run.sh").write_text(f"{header}{command}\n")
    own = ["bash", "run.sh"] if is_script else command.split()
    train = {**SMALL_TRAINING["train"], "command": own, "directory": str(tmp_path)}
    space = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "micro_batch_size": [1, 2]}
    data = {**SMALL_TRAINING, "train": train, "auto_tuner": {"space": space}}
    script = only(exported(written(tmp_path, data), "slurm"))
    words = started(script, tmp_path, "torchrun", NODE_RANK="2", MASTER_ADDR="first")
    assert {"--nnodes=3", "--node-rank=2", "--master-addr=first", "--nproc-per-node=2"} <= set(words)
    assert not {"srun torchrun", "here0", "run.sh", "head:29500", "python"} & set(script.split())


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_of_a_job_trains_with_its_rank(kind: str, tmp_path: Path) -> None:
    command = ["env", "sh", "-c", 'echo "$@" on $MODE', "sh", "{node_rank} of {nnodes}", "{master_addr}:{master_port}"]
    command += ["it's $HOME"]
    interface = network.interface_to(network.OUTSIDE)
    data = {**SMALL_TRAINING, "envs": {"HF_TOKEN": "hidden-4711", "MODE": "{interface}"}}
    data["train"] = {**data["train"], "command": command, "directory": str(tmp_path)}
    text = only(
        exported(written(tmp_path, data), "kubernetes", options={"image": "image:1", "kind": kind, "rdma": "rdma/x"})
    )
    manifest = checked(yaml.safe_load(text))
    first, others = (each[0] for each in found(manifest, "containers"))
    host = KINDS[kind].hosts("job", 3)[0]
    for one, index, rank in ((first, "0", 0), (others, "1", 2)):
        ranks = {"RANK": str(rank), "JOB_COMPLETION_INDEX": index, "VC_TASK_INDEX": index}
        done = subprocess.run(one["command"], env={"PATH": "/bin:/usr/bin", "HOME": "x", **ranks}, capture_output=True)
        assert done.stdout.decode().startswith(f"{rank} of 3 {host}:29500 it's $HOME")
        assert done.stdout.decode().rstrip().endswith(f"on {interface}".rstrip())
    assert first["resources"]["limits"] == {"nvidia.com/gpu": 2, "rdma/x": 1}
    assert "hidden-4711" not in text
    assert [each["key"] for each in found(manifest, "secretKeyRef")] == ["HF_TOKEN"] * 2


def test_a_server_is_a_deployment_with_a_pod_per_instance(tmp_path: Path) -> None:
    job = server(tmp_path, envs={"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    text = only(exported(job, "kubernetes", "instances=2, tp=2", options={"image": "image:1", "replicas": "3"}))
    deployment, service = yaml.safe_load_all(text)
    (container,) = found(deployment, "containers")[0]
    words = shlex.split(container["command"][-1])
    assert deployment["spec"]["replicas"] == 6
    assert words[1:3] == ["vllm", "serve"]
    assert words[words.index("--host") + 1] == "0.0.0.0"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert "CUDA_VISIBLE_DEVICES" not in text  # a pod counts its own devices from 0
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"]


def test_slurm_assigns_the_devices_itself(tmp_path: Path) -> None:
    gpus = "\n".join(f"{n}, NVIDIA H100 80GB HBM3, 81559, 570.1, GPU-{n}, 0x233010DE, Disabled" for n in range(8))
    with fakes.machine({"nvidia-smi": fakes.prints(gpus)}, CUDA_VISIBLE_DEVICES="7,1,2,4"):
        script = only(exported(server(tmp_path), "slurm", "instances=1, tp=4"))
    assert "CUDA_VISIBLE_DEVICES" not in script
    assert "# Port 8000 is open on its (first) node only" in script


@pytest.mark.parametrize(("chip", "is_known"), [("C550", False), ("H100-SXM", True), ("910B3", True)])
def test_a_batch_script_says_that_the_name_of_devices_is_a_guess(chip: str, is_known: bool, tmp_path: Path) -> None:
    spec = server(tmp_path, cluster={"chip": chip, "devices_per_node": 4})
    assert ("--resource" in only(exported(spec, "slurm", "instances=1, tp=4"))) == (not is_known)


@pytest.mark.parametrize(("devices", "is_named"), [(4, True), (8, False)])
def test_a_batch_script_for_a_part_of_a_node_names_the_cores(devices: int, is_named: bool, tmp_path: Path) -> None:
    spec = server(tmp_path, cluster={"chip": "H100-SXM", "devices_per_node": 8})
    script = only(exported(spec, "slurm", f"instances=1, tp={devices}"))
    assert ("--cpus-per-task" in script) == is_named


@pytest.mark.parametrize(
    ("chip", "image", "own", "all_devices"),
    [
        ("H100-SXM", "vllm/vllm-openai:v0.11.2", {"'2'", "'3'"}, set()),
        ("MI300X", "vllm/vllm-openai-rocm:v0.11.2", set(), {"/dev/kfd", "/dev/dri"}),
        ("C550", "${IMAGE", set(), {"/dev/mxcd", "/dev/dri"}),
        ("910B3", "quay.io/ascend/vllm-ascend:", {"/dev/davinci2", "/dev/davinci3"}, {"/dev/davinci_manager"}),
        ("910C", "${IMAGE", {"/dev/davinci2", "/dev/davinci3"}, {"/dev/davinci_manager"}),
        ("P800", "quay.io/kunlun/vllm_kunlun:", {"/dev/xpu2", "/dev/xpu3"}, {"/dev/xpuctrl"}),
    ],
)
def test_a_compose_file_starts_as_it_is(
    chip: str, image: str, own: set[str], all_devices: set[str], tmp_path: Path
) -> None:
    spec = server(tmp_path, cluster={"chip": chip, "devices_per_node": 4})
    data = json.loads(spec.read_text())
    data["serve"] |= {"weights": "Qwen/Qwen3-0.6B", "engine_version": "0.11.2", "engine_args": {}}
    text = only(exported(written(tmp_path, data), "compose", "instances=2, tp=2"))
    services = yaml.safe_load(text)["services"]
    assert list(services) == ["instance-0", "instance-1", "balancer"]
    second = services["instance-1"]
    assert second["image"].startswith(image)
    assert second["environment"]["HF_TOKEN"] is None
    assert any(each.endswith(":/root/.cache/huggingface") for each in second["volumes"])
    assert "127.0.0.1:8002/health" in second["healthcheck"]["test"][1]
    devices = {repr(each) for each in found(second, "device_ids")[0]} if chip == "H100-SXM" else set(second["devices"])
    assert own | all_devices <= devices
    assert not devices & {"'0'", "/dev/davinci0", "/dev/xpu0"}
    assert any("VISIBLE_DEVICES" in name for name in second["environment"]) == (not own)


def test_a_single_server_of_a_compose_file_listens_on_all_addresses(tmp_path: Path) -> None:
    (service,) = yaml.safe_load(only(exported(server(tmp_path), "compose", "instances=1")))["services"].values()
    words = service["entrypoint"]
    assert words[words.index("--host") + 1] == "0.0.0.0"


def test_the_script_of_a_server_starts_the_engine_of_another_machine(tmp_path: Path) -> None:
    words = started(only(exported(server(tmp_path), "vllm", "instances=1, tp=4")), tmp_path, "vllm")
    assert words[:2] == ["serve", str(tmp_path / "model")]
    assert words[words.index("--tensor-parallel-size") + 1] == "4"
    assert "--enforce-eager" in words


def test_a_port_inside_of_a_word_is_set(tmp_path: Path) -> None:
    """MindIE's configuration is a word of its command."""
    spec = server(tmp_path, "mindie", {}, cluster={"chip": "910B3", "devices_per_node": 4}, auto_tuner={})
    words = started(only(exported(spec, "mindie", "instances=1, tp=4")), tmp_path, "sh")
    assert json.loads(words[3])["ServerConfig"]["port"] == 8000


def test_the_hosts_of_a_server_know_their_own_address(tmp_path: Path) -> None:
    space = {"tensor_model_parallel_size": [1, 2], "pipeline_model_parallel_size": [1, 2]}
    cluster, candidate = {"chip": "H100-SXM", "nodes": 2, "devices_per_node": 2}, "tp=2, pp=2"
    spec = server(tmp_path, cluster=cluster, auto_tuner={"space": space})
    script = only(exported(spec, "slurm", candidate))
    recorder = 'case "$*" in *--headless) echo "$VLLM_HOST_IP $MASTER_ADDR" > address;; esac'
    program(tmp_path / "bin" / "vllm", recorder)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    environment = {"PATH": path, "HOSTS": "127.0.0.1\n127.0.0.2", "NODE_RANK": "1"}
    subprocess.run(["bash", "-c", script], env=environment, cwd=tmp_path, timeout=60)  # it ends with the server
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # other hosts cannot reach a loopback address
        own = "127.0.0.1" if probe.connect_ex(("192.0.2.1", 9)) else probe.getsockname()[0]
    assert (tmp_path / "address").read_text() == f"{own} 127.0.0.1\n"
    manifest = next(yaml.safe_load_all(only(exported(spec, "kubernetes", candidate, options={"image": "image:1"}))))
    variables = [{each["name"]: each.get("value") for each in pod["env"]} for (pod,) in found(manifest, "containers")]
    assert [each["VLLM_HOST_IP"] for each in variables] == ["$(POD_IP)"] * 2


def test_a_tree_of_flagscale_has_the_same_arguments(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    spec = written(tmp_path, SMALL_TRAINING)
    words = started(only(exported(spec, "megatron")), tmp_path, "torchrun", NODE_RANK="0", MASTER_ADDR="a")
    exported(spec, "flagscale")
    command = api.read_tree(tmp_path / "out-flagscale", "train").data["train"]["command"]
    places = (next(place for place, word in enumerate(each) if word.endswith(".py")) for each in (command, words))
    tree, script = (_pairs(each[place + 1 :]) for each, place in zip((command, words), places, strict=True))
    folders = {name for name in tree if name.endswith(("-dir", "save", "load"))}
    assert {name: value for name, value in tree.items() if name not in folders} == script


def _pairs(words: list[str]) -> dict[str, list[Any]]:
    pairs: dict[str, list[Any]] = {}
    for word in words:
        if word.startswith("--"):
            values = pairs.setdefault(word, [])
        else:
            values.append(float(word) if word[:1].isdigit() and "," not in word else word)
    return pairs


def test_a_tree_of_flagscale_holds_no_secret_and_no_device_of_this_host(tmp_path: Path) -> None:
    data = {**SMALL_TRAINING, "envs": {"HF_TOKEN": "hidden-4711", "MODE": "{interface}", "KEPT": "1"}}
    files = exported(written(tmp_path, data), "flagscale")
    text = "".join(files.values())
    assert "hidden-4711" not in text
    assert "{interface}" not in text
    envs = [yaml.safe_load(each).get("experiment", {}).get("envs", {}) for each in files.values()]
    assert any(each.get("KEPT") == "1" for each in envs)
    assert all("HF_TOKEN" in each and "MODE" in each for each in files.values() if "# Set on each host" in each)
    assert "# Set on each host" in text


def test_a_served_tree_of_flagscale_is_read_as_the_same_server(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    exported(server(tmp_path), "flagscale", "instances=2, tp=2, max_num_seqs=64")
    data = api.read_tree(tmp_path / "out-flagscale", "serve").data
    assert data["serve"]["engine"] == "vllm"
    assert data["model"] == str(tmp_path / "model")
    assert data["serve"]["engine_args"] == {"tensor_parallel_size": 2, "max_num_seqs": 64, "enforce_eager": True}


@pytest.mark.parametrize(("target", "candidate"), [("compose", "best"), ("kubernetes", "best"), ("megatron", "tp=3")])
def test_what_cannot_be_exported_is_a_usage_error_and_leaves_no_folder(
    target: str, candidate: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError):
        exported(written(tmp_path, SMALL_TRAINING), target, candidate)
    assert not list(tmp_path.glob("out-*"))


@pytest.mark.costly
@pytest.mark.parametrize("job", ["training", "server"])
def test_each_option_changes_the_files_or_is_refused(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pods.yaml").write_text("hostIPC: true\n")
    spec, engine = (server(tmp_path), "vllm") if job == "server" else (written(tmp_path, SMALL_TRAINING), "megatron")
    monkeypatch.setattr(targets, "load_snapshot", lru_cache(targets.load_snapshot))  # it is planned once
    given = {"kind": "volcano", "volume": "d:/d", "queue": "q", "rdma": "r/x", "user": "1000", "replicas": "2"}
    given |= {"image": "other:1.3.1", "resource": "r", "pods": str(tmp_path / "pods.yaml"), "restarts": "7"}

    def files(target: str, **options: str) -> list[str]:
        needed = {"image": "i:1.3.1"} if target in ("kubernetes", "dynamo") else {}
        made = api.export(spec, target, output=tmp_path / "out", options={**needed, **options}).files
        texts = [file.read_text() for file in made]
        shutil.rmtree(tmp_path / "out")
        return texts

    exporters = {name: each.targets[name] for name, each in targets._exporters(engine).items() if each}
    of_others = {"server": ("kind", "restarts"), "training": ("replicas",)}[job]
    for target, read in exporters.items():
        if (job, target) != ("training", "dynamo"):
            plain = files(target)
            assert all(files(target, **{name: given[name]}) != plain for name in read if name not in of_others), target
    for target, name in (("slurm", "image"), (engine, "user"), *(("kubernetes", each) for each in of_others)):
        with pytest.raises(UsageError, match=name):
            files(target, **{name: given[name]})


@pytest.mark.parametrize("place", ["new/deeper", "."])
def test_an_interrupted_export_leaves_the_folder_as_it_was(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    spec, write, files = server(tmp_path), Path.write_text, list[Path]()

    def interrupted(file: Path, *arguments: Any, **options: Any) -> int:
        files.append(file)
        if len(files) == 2:
            raise KeyboardInterrupt
        return write(file, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        api.export(spec, "flagscale", "instances=2, tp=2", output=place)
    assert not list(Path().rglob("*"))


def test_a_full_folder_is_not_overwritten(tmp_path: Path) -> None:
    spec = written(tmp_path, SMALL_TRAINING)
    exported(spec, "megatron")
    with pytest.raises(UsageError):
        exported(spec, "megatron")


@needs_megatron_lm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_exported_training_really_starts(tmp_path: Path) -> None:
    data = {**SMALL_TRAINING, "cluster": {"chip": "cpu", "devices_per_node": 2, "memory_per_device": "4GiB"}}
    script = only(exported(written(tmp_path, data), "megatron", "tp=2, sp, mbs=2"))
    (tmp_path / "job.sh").write_text(script.replace("--mock-data\n", f"--mock-data\n{ON_CPU}\n"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment["PYTHONPATH"] = ":".join(
        map(str, (SHIM, MEGATRON, PACKAGES / "flag_scale", PACKAGES, os.environ["PYTHONPATH"]))
    )
    process = subprocess.Popen(
        ["bash", tmp_path / "job.sh"],
        cwd=MEGATRON,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    seen, deadline = "", time.monotonic() + 200
    try:
        while "iteration        3/     100" not in seen and time.monotonic() < deadline:
            line = process.stdout.readline()
            assert line, seen[-3000:]
            seen += line
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate()
    assert "iteration        3/     100" in seen


@pytest.mark.costly
@pytest.mark.timeout(120)
def test_an_exported_llama_server_really_answers(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    weights = tmp_path / "model.gguf"
    subprocess.run([sys.executable, ROOT / "examples" / "tiny_gguf.py", weights], check=True, timeout=60)
    data = yaml.safe_load((ROOT / "examples" / "serve-cpu.yaml").read_text())
    data["serve"]["weights"] = str(weights)
    exported(written(tmp_path, data), "llamacpp", "instances=1, parallel=4")
    program(tmp_path / "llama-server", f'exec {sys.executable} -m flagcore_llamacpp.server "$@"')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen([tmp_path / "out-llamacpp" / "job.sh"], env=environment, start_new_session=True)
    url = "http://127.0.0.1:8000"
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.3)
        body = json.dumps({"prompt": "a", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


PAIRS = "prefill_decode=2xtp1+1xtp2"
DYNAMO = {**json.loads((EXPORTED / "dynamo.json").read_text()), "definitions": SCHEMAS["definitions"]}
"""The fields that exports may use, from `deploy/operator/api/v1beta1/*_types.go` of github.com/ai-dynamo/dynamo, from
which its CRD is generated (commits 0fddc01b and 006b6e10, 2026)."""


@pytest.mark.parametrize(
    ("engine", "candidate", "workers"),
    [
        ("vllm", "instances=2, tp=2", {"worker": (2, ["--tensor-parallel-size", "2"])}),
        ("vllm", "instances=1, tp=8", {"worker": (1, ["--tensor-parallel-size", "8"])}),
        (
            "vllm",
            PAIRS,
            {"prefill": (2, ["--disaggregation-mode", "prefill"]), "decode": (1, ["--kv-transfer-config"])},
        ),
        ("sglang", PAIRS, {"prefill": (2, ["--host", "0.0.0.0"]), "decode": (1, ["--disaggregation-mode", "decode"])}),
    ],
)
def test_a_graph_of_dynamo_fits_its_fields(
    engine: str, candidate: str, workers: dict[str, tuple[int, list[str]]], tmp_path: Path
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    hosts = 2 if candidate.endswith("8") else 1
    spec = server(tmp_path, cluster={"chip": "H100-SXM", "nodes": hosts, "devices_per_node": 4})
    data = json.loads(spec.read_text())
    space = {"prefill_decode": [None, "2xtp1+1xtp2"], "instances": "auto"}
    data["auto_tuner"] = {"space": {**space, "tensor_model_parallel_size": "auto"}}
    data["serve"] |= {
        "engine": engine,
        "engine_args": {"served_model_name": "$(HF_TOKEN)", "chat_template": "chat.jinja"},
    }
    options = {"image": "runtime:1.3.1", "volume": "models:/models"}
    graph = yaml.safe_load(only(exported(written(tmp_path, data), "dynamo", candidate, options=options)))
    jsonschema.Draft7Validator(DYNAMO).validate(graph)
    frontend, *components = graph["spec"]["components"]
    assert frontend["type"] == "frontend"
    assert {each["name"]: each["replicas"] for each in components} == {name: n for name, (n, _args) in workers.items()}
    for each in components:
        assert "$$(HF_TOKEN)" in each["podTemplate"]["spec"]["containers"][0]["args"]  # Kubernetes reads $(HF_TOKEN)
        (container,) = each["podTemplate"]["spec"]["containers"]
        assert each.get("multinode", {"nodeCount": 1})["nodeCount"] == hosts
        assert container["command"] == ["python3", "-m", f"dynamo.{engine}"]
        assert set(workers[each["name"]][1]) <= set(container["args"])
        assert not {"--port", "--nnodes", "127.0.0.1"} & set(container["args"])
        assert ("--chat-template" in container["args"]) == (engine == "sglang")
        assert not any("DEVICES" in variable["name"] for variable in container["env"])


@pytest.mark.parametrize(("router", "mode"), [("prefix_aware", "kv"), ("least_requests", "least-loaded")])
def test_dynamo_routes_as_trials(router: str, mode: str, tmp_path: Path) -> None:
    spec = server(tmp_path, cluster={"chip": "H100-SXM", "nodes": 1, "devices_per_node": 4})
    data = json.loads(spec.read_text())
    data["serve"] |= {"engine": "vllm", "router": router}
    graph = yaml.safe_load(
        only(exported(written(tmp_path, data), "dynamo", "instances=2", options={"image": "runtime:1.3.1"}))
    )
    (container,) = graph["spec"]["components"][0]["podTemplate"]["spec"]["containers"]
    assert {"name": "DYN_ROUTER_MODE", "value": mode} in container["env"]
