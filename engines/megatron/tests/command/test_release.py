"""Which release of Megatron-LM a command runs: that of the tree, of PYTHONPATH or of the installed package."""

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from flagcore_megatron.program.user_command import find_release

INFO = """\
MAJOR = {}
MINOR = {}
PATCH = {}
PRE_RELEASE = 'rc5'
"""


def tree(folder: Path, release: str, arguments: str = "") -> Path:
    for name in ("core", "training"):
        (folder / "megatron" / name).mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text(INFO.format(*release.split(".")))
    (folder / "megatron" / "training" / "arguments.py").write_text(arguments)
    (folder / "pretrain_gpt.py").touch()
    return folder


@pytest.mark.parametrize(
    ("program", "folder", "expected"),
    [
        ("own/pretrain_gpt.py", ".", "0.14.0"),
        ("pretrain_gpt.py", "own", "0.14.0"),
        ("fork/pretrain_gpt.py", ".", "0.15.0+flagscale"),
        ("unnamed/pretrain_gpt.py", ".", "0.12.3"),
    ],
)
def test_the_tree_of_the_program_counts_before_pythonpath(
    program: str, folder: str, expected: str, tmp_path: Path
) -> None:
    tree(tmp_path / "own", "0.14.0")
    tree(tmp_path / "fork", "0.15.0", "# FlagScale Begin")
    (tree(tmp_path / "unnamed", "0.13.0") / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\n")
    other = tree(tmp_path / "other", "0.12.3")
    assert find_release(str(tmp_path / folder), program, None, str(other)) == expected


def test_a_program_elsewhere_has_the_release_of_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path / "other", "0.12.3")
    assert find_release(str(tmp_path), "train.py", None, "nothing:other") == "0.12.3"
    own = tree(tmp_path / "own", "0.14.0")
    assert find_release(str(own), "examples/mimo/train.py", None, "") == "0.14.0"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    assert find_release(str(tmp_path), None, None) == "0.12.3"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
def test_without_a_tree_the_installed_package_counts(tmp_path: Path) -> None:
    assert find_release(str(tmp_path), "train.py", None, "") == version("megatron-core")


def test_another_interpreter_is_queried_and_an_unusable_one_gives_no_release(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    package = tmp_path / "packages" / "megatron_core-0.13.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.13.1\n")
    assert find_release(str(tmp_path), "train.py", str(python), str(package.parent)) == "0.13.1"
    assert find_release(str(tmp_path), "train.py", str(tmp_path / "missing"), "") is None
