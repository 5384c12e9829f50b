"""The import contracts of pyproject.toml cover every package, and distributions import only what is public. The core
without engines, plugins and extras: its commands work, and its tests import nothing of them."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from sysconfig import get_path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {file.parent.name: file.parent for file in (ROOT / "flagcore/__init__.py", *ROOT.glob("*/*/*/__init__.py"))}
PACKAGES = {name: folder for name, folder in PACKAGES.items() if re.fullmatch(r"flagcore(_\w+)?", name)}
VENDORS = {name for name, folder in PACKAGES.items() if folder.parent.parent.name == "plugins"}
FOR_VENDORS = {f"flagcore.{room}" for room in ("contracts", "domain", "errors", "hooks", "physics")}
"""The rooms of the core that a vendor's plugin needs, beside the kit. Engines need more of `flagcore.SDK`."""


def settings(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def test_import_contracts_cover_every_distribution() -> None:
    linter = settings(ROOT / "pyproject.toml")["tool"]["importlinter"]
    contracts = {contract["name"]: contract for contract in linter["contracts"]}
    layers = contracts["distributions stand on each other and on the core"]["layers"]
    assert {*linter["root_packages"]} == {*PACKAGES}
    assert {name for layer in layers for name in layer.split(" | ")} == {*PACKAGES}
    assert {*contracts["no circles, also not among imports for type checkers"]["ancestors"]} == {*PACKAGES}


def is_module(name: str) -> bool:
    package, *rest = name.split(".")
    path = PACKAGES[package].joinpath(*rest)
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of_others(package: str) -> Iterator[tuple[str, str]]:
    """Yield a place and the module of each import of another distribution."""
    for file in PACKAGES[package].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{each.name}" for each in node.names]
            for name in (each for each in names if each.partition(".")[0] in PACKAGES.keys() - {package}):
                module = name if is_module(name) else name.rpartition(".")[0]
                yield f"{file.relative_to(ROOT)}:{node.lineno}", module


@cache
def public_modules(package: str) -> set[str]:
    """Return the package itself, and what it declares in `SDK`, without importing it."""
    tree = ast.parse((PACKAGES[package] / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SDK":
            return {
                package,
                *(f"{package}.{each.value}" for each in ast.walk(node.value) if isinstance(each, ast.Constant)),
            }
    return {package}


def test_every_public_module_exists() -> None:
    assert [name for package in PACKAGES for name in sorted(public_modules(package)) if not is_module(name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_only_public_modules_of_other_distributions_are_imported(package: str) -> None:
    public = {name for other in PACKAGES if other != package for name in public_modules(other)}
    if package in VENDORS:
        public = {*FOR_VENDORS, "flagcore", *public_modules("flagcore_vendorkit")}
    allowed = [re.escape(name) if name in PACKAGES else rf"{re.escape(name)}(\..*)?" for name in public]
    pattern = re.compile("|".join(allowed))
    assert [each for each in imports_of_others(package) if not pattern.fullmatch(each[1])] == []


def test_the_core_names_no_engine_importer_or_vendor() -> None:
    projects = [settings(file)["project"].get("entry-points", {}) for file in ROOT.glob("*/*/pyproject.toml")]
    groups = ("flagcore.engines", "flagcore.importers", "flagcore.plugins")
    names = {name for points in projects for group in groups for name in points.get(group, {})} - {"cpu", "command"}
    files = PACKAGES["flagcore"].rglob("*.py")
    words = {file: {*re.findall(r"[a-z0-9]+", file.read_text("utf-8").lower())} for file in files}
    assert len(names) > 10
    assert {(file, name) for file in words for name in names & words[file]} == set()


PROGRAM = """
import contextlib, io, json, sys
sys.path[:0] = [sys.argv[1]]
from flagcore.cli.main import main
done = []
for words in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            done.append([end.code, out.getvalue(), err.getvalue()])
print(json.dumps(done))
"""
SPEC = """\
model: {num_layers: 4, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, vocab_size: 1000}
train: {engine: megatron, seq_length: 32, global_batch_size: 8, precision: fp32}
"""
SERVED = "model: Qwen/Qwen3-8B\nserve: {engine: vllm}\n"


@pytest.mark.slow
def test_commands_work_without_any_engine_or_plugin(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for each in Path(get_path("purelib")).iterdir():
        if not re.match("_*(editable|flagcore)[^-]*[_-](?!0)|.*[.]pth$", each.name):
            (site / each.name).symlink_to(each)
    (site / "flagcore").symlink_to(ROOT / "flagcore")
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "served.yaml").write_text(SERVED)
    asked = ("--help", "plugins list", "devices", "doctor", "schema", "tune spec.yaml", "tune served.yaml")
    words = [sys.executable, "-S", "-E", "-c", PROGRAM, str(site), json.dumps([each.split() for each in asked])]
    answers = json.loads(subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True).stdout)
    assert [code for code, _, _ in answers] == [0, 0, 4, 0, 0, 2, 2]
    assert "tune" in answers[0][1]
    assert json.loads(answers[-3][1])["title"] == "flagcore spec"
    assert "pip install flagcore-megatron" in answers[-2][2]
    assert "serve.engine" in answers[-1][2]
    assert "pip install flagcore-vllm" in answers[-1][2]


def test_tests_of_the_core_import_no_engine_and_no_extra() -> None:
    allowed = {"flagcore_testing", "flagcore_cpu"}
    for file in (ROOT / "tests").rglob("*.py"):
        if (ROOT / "tests" / "product") not in file.parents:
            named = re.findall(
                r"^\s*(?:from|import) (flagcore_\w+|engines|extras|tests\.product)", file.read_text(), re.M
            )
            assert set(named) <= allowed, file
