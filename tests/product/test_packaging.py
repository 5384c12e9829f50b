"""What the distributions ask for: wheels of the folders from a checkout, versions from a release. Secrets of
configurations, scripts and manifests get into no export and imported spec that others can read."""

import json
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from email import message_from_bytes, message_from_string
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname
from zipfile import ZipFile

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from flagcore import __version__, api
from flagcore.errors import UsageError
from hatch_build import CustomMetadataHook
from tests.checks import SHELL, VARIABLES, WORDS, leaking_files, leaks, secret
from tests.product.api.test_export import SMALL_TRAINING, server, written
from tests.product.cli.conftest import Flag, flag  # noqa: F401 (fixture)
from tests.product.tasks import SHAPE, VENDORS
from tests.test_import_contracts import settings

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = sorted(file.parent for room in ("engines", "extras") for file in ROOT.glob(f"{room}/*/pyproject.toml"))
PARTS = [*sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml")), *EXTRAS]


@pytest.fixture(scope="module")
def checkout() -> dict[str, object]:
    """The metadata that pip sees in this checkout."""
    command = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> tarfile.TarFile:
    """A source distribution made from this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return tarfile.open(next(folder.glob("*.tar.gz")))


def parts(metadata: dict[str, Any]) -> dict[str, Path]:
    """The files or folders that the metadata of a checkout requires, by part."""
    needs = {*metadata["dependencies"], *chain.from_iterable(metadata["optional-dependencies"].values())}
    asked = [Requirement(each) for each in needs if each.startswith("flagcore-")]
    return {each.name.removeprefix("flagcore-"): Path(url2pathname(urlsplit(each.url).path)) for each in asked}


def test_a_checkout_requires_wheels_of_its_parts(checkout: dict[str, Any]) -> None:
    wheels = parts(checkout)
    assert set(wheels) == {folder.name for folder in PARTS}
    for name, wheel in wheels.items():
        distribution, version, *_ = parse_wheel_filename(wheel.name)
        assert (distribution, version.public) == (f"flagcore-{name}", __version__)
        with ZipFile(wheel) as archive:
            text = archive.read(f"flagcore_{name.replace('-', '_')}-{version}.dist-info/METADATA").decode()
        assert message_from_string(text)["Version"] == str(version)


def few_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CustomMetadataHook:
    """Return the hook of a copy of the checkout with two parts."""
    for source in ("flagcore/__init__.py", "plugins/cpu", "engines/servers"):
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        else:
            shutil.copy(ROOT / source, tmp_path / source)
    monkeypatch.setattr("hatch_build.INSTALLED", {"plugins": ("cpu",), "engines": ("servers",)})
    return CustomMetadataHook(str(tmp_path), {})


def cpu_wheel(hook: CustomMetadataHook) -> Path:
    metadata: dict[str, Any] = {}
    hook.update(metadata)
    return parts({**metadata, "optional-dependencies": {}})["cpu"]


def test_a_changed_part_has_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip keeps what is installed of a local wheel with the same version."""
    hook = few_parts(tmp_path, monkeypatch)
    first = cpu_wheel(hook)
    made = first.stat().st_mtime_ns
    assert (cpu_wheel(hook), first.stat().st_mtime_ns) == (first, made)
    with (tmp_path / "plugins" / "cpu" / "flagcore_cpu" / "hooks.py").open("a") as file:
        file.write("# changed\n")
    second = cpu_wheel(hook)
    assert second != first
    assert [*second.parent.glob("flagcore_cpu-*")] == [second]


def test_an_editable_wheel_refers_to_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("editables", reason="editables is not installed: `make setup`")
    monkeypatch.setenv("FLAGCORE_PARTS", "editable")
    with ZipFile(cpu_wheel(few_parts(tmp_path, monkeypatch))) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".pth")]
        assert archive.read(path).decode().strip() == str(tmp_path / "plugins" / "cpu")


def test_a_checkout_that_cannot_be_written_requires_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = few_parts(tmp_path, monkeypatch)
    (tmp_path / "build").touch()
    assert cpu_wheel(hook) == tmp_path / "plugins" / "cpu"


def test_a_release_requires_plugins_of_its_version(sdist: tarfile.TarFile) -> None:
    file = sdist.extractfile(f"flagcore-{__version__}/PKG-INFO")
    assert file is not None
    needs = message_from_bytes(file.read()).get_all("Requires-Dist", [])
    assert f"flagcore-cpu=={__version__}" in needs
    for name in (*VENDORS, *(folder.name for folder in EXTRAS)):
        assert f"flagcore-{name}=={__version__}" in {need.partition(";")[0] for need in needs}
    assert not [needed for needed in needs if "file:" in needed]


def test_release_holds_the_package_and_no_other_part(sdist: tarfile.TarFile) -> None:
    names = sdist.getnames()
    assert f"flagcore-{__version__}/flagcore/tuner/loop.py" in names
    assert f"flagcore-{__version__}/flagcore/py.typed" in names
    assert not [name for name in names if name.split("/")[1] in ("plugins", "extras")]


def test_extra_all_has_no_engine(checkout: dict[str, object]) -> None:
    """Engines require different releases of torch."""
    extras = checkout["optional-dependencies"]
    assert isinstance(extras, dict)
    assert {each for name in (*VENDORS, "flagscale", "kubernetes", "ray") for each in extras[name]} <= set(
        extras["all"]
    )
    engines = ("megatron", "vllm", "sglang", "llamacpp", "lmdeploy")
    assert not {each for engine in engines for each in extras[engine]} & set(extras["all"])


def test_dockerfile_copies_what_an_installation_needs(tmp_path: Path) -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    steps = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [source for name, *words in steps if name == "COPY" for source in words[:-1]]
    assert set(copied) == kept
    for source in copied:
        whole = ROOT / source
        if whole.is_dir():
            shutil.copytree(whole, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        else:
            shutil.copy(whole, tmp_path)
    command = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    extras = json.loads(done.stdout)["optional-dependencies"]
    (default,) = [words[0].removeprefix("EXTRAS=") for name, *words in steps if name == "ARG" and "EXTRAS=" in words[0]]
    assert default in extras
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=tmp_path, check=True, timeout=120)


@pytest.mark.parametrize("folder", PARTS, ids=lambda folder: folder.name)
def test_every_distribution_has_the_version_of_the_core_and_no_tool_settings(folder: Path) -> None:
    content = settings(folder / "pyproject.toml")
    assert content["project"]["version"] == __version__
    assert set(content["tool"]) == {"hatch"}, "tool settings belong to the root"


@pytest.mark.parametrize("folder", EXTRAS, ids=lambda folder: folder.name)
def test_the_wheel_of_an_extra_has_all_files_of_its_package(folder: Path) -> None:
    """The conformance kit checks it of plugins."""
    packed = {file.distribution_path for file in WheelBuilder(str(folder)).recurse_included_files()}
    (package,) = folder.glob("flagcore_*")
    files = [file for file in package.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert {file.relative_to(folder).as_posix() for file in files} <= packed


@pytest.mark.parametrize("command", [("check",), ("new", "acme")], ids=lambda command: command[0])
def test_the_commands_of_plugin_authors_name_their_extra(tmp_path: Path, command: tuple[str, ...]) -> None:
    code = "import sys; sys.modules['flagcore_testing'] = None; from flagcore.cli import main; main()"
    words = [sys.executable, "-c", code, "plugins", *command]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "flagcore[testing]" in done.stderr


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


@pytest.mark.costly
def test_no_export_has_a_secret_that_others_can_read(folder: Path) -> None:
    """A configuration with secrets of the user's is written for its owner only. A command with one is refused."""
    for number, (spec, targets) in enumerate(specs(folder)):
        for target in targets:
            options = {"image": "i:1"} if target in ("kubernetes", "dynamo", "compose") else {}
            done = api.export(spec, target, output=folder / f"out-{number}-{target}", options=options)
            assert leaks(str(done.notes)) == []
    assert leaking_files(folder, inputs={*FILES, "own.sh", "job.yaml"}) == {}
    private = {each.name for each in folder.rglob("out-*/*") if each.is_file() and each.stat().st_mode & 0o077 == 0}
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
