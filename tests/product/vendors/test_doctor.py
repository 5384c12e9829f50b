"""`flag doctor` on machines with a vendor's management tool and a stack that fits it or does not."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flagcore_testing import fakes

from flagcore import api
from tests.product.vendors.test_simulated_nodes import CAMBRICON, METAX
from tests.product.vendors.test_visible_devices import VENDORS_WITH_TOOLS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Stack:
    """A vendor's tool, what it prints, and the chip."""

    tool: str
    printed: str
    chip: str


STACKS = {"metax": Stack("mx-smi", METAX, "C500"), "cambricon": Stack("cnmon", CAMBRICON, "MLU370-X8")}
BUILDS = {vendor.name: vendor for vendor in VENDORS_WITH_TOOLS}


@functools.cache
def records(name: str, modules: Path) -> list[dict[str, Any]]:
    """Return what `flag doctor` reports with the modules in a folder in front of the installed ones."""
    stack = STACKS[name]
    # other folders on the path may hold a sitecustomize that changes torch, which fails for a stand-in
    own = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(each).is_relative_to(ROOT)]
    path = os.pathsep.join([str(modules), *own])
    with fakes.machine({stack.tool: fakes.prints(stack.printed)}, PYTHONPATH=path):
        return api.doctor()


def of_stack(found: list[dict[str, Any]], chip: str) -> list[dict[str, Any]]:
    return [each for each in found if each["name"] == chip and not each["ok"]]


@pytest.fixture(scope="module")
def of_nvidia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stand-in for NVIDIA's torch."""
    folder = tmp_path_factory.mktemp("nvidia")
    (folder / "torch.py").write_text(BUILDS["nvidia"].torch)
    return folder


@pytest.mark.parametrize("name", STACKS)
def test_the_public_wheel_of_vllm_is_not_advised_on_a_vendors_chip(name: str, of_nvidia: Path) -> None:
    found = {each["for"]: each for each in records(name, of_nvidia)}
    for engine in ("vllm", "sglang", "lmdeploy"):
        assert "pip install 'flagcore[" not in found[f"engine {engine} ({engine})"]["fix"]
    words = "`pip install --no-deps`" if name == "cambricon" else "the public wheel"
    assert words in found["engine vllm (vllm)"]["fix"]


@pytest.mark.parametrize("name", STACKS)
def test_a_torch_of_another_vendor_is_reported(name: str, of_nvidia: Path) -> None:
    problems = of_stack(records(name, of_nvidia), STACKS[name].chip)
    assert any(each["fix"].startswith("torch ") and each["fix"].endswith("vendor's build") for each in problems)
    assert any("torch_mlu" in each["fix"] for each in problems) == (name == "cambricon")


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_that_fits_has_no_problem(name: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(BUILDS[name].torch)
    migration = tmp_path / "torch_mlu/utils/gpu_migration"
    migration.mkdir(parents=True)
    for folder in (migration, migration.parent, migration.parent.parent):
        (folder / "__init__.py").touch()
    assert of_stack(records(name, tmp_path), STACKS[name].chip) == []
