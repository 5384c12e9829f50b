"""Every export of ten plans and runs is accepted by the parser or schema of its tool, or refused with one message."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_llamacpp import engine as llamacpp
from flagcore_serving.space.knobs import arguments

from engines.megatron.tests.command.real import MEGATRON, PACKAGES, SHIM, needs_megatron_lm
from extras.kubernetes.tests.test_manifest import CRDS, problems, require_restricted
from flagcore import api
from flagcore.api.commands import export as targets
from flagcore.errors import FlagError
from tests.product.api.stand_ins import start_all
from tests.product.api.test_export import DYNAMO, SCHEMAS, server, started, written
from tests.product.block_checks import ROOT
from tests.product.cli.conftest import Project
from tests.product.tasks import LLAMA_8B

TARGETS = ("megatron", "flagscale", "vllm", "sglang", "llamacpp", "slurm", "kubernetes", "compose", "dynamo")
EXPERTS = {**LLAMA_8B, "num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 14336}
RELEASE = "0.15"
"""The release of Megatron-LM in build/megatron-lm."""
SPACE = {"context_parallel_size": 1, "pipeline_model_parallel_size": [1, 2], "micro_batch_size": [1, 2]}
ON_NODES = {"num_layers_per_virtual_pipeline_stage": None, "use_recompute": False}
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
PARSE_VLLM = """\
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
for words in json.load(sys.stdin):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    args.model = args.model_tag
    AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=args.headless)
"""
SGLANG = ROOT / "build" / "sglang"
PARSE_SGLANG = """\
import argparse, importlib.abc, importlib.machinery, json, sys, types
from unittest.mock import MagicMock
from transformers import AutoProcessor  # it looks for optional packages before they are replaced

class Missing(types.ModuleType):  # the compiled packages of SGLang
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_, **__: None}) if name[0].isupper() else MagicMock()

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    names = (
        "sgl_kernel orjson pybase64 torchvision soundfile decord torchao flashinfer pynvml av deep_gemm IPython nvidia "
        "smg_grpc_proto grpc_health apache_tvm_ffi kernels quack hf_transfer modelscope litellm torch_memory_saver"
    ).split()
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None
    def create_module(self, spec):
        return Missing(spec.name)
    def exec_module(self, module):
        module.__path__ = []

sys.meta_path.append(Finder())
from sglang.srt.server_args import ServerArgs
for words in json.load(sys.stdin):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    args = ServerArgs.from_cli_args(parser.parse_args(words))
    args.device = "cpu"
    args.resolve_once()
    args.check_server_args()
"""
LLAMA_SERVER = shutil.which("llama-server")
PARSE_MEGATRON = """\
import json, os, sys
from megatron.training.arguments import parse_args, validate_args
sizes = []
for world, words in json.load(sys.stdin):
    os.environ["WORLD_SIZE"], sys.argv = str(world), ["pretrain_gpt.py", *words]
    args = parse_args()
    validate_args(args)
    sizes.append(args.data_parallel_size * args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
print(json.dumps(sizes))
"""
NODES = 32


def training(model: dict[str, Any], cluster: dict[str, Any], space: dict[str, Any]) -> dict[str, Any]:
    train = {"engine": "megatron", "engine_version": RELEASE, "seq_length": 4096, "global_batch_size": 128}
    return {
        "model": model,
        "cluster": cluster,
        "train": {**train, "precision": "bf16"},
        "auto_tuner": {"space": {**SPACE, **ON_NODES, **space}},
    }


def h100(nodes: int = 1, devices: int = 8, **more: Any) -> dict[str, Any]:
    return {"chip": "H100-SXM", "nodes": nodes, "devices_per_node": devices, **more}


def two_chips() -> dict[str, Any]:
    return {"groups": [{**h100(), "chip": chip, "nic_bytes_per_second": 5e10} for chip in ("H100-SXM", "C550")]}


def serving(folder: Path, engine: str, space: dict[str, Any], cluster: dict[str, Any], **tuner: Any) -> Path:
    spec = server(folder, engine, {}, cluster=cluster, auto_tuner={"space": space, **tuner})
    file = folder / "model" / "config.json"  # SGLang reads these keys, too
    more = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 32768}
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    return spec


def llama(folder: Path) -> Path:
    data = yaml.safe_load((ROOT / "examples" / "serve-cpu.yaml").read_text())
    data["serve"]["weights"] = str(folder / "model.gguf")
    subprocess.run([sys.executable, ROOT / "examples" / "tiny_gguf.py", folder / "model.gguf"], check=True, timeout=60)
    return written(folder, data)


def measured_run(folder: Path) -> Path:
    api.tune(Project(folder).spec(control={"max_trials": 2, "repeats": 0}), run_dir=folder / "job")
    return folder / "job"


def over_hosts(folder: Path, engine: str, space: dict[str, Any], chip: str = "H100-SXM") -> Path:
    """A server on two hosts whose names the target determines."""
    return serving(folder, engine, {"instances": "auto", **space}, {**h100(2, 4), "chip": chip}, launcher="slurm")


def on_two_hosts(folder: Path) -> Path:
    (folder / "hosts").write_text("a slots=4\nb slots=4\n")
    cluster = h100(2, 4, hostfile=str(folder / "hosts"))
    return serving(folder, "vllm", {"tensor_model_parallel_size": 8}, cluster, launcher="ssh")


RUNS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "dense": (lambda folder: written(folder, training(LLAMA_8B, h100(), {})), "megatron flagscale slurm kubernetes"),
    "experts": (lambda folder: written(folder, training(EXPERTS, h100(2), {})), "megatron flagscale slurm kubernetes"),
    "mixed chips": (
        lambda folder: written(
            folder,
            training(LLAMA_8B, two_chips(), {"meshes": ["H100-SXM tp2 dp4 + C550 tp2 dp4"], "use_recompute": "auto"}),
        ),
        "flagscale",
    ),
    "own command": (measured_run, "megatron slurm kubernetes"),
    "many nodes": (
        lambda folder: written(folder, training(LLAMA_8B, h100(NODES), {})),
        "megatron flagscale slurm kubernetes",
    ),
    "vllm": (
        lambda folder: serving(folder, "vllm", {"instances": 2, "tensor_model_parallel_size": 2}, h100(devices=4)),
        "vllm flagscale slurm kubernetes compose dynamo",
    ),
    "sglang": (
        lambda folder: serving(folder, "sglang", {"instances": 1, "tensor_model_parallel_size": 4}, h100(devices=4)),
        "sglang flagscale slurm kubernetes compose dynamo",
    ),
    "llamacpp": (llama, "llamacpp flagscale slurm kubernetes compose"),
    "prefill and decode apart": (
        lambda folder: serving(folder, "vllm", {"prefill_decode": ["2xtp1+1xtp2"]}, h100(devices=4)),
        "vllm slurm kubernetes compose dynamo",
    ),
    "server on two hosts": (on_two_hosts, "vllm slurm kubernetes dynamo"),
    "instances on two hosts": (
        lambda folder: over_hosts(folder, "vllm", {"tensor_model_parallel_size": 4}),
        "vllm flagscale slurm kubernetes dynamo",
    ),
    "other vendor": (
        lambda folder: over_hosts(folder, "sglang", {"tensor_model_parallel_size": 8}, "910B3"),
        "sglang slurm kubernetes dynamo",
    ),
}
"""How each spec or run is made, and the targets that it has."""
SHORT = ("dense", "prefill and decode apart", "server on two hosts")


class Exports:
    """Makes each run once, and all its exports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, dict[str, Path]] = {}
        self.refused: dict[str, dict[str, FlagError]] = {}

    def __call__(self, run: str) -> dict[str, Path]:
        """Return the folder of each export of a run."""
        if run not in self.made:
            place = self.folder / run.replace(" ", "-")
            place.mkdir()
            where = RUNS[run][0](place)
            self.made[run], self.refused[run] = {}, {}
            for target in TARGETS:
                options = {"image": "image:1"} if target in ("kubernetes", "dynamo") else {}
                options |= {"user": "1000"} if target == "kubernetes" else {}
                output = place / target
                try:
                    api.export(where, target, output=output, name="job", options=options)
                except FlagError as error:
                    self.refused[run][target] = error
                else:
                    self.made[run][target] = output
        return self.made[run]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exports]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "load_snapshot", lru_cache(targets.load_snapshot))  # each run is planned once
        yield Exports(tmp_path_factory.mktemp("exports"))


def by_length(runs: tuple[str, ...]) -> list[Any]:
    return [run if run in SHORT else pytest.param(run, marks=pytest.mark.long) for run in runs]


@pytest.mark.parametrize("run", by_length(tuple(RUNS)))
def test_files_of_every_target_are_well_formed(run: str, exports: Exports) -> None:
    made = exports(run)
    assert set(made) == set(RUNS[run][1].split())
    assert all(len(str(error).splitlines()) == 1 for error in exports.refused[run].values())
    for target, folder in made.items():
        check = {"kubernetes": of_kubernetes, "compose": of_compose, "dynamo": of_dynamo, "flagscale": of_flagscale}
        check.get(target, of_shell)(folder)
        for file in (each for each in folder.rglob("*") if each.is_file() and run != "own command"):
            own = (sys.prefix, str(folder), "-m flagcore", "{interface}", "{adapters}")
            assert not [word for word in own if word in file.read_text()]
            assert ("--master-addr a" in file.read_text()) <= (target == "vllm")  # only a script has the spec's hosts


@pytest.mark.costly
@pytest.mark.parametrize(
    "run", by_length(tuple(run for run in RUNS if run not in ("own command", "mixed chips", "many nodes")))
)
def test_every_export_starts_on_stand_ins(run: str, exports: Exports, tmp_path: Path) -> None:
    made = exports(run)
    cluster = yaml.safe_load((exports.folder / run.replace(" ", "-") / "job.yaml").read_text())["cluster"]
    for folder in made.values():
        start_all(folder, tmp_path, cluster.get("nodes", 1))


def of_shell(folder: Path) -> None:
    """Bash, and ShellCheck where it is installed, read all scripts."""
    scripts = [file for file in sorted(folder.iterdir()) if file.read_text().startswith("#!")]
    assert scripts
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
        if checker:
            command = [checker, "--severity=warning", "--exclude=SC2054", script]  # 99,1,0 is one value
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout


def of_kubernetes(folder: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for each in yaml.safe_load_all((folder / "job.yaml").read_text()):
        require_restricted(each)
        name = f"{each['apiVersion']} {each['kind']}"
        if name in CRDS:
            assert list(problems(CRDS[name], each)) == []
        else:
            schema = {"$ref": f"#/definitions/{SCHEMAS['kinds'][name]}", "definitions": SCHEMAS["definitions"]}
            jsonschema.Draft7Validator(schema).validate(each)
    for command in shell_commands(folder / "job.yaml"):
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)


def of_compose(folder: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    data = yaml.safe_load((folder / "compose.yaml").read_text())
    jsonschema.Draft7Validator(SCHEMAS["compose"]).validate(data)


def of_dynamo(folder: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator(DYNAMO).validate(yaml.safe_load((folder / "job.yaml").read_text()))


def of_flagscale(folder: Path) -> None:
    pytest.importorskip("hydra")
    (top,) = (file.stem for file in folder.glob("*.yaml"))
    assert api.read_tree(folder, top).data[top]


def shell_commands(manifest: Path) -> list[str]:
    """Return the shell commands of the containers of a manifest."""
    found: list[str] = []

    def visit(part: Any) -> None:
        if isinstance(part, dict):
            if isinstance(command := part.get("command"), list) and command[:2] == ["sh", "-c"]:
                found.append(command[2])
            part = list(part.values())
        if isinstance(part, list):
            for each in part:
                visit(each)

    visit(list(yaml.safe_load_all(manifest.read_text())))
    return found


@needs_megatron_lm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_megatrons_own_parser_accepts_the_arguments_of_every_training(exports: Exports, tmp_path: Path) -> None:
    jobs, worlds = [], []
    for run in ("dense", "experts", "many nodes"):
        for target in ("megatron", "slurm", "kubernetes"):
            files = [file for file in sorted(exports(run)[target].iterdir()) if file.suffix != ".yaml"]
            scripts = [file.read_text() for file in files] or shell_commands(exports(run)[target] / "job.yaml")[:1]
            words = started(scripts[0], tmp_path, "torchrun", NODE_RANK="0", MASTER_ADDR="first")
            program = words.index("pretrain_gpt.py")
            sizes = dict(word[2:].split("=", 1) for word in words[:program] if "=" in word)
            worlds.append(int(sizes.get("nnodes", 1)) * int(sizes["nproc-per-node"]))
            jobs.append((worlds[-1], [word for word in words[program + 1 :] if word != "--tp-comm-overlap"]))
    path = ":".join(map(str, (SHIM, MEGATRON, PACKAGES / "flag_scale", PACKAGES, os.environ["PYTHONPATH"])))
    environment = {**os.environ, "PYTHONPATH": path, "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, "-c", PARSE_MEGATRON]
    done = subprocess.run(command, input=json.dumps(jobs), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == worlds


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM's CPU build: make setup-vllm")
def test_vllms_own_parser_accepts_the_arguments_of_every_server(exports: Exports) -> None:
    commands = []
    for run in ("vllm", "prefill and decode apart", "server on two hosts"):
        for target in ("vllm", "slurm"):
            for file in exports(run).get(target, Path()).glob("*.sh"):
                commands += [line for line in file.read_text().splitlines() if " vllm serve " in line]
        if "kubernetes" in exports(run):
            pods = shell_commands(exports(run)["kubernetes"] / "job.yaml")
            commands += [each.replace("$LWS_WORKER_INDEX", "1") for each in pods if "vllm serve" in each]
    listed = [words[words.index("serve") + 1 :] for words in (shlex.split(each.rstrip(" &")) for each in commands)]
    for run in ("vllm", "prefill and decode apart"):
        services = yaml.safe_load((exports(run)["compose"] / "compose.yaml").read_text())["services"].values()
        listed += [each["entrypoint"][2:] for each in services if each.get("entrypoint", [""])[0] == "vllm"]
    assert len(listed) >= 12
    parsed(PARSE_VLLM, listed)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (VLLM.exists() and SGLANG.exists()), reason="needs SGLang: make build/sglang")
def test_sglangs_own_parser_accepts_the_arguments_of_every_server(exports: Exports) -> None:
    listed = []
    for run in ("sglang", "other vendor"):
        for target in ("sglang", "slurm"):
            lines = next(exports(run)[target].iterdir()).read_text().replace("\\\n", " ").splitlines()
            found = [line.partition("sglang.launch_server")[2] for line in lines if "sglang.launch_server" in line]
            listed += [shlex.split(each.rstrip(" &")) for each in found]
    assert len(listed) == 6
    parsed(PARSE_SGLANG, listed)


@pytest.mark.long
@pytest.mark.skipif(LLAMA_SERVER is None, reason="needs llama-server on the PATH")
def test_llama_servers_own_parser_accepts_the_arguments_of_every_server(exports: Exports) -> None:
    made = exports("llamacpp")
    files = [file for target in ("llamacpp", "slurm") for file in made[target].iterdir()]
    lines = [line for file in files for line in re.sub(r"\\\n *", "", file.read_text()).splitlines()]
    lines += shell_commands(made["kubernetes"] / "job.yaml")
    words = [shlex.split(each.partition("llama-server")[2].rstrip(" &")) for each in lines if "llama-server --" in each]
    services = yaml.safe_load((made["compose"] / "compose.yaml").read_text())["services"].values()
    words += [each["entrypoint"][1:] for each in services if each.get("entrypoint", [""])[0] == "llama-server"]
    assert len(words) >= 7
    settings = [(knob, each) for knob in llamacpp.KNOBS if knob.name != llamacpp.CONTEXT for each in knob.words or (1,)]
    words += [[*arguments([knob], {knob.name: each})] for knob, each in settings]
    for each in words:
        command = [str(LLAMA_SERVER), "--model", "/missing.gguf", *each]  # it ends once its arguments are read
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert not re.search("invalid argument|error while handling", done.stderr), (each, done.stderr)


def parsed(program: str, commands: list[list[str]]) -> None:
    """Run a program that parses commands in the environment with vLLM's CPU build."""
    environment = {**os.environ, "PYTHONPATH": str(SGLANG), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [VLLM, "-c", program], input=json.dumps(commands), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
