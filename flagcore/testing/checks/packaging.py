"""The distribution: what pip, users and the core read of it."""

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
"""What vendors build for their own chips: a plugin that needs one would replace it."""


def entry_point_names_the_plugin(plugin: Subject) -> Iterator[Problem]:
    if plugin.entry not in plugin.packaged.points.values():
        yield Problem(
            message=f"pyproject.toml: no entry point of flagcore.plugins names {plugin.entry}",
            fix=f'write [project.entry-points."flagcore.plugins"] and below it NAME = "{plugin.entry}"',
        )


def flagcore_version_is_limited(plugin: Subject) -> Iterator[Problem]:
    wanted = []
    for text in plugin.packaged.requires:
        try:
            wanted.append(Requirement(text))
        except InvalidRequirement as error:
            yield Problem(message=f"pyproject.toml: dependencies has {text!r}: {error}", fix="write NAME>=VERSION")
            return
    core = [each for each in wanted if canonicalize_name(each.name) == "flagcore"]
    if not core:
        yield Problem(message="pyproject.toml: dependencies does not name flagcore", fix='add "flagcore>=0.1,<0.2"')
    for each in core:
        if not any(part.operator in ("<", "<=", "==", "~=") for part in each.specifier):
            yield Problem(
                message=f"pyproject.toml: {each} has no upper end", fix='hooks may change: write "flagcore>=0.1,<0.2"'
            )
        elif not each.specifier.contains(__version__, prereleases=True):
            yield Problem(
                message=f"pyproject.toml: {each} does not include this flagcore, {__version__}",
                fix="widen the range once the checks pass with it",
            )


def dependencies_have_no_framework(plugin: Subject) -> Iterator[Problem]:
    for text in plugin.packaged.requires:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue  # another check tells
        optional = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
        if not optional and canonicalize_name(wanted.name) in FRAMEWORKS:
            yield Problem(
                message=f"pyproject.toml: dependencies has {text!r}, which pip would put over the vendor's own build",
                fix="take it out: planning needs none, and trials use what is installed beside them; name it in "
                "[project.optional-dependencies] if you must",
            )


def version_is_valid(plugin: Subject) -> Iterator[Problem]:
    try:
        Version(plugin.packaged.version)
    except InvalidVersion:
        yield Problem(
            message=f"pyproject.toml: version = {plugin.packaged.version!r} is no version", fix='write "0.1.0"'
        )


def description_and_license_are_given(plugin: Subject) -> Iterator[Problem]:
    for key in ("description", "license"):
        if not getattr(plugin.packaged, key).strip():
            yield Problem(message=f"pyproject.toml: {key} is missing", fix=f"give the project a {key}")


def py_typed_exists(plugin: Subject) -> Iterator[Problem]:
    folder = plugin.package_folder
    if (folder / "__init__.py").is_file() and not (folder / "py.typed").is_file():
        yield Problem(message=f"{folder.name}/py.typed is missing", fix="add the empty file")


def readme_names_all_chips(plugin: Subject) -> Iterator[Problem]:
    readme = plugin.packaged.readme
    if not readme:
        yield Problem(
            message="README.md is missing, or pyproject.toml has no readme", fix='write one; readme = "README.md"'
        )
        return
    for chip in plugin.own_chips():
        if not all(word in readme.casefold() for word in re.split(r"[- ]", chip.name.casefold())):
            yield Problem(message=f"README.md does not name {chip.name}", fix="list the chips that can be planned for")


def wheel_contains_data_files(plugin: Subject) -> Iterator[Problem]:
    source = plugin.source
    if "hatchling" not in (source / "pyproject.toml").read_text("utf-8"):
        raise Skip("the wheel is not built by hatchling, so what it will hold is not known")
    try:
        from hatchling.builders.wheel import WheelBuilder
    except ImportError:
        raise Skip("hatchling is not installed, so what the wheel will hold is not known") from None
    held = {Path(file.distribution_path).as_posix() for file in WheelBuilder(str(source)).recurse_included_files()}
    package = plugin.package_folder
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package.parent).as_posix()
        data = path.is_file() and path.suffix in (".yaml", ".jsonl", ".py", ".typed") and "__pycache__" not in name
        if data and name not in held:
            yield Problem(
                message=f"the wheel of {source.name} leaves out {name}",
                fix=f'pyproject.toml: packages = ["{package.name}"] in [tool.hatch.build.targets.wheel], no exclude',
            )


def tests_run_the_conformance_kit(plugin: Subject) -> Iterator[Problem]:
    tests = plugin.source / "tests"
    if not any(re.search(r"\bPluginConformance\b", path.read_text("utf-8")) for path in tests.rglob("test_*.py")):
        yield Problem(
            message="no file in tests runs PluginConformance",
            fix="write tests/test_conformance.py as in docs/write-a-plugin.md, so that pytest and CI run the kit",
        )
