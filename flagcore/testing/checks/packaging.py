"""The distribution: its metadata and files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from flagcore import __version__
from flagcore.testing.kit import Problem, Problems, Skip, Subject, check

FRAMEWORKS = {
    *("torch", "torchvision", "torchaudio", "torch-npu", "torch-mlu", "torch-musa", "tensorflow", "jax", "jaxlib"),
    *("triton", "cupy", "vllm", "sglang", "megatron-core", "deepspeed", "transformer-engine", "flash-attn"),
    *("llama-cpp-python", "flagscale", "flag-gems", "mindspore", "paddlepaddle"),
}
"""Packages with builds of vendors, which a dependency would replace."""
DATA = {".yaml", ".jsonl", ".py", ".typed"}


@check()
def entry_point_names_the_plugin(plugin: Subject) -> Problems:
    if plugin.entry not in plugin.packaged.points.values():
        yield Problem(
            f"pyproject.toml: no entry point of flagcore.plugins names {plugin.entry}",
            f'write [project.entry-points."flagcore.plugins"] and below it NAME = "{plugin.entry}"',
        )


@check('write "flagcore>=0.1,<0.2"; widen the range if the checks pass')
def flagcore_version_is_limited(plugin: Subject) -> Problems:
    core = [each for each in _requirements(plugin) if canonicalize_name(each.name) == "flagcore"]
    if not core:
        yield "pyproject.toml: dependencies does not name flagcore"
    for each in core:
        if not any(part.operator in ("<", "<=", "==", "~=") for part in each.specifier):
            yield f"pyproject.toml: {each} has no upper bound"
        elif not each.specifier.contains(__version__, prereleases=True):
            yield f"pyproject.toml: {each} does not include this flagcore, {__version__}"


@check("remove it; trials use what is installed, and [project.optional-dependencies] may name it")
def dependencies_have_no_framework(plugin: Subject) -> Problems:
    for each in _requirements(plugin):
        optional = each.marker is not None and not each.marker.evaluate({"extra": ""})
        if not optional and canonicalize_name(each.name) in FRAMEWORKS:
            yield f"pyproject.toml: dependencies has '{each}', which pip would install over the vendor's build"


@check('add it to [project], the version as "0.1.0"')
def metadata_is_complete(plugin: Subject) -> Problems:
    for key in ("description", "license"):
        if not getattr(plugin.packaged, key).strip():
            yield f"pyproject.toml: {key} is missing"
    try:
        Version(plugin.packaged.version)
    except InvalidVersion:
        yield f"pyproject.toml: version = {plugin.packaged.version!r} is invalid"


@check("add the empty file")
def py_typed_exists(plugin: Subject) -> Problems:
    folder = plugin.package_folder
    if (folder / "__init__.py").is_file() and not (folder / "py.typed").is_file():
        yield f"{folder.name}/py.typed is missing"


@check('write one that lists all chips; readme = "README.md"')
def readme_names_all_chips(plugin: Subject) -> Problems:
    readme = plugin.packaged.readme
    if not readme:
        yield "README.md is missing, or pyproject.toml has no readme"
        return
    for chip in plugin.own_chips():
        if not all(word in readme.casefold() for word in re.split(r"[- ]", chip.name.casefold())):
            yield f"README.md does not name {chip.name}"


@check("name the package in `packages` of [tool.hatch.build.targets.wheel], and remove `exclude`")
def wheel_contains_data_files(plugin: Subject) -> Problems:
    source = plugin.source
    if "hatchling" not in (source / "pyproject.toml").read_text("utf-8"):
        raise Skip("the wheel is not built by hatchling")
    try:
        from hatchling.builders.wheel import WheelBuilder
    except ImportError:
        raise Skip("hatchling is not installed") from None
    packed = {Path(file.distribution_path).as_posix() for file in WheelBuilder(str(source)).recurse_included_files()}
    package = plugin.package_folder
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package.parent).as_posix()
        data = path.is_file() and path.suffix in DATA and "__pycache__" not in name
        if data and name not in packed:
            yield f"the wheel of {source.name} leaves out {name}"


@check("write tests/test_conformance.py as in docs/write-a-plugin.md, so that pytest and CI run the kit")
def tests_run_the_conformance_kit(plugin: Subject) -> Problems:
    tests = plugin.source / "tests"
    if not any(re.search(r"\bPluginConformance\b", path.read_text("utf-8")) for path in tests.rglob("test_*.py")):
        yield "no file in tests runs PluginConformance"


def _requirements(plugin: Subject) -> Iterator[Requirement]:
    """Yield the dependencies. Raises InvalidRequirement with the invalid text."""
    return (Requirement(text) for text in plugin.packaged.requires)
