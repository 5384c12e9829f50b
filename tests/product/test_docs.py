"""The pages are correct: links work, names exist, and the reference matches the code.

tests/product/test_docs_snippets.py runs the snippets."""

import json
import re
import statistics
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from flagcore_serving.engine import ServingEngine
from flagcore_training.reading import STEPS
from flagcore_vendorkit.metrics import METRICS

from docs.site import cli_page, generate, vendor_pages
from flagcore import errors
from flagcore.cli.main import OWN, flag, others
from flagcore.plugins import ENGINES, find_engine, names
from tests.product.block_checks import FENCE, PAGES, ROOT, TEXT, prose

REFERENCE = TEXT["docs/cli.md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"(?<![\w/])docs/[\w-]+\.md")
ROOMS = ("flagcore", "engines", "plugins", "extras", "tests", "examples", "benchmarks", "docs", "tools")
PATH = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)`")
FILE = re.compile(r"`(\w[\w./-]*\.(?:py|yaml))`")
TWINS = [page for page in PAGES if page.endswith(".zh.md")]
SERVING_ENGINES = [
    each
    for each in map(find_engine, names(ENGINES))
    if isinstance(each, ServingEngine) and each.where.startswith("flagcore")
]
engines = pytest.mark.parametrize("engine", SERVING_ENGINES, ids=lambda engine: engine.name)
OTHER_PATHS = ("docs/plugin-data.md", "docs/write-a-plugin.md", "CHANGELOG.md")
"""Pages with paths of another distribution, and of earlier releases."""


def section(page: str, heading: str) -> str:
    """Return the text of a page between a heading, or another text, and the next heading of level 2."""
    return TEXT[page].split(heading)[1].split("\n## ")[0]


def first_column(text: str) -> list[list[str]]:
    """Return the inline names in the first cell of each row of a table."""
    return [re.findall(r"`([^`]+)`", cell) for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_work(page: str) -> None:
    assert [target for target in LINK.findall(prose(page)) if not _works(page, target)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OTHER_PATHS])
def test_paths_that_a_page_names_exist(page: str) -> None:
    paths = set(PATH.findall(TEXT[page]))
    assert {
        path for path in paths if not (ROOT / path).exists() and not ((ROOT / page).parent / path).exists()
    } == set()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_a_page_for_developers_names_exist(page: str) -> None:
    files = [f"/{file.relative_to(ROOT)}" for room in ROOMS for file in (ROOT / room).rglob("*.*")] + [
        "/hatch_build.py"
    ]
    named = FILE.findall(TEXT[page])
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()


def test_pages_that_code_names_exist() -> None:
    rooms = ("flagcore", "engines", "extras", "benchmarks", "tools")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    named = {page for file in files for page in NAMED.findall(file.read_text(encoding="utf-8"))}
    assert "docs/hooks.md" in named
    of_others = {"docs/gguf.md", "docs/legacy.md"}  # of ggml and DeepEP
    assert {page for page in named if not (ROOT / page).exists()} == of_others


def test_generated_files_and_blocks_are_current() -> None:
    stale = [file.name for file, text in generate.files().items() if file.read_text(encoding="utf-8") != text]
    assert not stale, "run `make reference`"


def test_pages_of_vendors_name_existing_sections_extras_and_commands() -> None:
    explained = section("docs/vendors.md", "## How to read the pages")
    headings = set(re.findall(r"^- \*\*(.*?)\*\*", explained, re.MULTILINE))
    for name, text in vendor_pages.pages().items():
        assert {"Chips", "Engines"} <= set(re.findall(r"^## (.*)$", text, re.MULTILINE)) & headings, name
        assert {each for each in LINK.findall(text) if not each.startswith(("#", "../vendors.md", "http"))} == set()
        assert set(re.findall(r"`flag ([a-z]+)", text)) <= {*OWN, *others()}, name


def test_command_line_page_has_a_section_for_each_command() -> None:
    commands = {" ".join(("flag", *path)): command for path, command in cli_page.commands(flag)}
    headings = set(re.findall(r"^#+ (flag .*)$", REFERENCE, re.MULTILINE))
    assert headings == set(commands) - {"flag"}
    assert set(re.findall(cli_page.MARK, REFERENCE)) == {*commands, "common options"}


@pytest.mark.parametrize("page", PAGES)
def test_extras_and_commands_that_a_page_names_exist(page: str) -> None:
    extras = set(re.findall(r"(?:flagcore|\.)\[(\w+)\]", TEXT[page]))
    assert extras <= set(re.findall(r'"(\w+)"', (ROOT / "hatch_build.py").read_text()))
    assert set(re.findall(r"`flag ([a-z]+)", TEXT[page])) <= {*OWN, *others()}


def test_reference_has_every_environment_variable() -> None:
    text = section("docs/cli.md", "## Environment variables")
    files = chain((ROOT / "flagcore").rglob("*.py"), ROOT.glob("e*s/*/flagcore_*/**/*.py"))
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    own = set(re.findall(r'"(FLAGCORE_[A-Z]+)"', code)) - {"FLAGCORE_TRACE"}  # only the trace of a script sets it
    assert {name for name in own if f"`{name}`" not in text} == set()
    listed = set(chain(*first_column(text))) - {"COLUMNS", "NO_COLOR"}
    assert {name for name in listed if name not in code} == set()


def test_readme_states_the_errors_of_the_accuracy_page() -> None:
    table = section("docs/accuracy.md", "## Step time").split("##")[0]
    rows = [row.split(" | ") for row in table.splitlines() if re.match(r"\| .* \| \d+ \| \d+ \| [\d.]+% ", row)]
    errors = {row[0].strip("| "): float(row[3].rstrip("%")) for row in rows}
    mean = errors.pop("**mean over sources that print a time**")
    families = json.loads((ROOT / "benchmarks" / "fitted.json").read_text(encoding="utf-8")).values()
    left_out = [100 * source["left_out_mape"] for family in families for source in family["sources"].values()]
    stated = re.findall(r"(\d+)%?", section("README.md", "**Accuracy.**").split("\n\n")[0])
    figures = (len(errors), mean, max(errors.values()), statistics.fmean(left_out), min(left_out), max(left_out))
    assert stated == [f"{figure + 1e-9:.0f}" for figure in figures]  # halves are rounded up


def test_reference_has_every_exit_code_and_no_other() -> None:
    codes = {0, *(kind.exit_code for kind in _kinds(errors.FlagError))}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", REFERENCE, re.MULTILINE)} == codes


def test_reference_has_every_field_of_a_result(example_folder: Path) -> None:
    data = json.loads((example_folder / "runs" / "own" / "result.json").read_text())
    best, text = data["best"], section("docs/results.md", "## result.json")
    of_plan, of_trial = (set(chain(*first_column(part))) for part in text.split("\nA trial:\n"))
    assert of_plan - set(data) == {"limits", "fastest", "front"}  # only of servers
    assert of_trial - set(best) == {"finished_steps_s", "telemetry"}  # only without a measurement
    assert set(data) | set(best) <= of_plan | of_trial
    inner = {*_keys(best["predicted"]), *data["counts"], *best["measured"], *best["measured"]["step_time_s"]}
    assert {name for name in inner if f"`{name}`" not in text} == set()


def test_reference_has_every_file_of_a_run(example_folder: Path) -> None:
    run = example_folder / "runs" / "own"
    rows = first_column(section("docs/results.md", "## The run folder"))
    listed = {name for row in rows for name in _full_names(row)}
    found = {re.sub(r"^trials/\d+/", "trials/N/", str(file.relative_to(run))) for file in run.rglob("*")}
    found = {"best/" if name.startswith("best/") else name for name in found if (run / name).is_file() or "N/" in name}
    assert listed == found | {f"trials/N/{name}" for name in ("job.json", STEPS, METRICS)} | {"best/"}


@pytest.mark.parametrize("twin", TWINS)
def test_chinese_page_and_the_english_one_link_to_each_other_and_share_snippets(twin: str) -> None:
    english = twin.replace(".zh.md", ".md")
    assert Path(english).name in LINK.findall(TEXT[twin])
    assert Path(twin).name in LINK.findall(TEXT[english])
    assert _commands(twin) & _commands(english)


def test_every_counter_is_on_the_page_with_the_engines_that_report_it() -> None:
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \| .+ \|$", section("docs/engines.md", "\n## Counters\n"), re.MULTILINE)
    listed = {
        (name, title) for names, titles in rows for name in re.findall(r"\w+", names) for title in titles.split(", ")
    }
    assert listed == {
        (name, engine.program.title)
        for engine in SERVING_ENGINES
        for name in (*engine.reports.counters.values(), *engine.reports.shares)
    }


def _commands(page: str) -> set[str]:
    """Return the lines of all snippets that start a program of this project."""
    lines = [line for _, _, text in FENCE.findall(TEXT[page]) for line in text.splitlines()]
    found = (re.fullmatch(r"(?:\$ )?((?:\.venv/bin/)?(?:flag|make|pip) .*?)(?: *# .*)?", line) for line in lines)
    return {match[1] for match in found if match}


def _works(page: str, target: str) -> bool:
    """Return whether a link leads to a file, and to one of its headings."""
    if target.startswith("https://"):
        return True
    name, _, anchor = target.partition("#")
    file = ((ROOT / page).parent / name if name else ROOT / page).resolve()
    if not file.exists() or not anchor:
        return file.exists()
    headings = re.findall(r"^#+ (.*)$", prose(str(file.relative_to(ROOT))), re.MULTILINE)
    return anchor in [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]  # as on GitHub


def _full_names(names: list[str]) -> Iterator[str]:
    """Yield the names of a row: the second one stands in the folder of the first."""
    folder = names[0].rpartition("/")[0] if not names[0].endswith("/") else ""
    for name in names:
        yield name if "/" in name or not folder else f"{folder}/{name}"


def _kinds(kind: type[errors.FlagError]) -> Iterator[type[errors.FlagError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _keys(data: Any) -> Iterator[str]:
    """Yield all keys of nested plain data."""
    for key, value in data.items() if isinstance(data, dict) else ():
        yield key
        yield from _keys(value)


OPTION = re.compile(r"`flag ([a-z][^`]*)`")
KEY = re.compile(r"`((?:auto_tuner|train|serve|cluster|model)\.\w+(?:\.\w+)*)")
FOREIGN = ("docs/flagscale.md", "CHANGELOG.md")
"""Pages that also contain FlagScale's keys."""
SUFFIXES = (".yaml", ".json", ".py")


def test_options_that_sentences_name_exist() -> None:
    assert {line for page in PAGES for line in OPTION.findall(TEXT[page]) if not _are_options(line)} == set()


def _are_options(line: str) -> bool:
    """Return whether all options of a command line exist."""
    words, command = line.partition(" -- ")[0].split(), flag
    while words and isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words.pop(0))
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return {word.partition("=")[0] for word in words if word.startswith("--")} <= options


def test_keys_that_sentences_name_exist() -> None:
    schema = json.loads(CliRunner().invoke(flag, ["schema"]).output)
    found = {
        key for page in PAGES if page not in FOREIGN for key in KEY.findall(TEXT[page]) if not key.endswith(SUFFIXES)
    }
    assert {key for key in found if not any(_has(schema, kind, key.split(".")) for kind in schema["anyOf"])} == set()


def _has(schema: dict, node: dict, path: list[str]) -> bool:
    """Return whether a JSON schema has the key, or leaves open which keys there are."""
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    kinds = node.get("anyOf", [])
    if not path or any(_has(schema, kind, path) for kind in kinds):
        return True
    if node.get("type") != "object":
        return False
    below = node.get("properties", {})
    return _has(schema, below[path[0]], path[1:]) if path[0] in below else bool(node.get("additionalProperties"))
