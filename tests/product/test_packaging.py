"""What the distributions ask for: folders from a checkout, versions from a release."""

import json
import shutil
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from flagcore import __version__
from tests.test_import_contracts import settings

ROOT = Path(__file__).resolve().parents[2]
VENDORS = (
    *("nvidia", "amd", "metax", "iluvatar", "cambricon", "ascend", "mthreads", "hygon", "kunlunxin", "enflame"),
    "thead",
)
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


def test_a_checkout_installs_plugins_from_folders(checkout: dict[str, object]) -> None:
    needs = str(checkout["dependencies"]) + str(checkout["optional-dependencies"])
    for folder in PARTS:
        assert f"flagcore-{folder.name} @ {folder.as_uri()}" in needs


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
