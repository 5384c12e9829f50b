"""Checks of the distribution: its metadata, its quirks and maturity, and remaining placeholders.

Also of the published runs that it ships.
"""

import platform
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import product
from math import prod
from pathlib import Path

from flagcore_vendorkit.chip_file import shared_costs
from flagcore_vendorkit.engines import Claim, read_maturity
from packaging.licenses import canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from flagcore import __version__, plugins
from flagcore.domain.chip import Support
from flagcore.domain.spec import JobRecord
from flagcore.errors import FlagError
from flagcore.loading.entry_points import installed
from flagcore.plugins import GROUP
from flagcore.spec.jobs import read_job
from flagcore_testing.kit import Items, Problems, Skip, Subject, check, need, once, repeated, wrong
from flagcore_testing.package import read_toml

PEAKS = {"mxfp8": "fp8", "nvfp4": "fp4"}
"""The peaks of formats with another name."""
UTILIZATION, OF_EXPERTS = (0.08, 0.95), (0.02, 0.95)
"""Range of the share of the peak that a published run reaches, from the flops of its matrix products, and of one of a
mixture of experts. 0.06 to 0.74 are known."""
ADDRESS = re.compile(r"^https?://[\w.-]+\.\w+")
DEVICES = ("devices", "devices_per_node")
DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
Job = JobRecord | FlagError


@once
def _runs(plugin: Subject) -> Items:
    """Return each published run: its name in messages, the job or why it cannot be read, and its time of a step."""
    runs = list[tuple[str, Subject, Job, object]]()
    for record in plugin.loaded.published_runs():
        measured = record.get("measured")
        try:
            job: Job = read_job(record, plugins.engines())
        except FlagError as error:
            job = error
        seconds = measured.get("step_time_s") if isinstance(measured, dict) else None
        runs.append((f"published.jsonl: {record.get('id')!r}: ", plugin, job, seconds))
    return need(runs, "the plugin has no published runs")


@check("correct that key; docs/load.md describes job records", each=_runs, hook="published_runs")
def published_runs_are_job_records(plugin: Subject, job: Job, seconds: object) -> Problems:
    if isinstance(job, FlagError):
        yield f"{job}"
    elif plugin.loaded.find_chip(job.chip) is None:
        fix = f"name one of {', '.join(chip.name for chip in plugin.own_chips())}"
        yield True, f"cluster.chip = {job.chip!r} is unknown", fix


@check(
    "give measured.step_time_s in seconds, and the number of devices of the whole job",
    each=_runs,
    hook="published_runs",
)
def published_times_are_plausible(plugin: Subject, job: Job, seconds: object) -> Problems:
    if isinstance(job, FlagError) or not job.work.has_steps:
        return
    if not isinstance(seconds, int | float) or seconds <= 0:
        yield f"measured.step_time_s = {seconds!r} is no time"
        return
    chip = plugin.loaded.find_chip(job.chip)
    peak = chip.dense_flops_per_second.get(PEAKS.get(job.work.precision, job.work.precision)) if chip else None
    if peak and job.work.kind == "train":  # other kinds do more than train
        model, tokens = job.model, job.work.step_tokens
        low, high = OF_EXPERTS if model.experts else UTILIZATION
        width = model.ffn_hidden_size
        if model.experts:
            width = (model.moe_ffn_hidden_size or width) * (model.moe_router_topk or 1)
        layer = 2 * model.hidden_size * (model.hidden_size + model.num_query_groups * model.kv_channels)
        layer += 3 * model.hidden_size * width
        flops = 6.0 * tokens * (model.num_layers * layer + model.hidden_size * model.vocab_size)
        share = flops / (seconds * job.devices * peak.value)
        text = f"measured.step_time_s = {seconds:g} is {share:.2g} of the peak of {job.devices} devices"
        yield not low <= share <= high, text


@check("give each run its own id", hook="published_runs")
def published_runs_can_be_found(plugin: Subject) -> Problems:
    records = plugin.loaded.published_runs()
    for name, times in repeated(str(each.get("id")) for each in records):
        yield f"published.jsonl: {times} lines have the id {name!r}"
    for each in records:
        parts = (each.get("cluster"), each.get("candidate"))
        cluster, candidate = (part if isinstance(part, dict) else {} for part in parts)
        devices, node = (found if isinstance(found := cluster.get(key), int) else 0 for key in DEVICES)
        degrees = prod(degree for name in DEGREES if isinstance(degree := candidate.get(name, 1), int))
        where = f"published.jsonl: {each.get('id')!r}: "
        shown = f"{where}cluster.devices = {devices} is no multiple of"
        yield (not ADDRESS.match(str(each.get("source", ""))), f"{where}source = {each.get('source')!r}",
               "let it begin with the address of the publication: https://...")  # fmt: skip
        fix = "correct one of them: the rest is data parallel"
        yield degrees and devices % degrees, f"{shown} the parallel sizes, {degrees}", fix
        is_broken, fix = devices > node > 0 and devices % node, "count all devices of the job"
        yield is_broken, f"{shown} devices_per_node = {node}", fix


FRAMEWORKS = {
    *("torch", "torchvision", "torchaudio", "tensorflow", "jax", "jaxlib"),
    *("triton", "cupy", "vllm", "sglang", "megatron-core", "deepspeed", "transformer-engine", "flash-attn"),
    *("llama-cpp-python", "flagscale", "flag-gems", "mindspore", "paddlepaddle"),
}
"""Packages of which vendors ship their own builds. A dependency on such a package would replace the vendor's build."""
BUILDS = re.compile(r"torch-\w+")
"""Matches packages that add a vendor's devices to torch."""
DATA = {".yaml", ".jsonl", ".py", ".typed"}


@check('write "flagcore>=0.1,<0.2"; widen the range if the checks pass')
def dependencies_are_limited(plugin: Subject) -> Problems:
    requirements = [Requirement(text) for text in plugin.packaged.requires]
    core = [each for each in requirements if canonicalize_name(each.name) == "flagcore"]
    yield not core, "pyproject.toml: dependencies does not name flagcore"
    for each in core:
        if not any(part.operator in ("<", "<=", "==", "~=") for part in each.specifier):
            yield f"pyproject.toml: {each} has no upper bound"
        elif not each.specifier.contains(__version__, prereleases=True):
            yield f"pyproject.toml: {each} does not include this flagcore, {__version__}"
    for each in requirements:
        optional = each.marker is not None and not each.marker.evaluate({"extra": ""})
        name = canonicalize_name(each.name)
        yield (not optional and (name in FRAMEWORKS or BUILDS.fullmatch(name)),
               f"pyproject.toml: dependencies has '{each}', which pip would install over the vendor's build",
               "remove it; trials use what is installed, and [project.optional-dependencies] may name it")  # fmt: skip


@check()
def metadata_is_complete(plugin: Subject) -> Problems:
    package, python = plugin.packaged, platform.python_version()
    name, own = canonicalize_name(package.name), 'add it to [project], the version as "0.1.0"'
    points = [(other, each[0]) for other, each in installed(GROUP).items() if each[0].value != plugin.entry]
    taken = [other for other, each in points if each.dist and name and canonicalize_name(each.dist.name) == name]
    cases = (
        (plugin.entry not in package.points.values(), f"no entry point of {GROUP} names {plugin.entry}",
         f'write [project.entry-points."{GROUP}"] and below it NAME = "{plugin.entry}"'),
        (not name, "name is missing", own),
        (taken, f"name = {package.name!r} is that of the distribution of the plugin {[*taken, ''][0]}",
         "give each distribution its own name, such as flagcore-acme: pip installs one of each name"),
        *((not getattr(package, key).strip(), f"{key} is missing", own) for key in ("description", "license")),
        (not SpecifierSet(package.python).contains(python),
         f"requires-python = {package.python!r} excludes Python {python}",
         "write the oldest release that your code runs on: flagcore runs on 3.10 and later"),
        (not _is_valid(Version, package.version), f"version = {package.version!r} is invalid", own),
        (package.license.strip() and not _is_valid(canonicalize_license_expression, package.license),
         f"license = {package.license!r}", "write an SPDX expression, such as Apache-2.0"),
    )  # fmt: skip
    return wrong(cases, "pyproject.toml: ")


def _is_valid(read: Callable[[str], object], text: str) -> bool:
    try:
        read(text.strip())
    except ValueError:
        return False
    return True


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
            yield True, f"{package.name}/{path.name} is not read", fix
    for path in sorted((package / "chips").glob("*")):
        yield path.suffix != ".yaml", f"{package.name}/chips/{path.name} is not read", f"rename it to {path.stem}.yaml"


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
        yield data and name not in packed, f"the wheel of {source.name} leaves out {name}"


CONFORMANCE = re.compile(r"^class Test\w*\(.*\bPluginConformance\b", re.M)
SKIPPED = re.compile(r"\bmark\.(skip|skipif|xfail)\b|\bcollect_ignore|__test__ = False|pytest\.skip\(")
IMPORTS = re.compile(r"^\s*(?:from|import) (\w+)", re.M)


@check("write tests/test_conformance.py as in `flag plugins new`: pytest collects classes whose names begin with Test")
def tests_run_the_checks(plugin: Subject) -> Problems:
    tests = plugin.source / "tests"
    need(tests.is_dir(), "the plugin has no folder tests")
    texts = {path: path.read_text("utf-8", "replace") for path in sorted(tests.rglob("test_*.py"))}
    running = {path.name: text for path, text in texts.items() if CONFORMANCE.search(text)}
    yield not running, "tests/test_conformance.py runs no PluginConformance"
    for name, text in running.items():
        if skipped := SKIPPED.search(text):
            yield True, f"tests/{name} has {skipped[0]}: the checks do not run", "remove it"
        yield ("def plugin(self" not in text, f"tests/{name} has no fixture named plugin: each check fails there",
               "add the fixture `plugin`, which returns the object of the entry point")  # fmt: skip
        is_imported, fix = plugin.package in IMPORTS.findall(text), f"import {plugin.package}.hooks"
        yield not is_imported, f"tests/{name} does not import {plugin.package}", fix


@check("write the same name")
def project_is_built_and_named(plugin: Subject) -> Problems:
    build, package = read_toml(plugin.source / "pyproject.toml").get("build-system", {}), plugin.packaged
    backend, requires = str(build.get("build-backend", "")), " ".join(map(str, build.get("requires", ())))
    is_built = backend and backend.partition(".")[0].casefold() in re.sub("-", "_", requires).casefold()
    readme = re.sub(r"\bflagcore\[([\w-]+)\]", r"flagcore-\1", package.readme)
    named = {canonicalize_name(each) for each in re.findall(r"[\w-]*\bflagcore-[\w-]*\w", readme)}
    named -= {"flagcore-testing"}
    words, vendors = {*re.findall(r"\w+", package.description.casefold())}, {chip.vendor for chip in plugin.chips}
    foreign = sorted(words & {chip.vendor for chip in plugin.others.chips()})
    yield from (
        (not is_built,
         f"pyproject.toml: build-system.build-backend = {backend!r}, and requires has {requires or 'nothing'}",
         'write requires = ["hatchling"] and build-backend = "hatchling.build"'),
        (named and canonicalize_name(package.name) not in named,
         f"README.md names {', '.join(sorted(named))}, but not {package.name}",
         "name the distribution of pyproject.toml, which users install"),
        (foreign and not words & vendors,
         f"pyproject.toml: description is of {', '.join(foreign)}: {package.description!r}", "describe this plugin"),
    )  # fmt: skip
    for entry, vendor in product(package.points, vendors):
        is_near = entry != vendor and get_close_matches(entry, [vendor], cutoff=0.8)
        yield is_near, f"pyproject.toml: the entry point is named {entry!r}, but the vendor is {vendor!r}"


MARK = "TODO"
"""Mark of a placeholder in files of `flag plugins new`."""


@check("correct maturity.yaml or the files")
def maturity_matches_the_files(plugin: Subject) -> Problems:
    chips = {chip.name.casefold(): chip.name for chip in plugin.own_chips()}
    if read_maturity(plugin.package) is None:
        fix = "write maturity.yaml: `flag plugins list` shows the maturity of the data"
        yield True, f"{plugin.package} has no maturity.yaml", fix
        return
    maturity, shared = plugin.maturity, {chip for chip, file in shared_costs(plugin.package) if file == "curve.yaml"}
    claims = (*maturity.run_on_hardware, *maturity.checked_on_transcripts, *maturity.from_documents)
    run, described = _chips_of(maturity.run_on_hardware), _chips_of(claims, "facts of the chips")
    works = [each for chip, each in plugin.pairs() if plugin.loaded.engine_support(chip, each).support is Support.YES]
    for what, name in ((each.what, name) for each in claims for name in each.chips if name not in chips.values()):
        yield True, f"maturity.yaml: {what!r} names the unknown chip {name!r}", "name chips of chips/*.yaml"
    for name in sorted(chips.keys() - described):
        fix = "list every chip there, with how its facts were checked"
        yield True, f"maturity.yaml: {chips[name]} is missing in 'facts of the chips'", fix
    for name in sorted(_folders_with(plugin, "provenance.yaml", without="\nsource:") - run):
        text = f"maturity.yaml: run_on_hardware lacks {name}, although costs/{name} has measured kernels"
        yield True, text, "add the kernel times there, with software and date"
    text = f"engines.yaml says works: true ({[*works, ''][0]}), but maturity.yaml has no run_on_hardware"
    yield works and not run, text, "add the run, or remove works: true"
    kernels = _folders_with(plugin, "kernels.jsonl") | _folders_with(plugin, "curve.yaml") | shared
    curves = _folders_with(plugin, "collectives.yaml")
    for file, what, claimed, shipped in (
        ("collectives.yaml", "collectives", _chips_of(claims, "collectives", "all-reduces"), curves),
        ("curve.yaml or kernels.jsonl", "kernel times", _chips_of(claims, "kernel times"), kernels),
    ):
        for name in sorted(claimed ^ shipped):
            problem = f"names {what} of {name}" if name in claimed else f"does not name the {what} of {name}"
            yield f"maturity.yaml {problem}: costs/{name} and {file} disagree"


def _chips_of(claims: Sequence[Claim], *words: str) -> set[str]:
    """Return the chips of the claims with one of the words, in lower case like the folders of costs."""
    found = (claim.chips for claim in claims if not words or any(word in claim.what for word in words))
    return {name.casefold() for names in found for name in names}


@check("name each file of tests/smi once under checked_on_transcripts")
def maturity_matches_the_transcripts(plugin: Subject) -> Problems:
    claims, by_name = plugin.maturity.checked_on_transcripts, {each.name: each for each in plugin.transcripts}
    named_files = {name for claim in claims for name in claim.files}
    for name in sorted({name for name, each in by_name.items() if not each.of} ^ named_files):
        problem = "is missing, but maturity.yaml names it" if name in named_files else "is not named in maturity.yaml"
        yield f"tests/smi/{name} {problem}"
    for claim in claims if plugin.chips else ():  # another check reports that they cannot be read
        where, files = f"maturity.yaml: {claim.what!r}", [by_name[name] for name in claim.files if name in by_name]
        for each in (each for each in files if each.tool and each.tool not in claim.by):
            yield True, f"{where} has tool: {claim.by}, but {each.name} is of {each.tool}", "name that tool"
        if len(files) == len(claim.files) and all(each.tool and each.lists for each in files):
            listed = [one.chip for each in files for one in each.lists]
            found = {chip.name for chip in plugin.chips if any(map(chip.has_name, listed))}
            for name in sorted({*claim.chips} - found):
                yield True, f"{where} has the chip {name}, which its files do not list", "leave it out"


@check()
def no_placeholders_are_left(plugin: Subject) -> Problems:
    folder, places = plugin.packaged.folder or plugin.package_folder, list[str]()
    suffixes = {".yaml", ".py", ".md", ".toml", ".jsonl"}
    for path in sorted(folder.rglob("*")):
        if path.suffix in suffixes and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            lines = enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
            places += [f"{path.relative_to(folder)}:{number}" for number, line in lines if MARK in line]
    need(not places, f"to fill in: {', '.join(places)}")
    return ()


def _folders_with(plugin: Subject, file: str, without: str = "\0") -> set[str]:
    """Return the folders below `costs/` that contain `file`, unless the file contains the text `without`."""
    files = plugin.package_folder.glob(f"costs/*/{file}")
    return {path.parent.name for path in files if without not in path.read_text("utf-8")}
