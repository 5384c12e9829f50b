"""What the distributions ask for: folders from a checkout, versions from a release."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path

import pytest

from flagcore import __version__

ROOT = Path(__file__).resolve().parent.parent
VENDORS = ("nvidia", "amd", "metax", "iluvatar", "cambricon", "ascend", "mthreads", "hygon", "kunlunxin")


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
    for vendor in ("cpu", *VENDORS):
        assert f"flagcore-{vendor} @ {(ROOT / 'plugins' / vendor).as_uri()}" in needs


def test_a_release_requires_plugins_of_its_version(sdist: tarfile.TarFile) -> None:
    file = sdist.extractfile(f"flagcore-{__version__}/PKG-INFO")
    assert file is not None
    needs = message_from_bytes(file.read()).get_all("Requires-Dist", [])
    assert f"flagcore-cpu=={__version__}" in needs
    for vendor in VENDORS:
        assert f"flagcore-{vendor}=={__version__}; extra == '{vendor}'" in needs
    assert not [need for need in needs if "file:" in need]


def test_release_holds_the_package_and_no_plugin(sdist: tarfile.TarFile) -> None:
    names = sdist.getnames()
    assert f"flagcore-{__version__}/flagcore/loop.py" in names
    assert f"flagcore-{__version__}/flagcore/py.typed" in names
    assert not [name for name in names if "/plugins/" in name and "/flagcore/plugins/" not in name]


def test_every_documented_extra_exists(checkout: dict[str, object]) -> None:
    extras = checkout["optional-dependencies"]
    assert isinstance(extras, dict)
    assert {*VENDORS, "megatron", "vllm", "sglang", "llamacpp", "flagscale", "dev", "all"} <= set(extras)


@pytest.mark.parametrize("vendor", ["cpu", *VENDORS])
def test_every_plugin_has_the_version_of_the_core(vendor: str) -> None:
    lines = (ROOT / "plugins" / vendor / "pyproject.toml").read_text().splitlines()
    assert f'version = "{__version__}"' in lines
