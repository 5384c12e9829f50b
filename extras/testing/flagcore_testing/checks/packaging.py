"""Checks of the distribution: its metadata, its quirks and maturity, and remaining placeholders."""

import platform
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from flagcore_vendorkit.chip_file import shared_costs
from flagcore_vendorkit.engines import read_maturity
from flagcore_vendorkit.fields import applicable
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from flagcore import __version__
from flagcore.domain.engine import ValueRule
from flagcore.plugins import GROUP, kind_of
from flagcore.plugins.entry_points import installed
from flagcore_testing.examples import task_on
from flagcore_testing.kit import Problem, Problems, Skip, Subject, check, need
from flagcore_testing.package import read_toml

FRAMEWORKS = {
    *("torch", "torchvision", "torchaudio", "tensorflow", "jax", "jaxlib"),
    *("triton", "cupy", "vllm", "sglang", "megatron-core", "deepspeed", "transformer-engine", "flash-attn"),
    *("llama-cpp-python", "flagscale", "flag-gems", "mindspore", "paddlepaddle"),
}
"""Packages of which vendors ship their own builds. A dependency on such a package would replace the vendor's build."""
BUILDS = re.compile(r"torch-\w+")
"""Matches packages that add a vendor's devices to torch."""
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
        name = canonicalize_name(each.name)
        if not optional and (name in FRAMEWORKS or BUILDS.fullmatch(name)):
            yield f"pyproject.toml: dependencies has '{each}', which pip would install over the vendor's build"


@check("give each distribution its own name, such as flagcore-acme: pip installs one of each name")
def distribution_has_its_own_name(plugin: Subject) -> Problems:
    name, value = canonicalize_name(plugin.packaged.name), plugin.entry
    if not name:
        yield "pyproject.toml: name is missing"
    for other, points in installed(GROUP).items():
        if points[0].value != value and points[0].dist and canonicalize_name(points[0].dist.name) == name:
            yield f"pyproject.toml: name = {plugin.packaged.name!r} is that of the distribution of the plugin {other}"


@check('add it to [project], the version as "0.1.0"')
def metadata_is_complete(plugin: Subject) -> Problems:
    for key in ("description", "license"):
        if not getattr(plugin.packaged, key).strip():
            yield f"pyproject.toml: {key} is missing"
    python = platform.python_version()
    if not SpecifierSet(plugin.packaged.python).contains(python):
        fix = "write the oldest release that your code runs on: flagcore runs on 3.10 and later"
        yield Problem(f"pyproject.toml: requires-python = {plugin.packaged.python!r} excludes Python {python}", fix)
    try:
        Version(plugin.packaged.version)
    except InvalidVersion:
        yield f"pyproject.toml: version = {plugin.packaged.version!r} is invalid"


@check('write one that lists all chips; readme = "README.md"')
def readme_names_all_chips(plugin: Subject) -> Problems:
    readme = plugin.packaged.readme
    if not readme:
        yield "README.md is missing, or pyproject.toml has no readme"
        return
    for chip in plugin.own_chips():
        if not all(word in readme.casefold() for word in re.split(r"[- ]", chip.name.casefold())):
            yield f"README.md does not name {chip.name}"


READ = {"engines", "environment", "knobs", "operators", "quirks", "maturity", "settings"}
"""The names of the files of a package, without .yaml. published.jsonl, chips/ and costs/ are read, too."""


@check()
def files_are_read(plugin: Subject) -> Problems:
    package = plugin.package_folder
    code = "\n".join(path.read_text("utf-8", "replace") for path in package.rglob("*.py"))
    known = [*(f"{name}.yaml" for name in sorted(READ)), "published.jsonl", "chips", "costs"]
    for path in sorted(package.iterdir()):
        is_data = path.is_dir() or path.suffix in (".yaml", ".yml", ".json", ".jsonl", ".toml")
        is_code = path.is_dir() and ((path / "__init__.py").is_file() or path.name == "__pycache__")
        if is_data and not is_code and path.name not in known and path.name not in code:
            near = next(iter(get_close_matches(path.name, known, n=1)), "")
            fix = f"rename it to {near}" if near else f"the files are {', '.join(known)}"
            yield Problem(f"{package.name}/{path.name} is not read", fix)
    for path in sorted((package / "chips").glob("*")):
        if path.suffix != ".yaml":
            yield Problem(f"{package.name}/chips/{path.name} is not read", f"rename it to {path.stem}.yaml")


@check("name the package in `packages` of [tool.hatch.build.targets.wheel], and remove `exclude`")
def wheel_contains_data_files(plugin: Subject) -> Problems:
    source = plugin.source
    need("hatchling" in (source / "pyproject.toml").read_text("utf-8"), "the wheel is not built by hatchling")
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


CONFORMANCE = re.compile(r"^class Test\w*\(.*\bPluginConformance\b", re.M)
SKIPPED = re.compile(r"\bmark\.(skip|skipif|xfail)\b|\bcollect_ignore|__test__ = False|pytest\.skip\(")
IMPORTS = re.compile(r"^\s*(?:from|import) (\w+)", re.M)


@check("write tests/test_conformance.py as in `flag plugins new`: pytest collects classes whose names begin with Test")
def tests_run_the_checks(plugin: Subject) -> Problems:
    tests = plugin.source / "tests"
    need(tests.is_dir(), "the plugin has no folder tests")
    texts = {path: path.read_text("utf-8", "replace") for path in sorted(tests.rglob("test_*.py"))}
    running = {path.name: text for path, text in texts.items() if CONFORMANCE.search(text)}
    if not running:
        yield "tests/test_conformance.py runs no PluginConformance"
    for name, text in running.items():
        if skipped := SKIPPED.search(text):
            yield Problem(f"tests/{name} has {skipped[0]}: the checks do not run", "remove it")
        if not re.search(r"def plugin\(self", text):
            fix = "add the fixture `plugin`, which returns the object of the entry point"
            yield Problem(f"tests/{name} has no fixture named plugin: each check fails there", fix)
        if plugin.package not in IMPORTS.findall(text):
            yield Problem(f"tests/{name} does not import {plugin.package}", f"import {plugin.package}.hooks")


@check()
def project_is_built_and_named(plugin: Subject) -> Problems:
    content, name = read_toml(plugin.source / "pyproject.toml"), plugin.packaged.name
    build = content.get("build-system", {})
    backend, requires = str(build.get("build-backend", "")), " ".join(map(str, build.get("requires", ())))
    if not backend or backend.partition(".")[0].casefold() not in re.sub("-", "_", requires).casefold():
        text = f"pyproject.toml: build-system.build-backend = {backend!r}, and requires has {requires or 'nothing'}"
        yield Problem(text, 'write requires = ["hatchling"] and build-backend = "hatchling.build"')
    try:
        canonicalize_license_expression(plugin.packaged.license.strip() or "Apache-2.0")  # another check reports none
    except InvalidLicenseExpression:
        fix = "write an SPDX expression, such as Apache-2.0"
        yield Problem(f"pyproject.toml: license = {plugin.packaged.license!r}", fix)
    readme = re.sub(r"\bflagcore\[([\w-]+)\]", r"flagcore-\1", plugin.packaged.readme)
    named = {canonicalize_name(each) for each in re.findall(r"[\w-]*\bflagcore-[\w-]*\w", readme)}
    if (named := named - {"flagcore-testing"}) and canonicalize_name(name) not in named:
        text = f"README.md names {', '.join(sorted(named))}, but not {name}"
        yield Problem(text, "name the distribution of pyproject.toml, which users install")
    words = {*re.findall(r"\w+", plugin.packaged.description.casefold())}
    vendors = {chip.vendor for chip in plugin.chips}
    if (foreign := sorted(words & {chip.vendor for chip in plugin.others.chips()})) and not words & vendors:
        text = f"pyproject.toml: description is of {', '.join(foreign)}: {plugin.packaged.description!r}"
        yield Problem(text, "describe this plugin")
    for entry in plugin.packaged.points:
        for vendor in {chip.vendor for chip in plugin.chips}:
            if entry != vendor and get_close_matches(entry, [vendor], cutoff=0.8):
                text = f"pyproject.toml: the entry point is named {entry!r}, but the vendor is {vendor!r}"
                yield Problem(text, "write the same name")


def _requirements(plugin: Subject) -> Iterator[Requirement]:
    """Yield the dependencies. Raises InvalidRequirement with the invalid text."""
    return (Requirement(text) for text in plugin.packaged.requires)


MARK = "TODO"
"""Mark of a placeholder in files of `flag plugins new`."""


@check("return the entries of quirks.yaml there, as VendorPlugin does")
def quirks_are_used(plugin: Subject) -> Problems:
    need(plugin.quirks.refused or plugin.quirks.forced, "quirks.yaml refuses nothing")
    need(not plugin.failed("flagcore_check_task"), "flagcore_check_task has no valid answer")
    for chip, engine in plugin.pairs():
        rules = plugin.loaded.check_task(task_on(chip, engine)).rules
        about = (chip, engine, None, kind_of(engine))
        refused, forced = applicable(plugin.quirks.refused, *about), applicable(plugin.quirks.forced, *about)
        expected: tuple[ValueRule, ...] = (*refused, *forced)
        for name in (quirk.name for quirk in expected if quirk not in rules):
            yield f"flagcore_check_task: {chip.name} lacks {name} of quirks.yaml"


@check("write maturity.yaml: `flag plugins list` shows the maturity of the data")
def maturity_is_given(plugin: Subject) -> Problems:
    plugin.own_chips()
    if read_maturity(plugin.package) is None:
        yield f"{plugin.package} has no maturity.yaml"


@check()
def maturity_matches_the_files(plugin: Subject) -> Problems:
    maturity, chips = plugin.maturity, {chip.name for chip in plugin.own_chips()}
    claims = (*maturity.run_on_hardware, *maturity.checked_on_transcripts, *maturity.from_documents)

    def chips_of(*words: str) -> set[str]:
        """Return the chips of the claims with one of these words, in lower case like the folders of costs."""
        found = (claim.chips for claim in claims if any(word in claim.what for word in words))
        return {name.casefold() for names in found for name in names}

    for claim in claims:
        for name in sorted(set(claim.chips) - chips):
            yield Problem(
                f"maturity.yaml: {claim.what!r} names the unknown chip {name!r}", "name chips of chips/*.yaml"
            )
    for name in sorted(chips):
        if name.casefold() not in chips_of("facts of the chips"):
            text = f"maturity.yaml: {name} is missing in 'facts of the chips'"
            yield Problem(text, "list every chip there, with how its facts were checked")
    run = {name.casefold() for claim in maturity.run_on_hardware for name in claim.chips}
    for name in sorted(_folders_with(plugin, "provenance.yaml", without="\nsource:") - run):
        text = f"maturity.yaml: run_on_hardware lacks {name}, although costs/{name} has measured kernels"
        yield Problem(text, "add the kernel times there, with software and date")
    curves, kernels = _folders_with(plugin, "collectives.yaml"), _folders_with(plugin, "kernels.jsonl")
    shared = {chip for chip, file in shared_costs(plugin.package) if file == "curve.yaml"}
    kernels |= _folders_with(plugin, "curve.yaml") | shared
    for what, file, claimed, shipped in (
        ("collectives", "collectives.yaml", chips_of("collectives", "all-reduces"), curves),
        ("kernel times", "curve.yaml or kernels.jsonl", chips_of("kernel times"), kernels),
    ):
        for name in sorted(claimed ^ shipped):
            problem = f"names {what} of {name}" if name in claimed else f"does not name the {what} of {name}"
            text = f"maturity.yaml {problem}: costs/{name} and {file} disagree"
            yield Problem(text, "correct maturity.yaml or the files")


@check("name each file of tests/smi once under checked_on_transcripts")
def maturity_names_existing_transcripts(plugin: Subject) -> Problems:
    named_files = {name for claim in plugin.maturity.checked_on_transcripts for name in claim.files}
    for name in sorted({each.name for each in plugin.transcripts if not each.of} ^ named_files):
        problem = "is missing, but maturity.yaml names it" if name in named_files else "is not named in maturity.yaml"
        yield f"tests/smi/{name} {problem}"


@check()
def no_placeholders_are_left(plugin: Subject) -> Problems:
    if places := list(_placeholders(plugin)):
        raise Skip(f"to fill in: {', '.join(places)}")
    yield from ()


def _placeholders(plugin: Subject) -> Iterator[str]:
    folder = plugin.packaged.folder or plugin.package_folder
    suffixes = {".yaml", ".py", ".md", ".toml", ".jsonl"}
    for path in sorted(folder.rglob("*")):
        if path.suffix in suffixes and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
                if MARK in line:
                    yield f"{path.relative_to(folder)}:{number}"


def _folders_with(plugin: Subject, file: str, without: str = "\0") -> set[str]:
    """Return the folders below `costs/` that contain `file`, unless the file contains the text `without`."""
    files = plugin.package_folder.glob(f"costs/*/{file}")
    return {path.parent.name for path in files if without not in path.read_text("utf-8")}
