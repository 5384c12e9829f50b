"""The distribution: its metadata and files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from flagcore import __version__
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject

FRAMEWORKS = {
    *("torch", "torchvision", "torchaudio", "torch-npu", "torch-mlu", "torch-musa", "tensorflow", "jax", "jaxlib"),
    *("triton", "cupy", "vllm", "sglang", "megatron-core", "deepspeed", "transformer-engine", "flash-attn"),
    *("llama-cpp-python", "flagscale", "flag-gems", "mindspore", "paddlepaddle"),
}
"""Vendors ship their own builds of these; a dependency would replace them."""


def entry_point_names_the_plugin(plugin: Subject) -> Iterator[Problem]:
    if plugin.entry not in plugin.packaged.points.values():
        yield Problem(
            f"pyproject.toml: no entry point of flagcore.plugins names {plugin.entry}",
            f'write [project.entry-points."flagcore.plugins"] and below it NAME = "{plugin.entry}"',
        )


def flagcore_version_is_limited(plugin: Subject) -> Iterator[Problem]:
    wanted = []
    for text in plugin.packaged.requires:
        try:
            wanted.append(Requirement(text))
        except InvalidRequirement as error:
            yield Problem(f"pyproject.toml: dependencies has {text!r}: {error}", "write NAME>=VERSION")
            return
    core = [each for each in wanted if canonicalize_name(each.name) == "flagcore"]
    if not core:
        yield Problem("pyproject.toml: dependencies does not name flagcore", 'add "flagcore>=0.1,<0.2"')
    for each in core:
        if not any(part.operator in ("<", "<=", "==", "~=") for part in each.specifier):
            yield Problem(f"pyproject.toml: {each} has no upper bound", 'write "flagcore>=0.1,<0.2"')
        elif not each.specifier.contains(__version__, prereleases=True):
            yield Problem(
                f"pyproject.toml: {each} does not include this flagcore, {__version__}",
                "widen the range if the checks pass",
            )


def dependencies_have_no_framework(plugin: Subject) -> Iterator[Problem]:
    for text in plugin.packaged.requires:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue  # another check reports it
        optional = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
        if not optional and canonicalize_name(wanted.name) in FRAMEWORKS:
            yield Problem(
                f"pyproject.toml: dependencies has {text!r}, which pip would install over the vendor's build",
                "remove it; trials use what is installed, and [project.optional-dependencies] may name it",
            )


def version_is_valid(plugin: Subject) -> Iterator[Problem]:
    try:
        Version(plugin.packaged.version)
    except InvalidVersion:
        yield Problem(f"pyproject.toml: version = {plugin.packaged.version!r} is invalid", 'write "0.1.0"')


def description_and_license_are_given(plugin: Subject) -> Iterator[Problem]:
    for key in ("description", "license"):
        if not getattr(plugin.packaged, key).strip():
            yield Problem(f"pyproject.toml: {key} is missing", f"give the project a {key}")


def py_typed_exists(plugin: Subject) -> Iterator[Problem]:
    folder = plugin.package_folder
    if (folder / "__init__.py").is_file() and not (folder / "py.typed").is_file():
        yield Problem(f"{folder.name}/py.typed is missing", "add the empty file")


def readme_names_all_chips(plugin: Subject) -> Iterator[Problem]:
    readme = plugin.packaged.readme
    if not readme:
        yield Problem("README.md is missing, or pyproject.toml has no readme", 'write one; readme = "README.md"')
        return
    for chip in plugin.own_chips():
        if not all(word in readme.casefold() for word in re.split(r"[- ]", chip.name.casefold())):
            yield Problem(f"README.md does not name {chip.name}", "list all chips")


def wheel_contains_data_files(plugin: Subject) -> Iterator[Problem]:
    source = plugin.source
    if "hatchling" not in (source / "pyproject.toml").read_text("utf-8"):
        raise Skip("the wheel is not built by hatchling")
    try:
        from hatchling.builders.wheel import WheelBuilder
    except ImportError:
        raise Skip("hatchling is not installed") from None
    held = {Path(file.distribution_path).as_posix() for file in WheelBuilder(str(source)).recurse_included_files()}
    package = plugin.package_folder
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package.parent).as_posix()
        data = path.is_file() and path.suffix in (".yaml", ".jsonl", ".py", ".typed") and "__pycache__" not in name
        if data and name not in held:
            yield Problem(
                f"the wheel of {source.name} leaves out {name}",
                f'pyproject.toml: packages = ["{package.name}"] in [tool.hatch.build.targets.wheel], no exclude',
            )


def tests_run_the_conformance_kit(plugin: Subject) -> Iterator[Problem]:
    tests = plugin.source / "tests"
    if not any(re.search(r"\bPluginConformance\b", path.read_text("utf-8")) for path in tests.rglob("test_*.py")):
        yield Problem(
            "no file in tests runs PluginConformance",
            "write tests/test_conformance.py as in docs/write-a-plugin.md, so that pytest and CI run the kit",
        )
