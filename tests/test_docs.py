"""The pages are true: links lead somewhere, and the reference holds what the code really says.

Their snippets are followed by tests/test_docs_snippets.py.
"""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

import flagcore
from flagcore import errors
from flagcore.cli.main import COMMANDS, flag
from flagcore.domain.passes import Passes
from flagcore.engines.megatron.reading import METRICS, STEPS
from flagcore.physics.schedules.catalogue import SCHEDULES
from flagcore.report.text import SHORT
from flagcore.stages.prune import LEARNED
from tests.pages import PAGES, ROOT, TEXT, blocks_of, prose

REFERENCE, PYTHON = TEXT["docs/cli.md"], TEXT["docs/python.md"]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LINKS = [(page, target) for page in PAGES for target in LINK.findall(prose(page))]
PATHS = sorted(
    {
        (page, path)
        for page in PAGES
        if page != "docs/write-a-plugin.md"  # has those of a distribution of its own
        for path in re.findall(r"`((?:flagcore|plugins|tests|examples|benchmarks|docs)/[\w./-]*)`", TEXT[page])
    }
)


@pytest.mark.parametrize(("page", "target"), LINKS)
def test_link_leads_somewhere(page: str, target: str) -> None:
    if target.startswith("https://"):
        return
    name, _, anchor = target.partition("#")
    file = (ROOT / page).parent / name if name else ROOT / page
    assert file.exists()
    if anchor:
        headings = re.findall(r"^#+ (.*)$", prose(str(file.resolve().relative_to(ROOT))), re.MULTILINE)
        assert anchor in [_slug(line) for line in headings]


@pytest.mark.parametrize(("page", "path"), PATHS)
def test_path_that_a_page_names_exists(page: str, path: str) -> None:
    assert (ROOT / path).exists() or ((ROOT / page).parent / path).exists()


@pytest.mark.parametrize("page", PAGES)
def test_extras_and_commands_that_a_page_names_exist(page: str) -> None:
    extras = set(re.findall(r"(?:flagcore|\.)\[(\w+)\]", TEXT[page]))
    known = set(re.findall(r'"(\w+)"', (ROOT / "hatch_build.py").read_text()))
    assert extras <= known
    assert set(re.findall(r"`flag ([a-z]+)", TEXT[page])) <= set(COMMANDS)


def test_python_page_has_every_name_and_every_error() -> None:
    page = TEXT["docs/python.md"]
    public = set(flagcore.__all__) - {"__version__", "FlagError"}
    assert {name for name in public if f"`{name}" not in page} == set()
    table = page.split("## Errors")[1]
    kinds = {kind.__name__ for kind in _kinds(errors.FlagError) if kind.__module__ == "flagcore.errors"}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == kinds - {"FlagError"}


@pytest.mark.parametrize("name", flagcore.__all__)
def test_python_page_has_every_field_of_a_result_and_every_argument_of_a_function(name: str) -> None:
    found = getattr(flagcore, name)
    if is_dataclass(found):
        public = {field.name for field in fields(found)}
        public |= {key for key, value in vars(found).items() if isinstance(value, property)}
        section = PYTHON.split(f"\n### {name}\n")[1].split("\n##")[0]
        rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
        assert {field for row in rows for field in re.findall(r"`(\w+)`", row)} == public
    elif inspect.isfunction(found):
        (told,) = re.findall(rf"^\| `{name}\((.*?)\)` \|", PYTHON, re.MULTILINE)
        assert [word.rstrip("=") for word in told.split(", ")] == list(inspect.signature(found).parameters)


def test_reference_has_every_variable_that_is_read() -> None:
    section = REFERENCE.split("## Environment variables")[1].split("\n## ")[0]
    assert {name for name in _variables() if f"`{name}`" not in section} == set()
    table = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {name for row in table for name in re.findall(r"`(\w+)`", row)} <= _variables() | {"COLUMNS", "NO_COLOR"}


def test_reference_has_every_field_of_an_insight(workshop: Path) -> None:
    data = json.loads((workshop / "runs" / "own" / "insight.json").read_text())
    section = REFERENCE.split("## insight.json")[1]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(data)
    lists = [each for name in ("chips", "stages", "knobs") for each in data[name]]
    lists += [each for chip in data["chips"] for each in chip["facts"]]
    lists += [each for knob in data["knobs"] for each in knob["values"]]
    lists += [each["nearest"] for knob in data["knobs"] for each in knob["values"]]
    inner = {name for each in lists for name in each} | {field.name for field in fields(Passes)}
    assert {name for name in inner if f"`{name}`" not in section} == set()


def test_reference_has_the_help_of_every_command_and_of_no_other() -> None:
    blocks = [block.text for block in blocks_of("docs/cli.md", REFERENCE)]
    held = [" ".join(block.split()) for block in blocks if block.startswith("Usage:")]
    assert held == [" ".join(_help(path).split()) for path in sorted(_commands(flag, ()), key=_place)]


def test_readme_tells_the_accuracy_that_its_page_has() -> None:
    table = TEXT["docs/accuracy.md"].split("## Step time")[1].split("##")[0]
    rows = [row.split(" | ") for row in table.splitlines() if re.match(r"\| .* \| \d+ \| \d+ \| [\d.]+% ", row)]
    errors = {row[0].strip("| "): float(row[3].rstrip("%")) for row in rows}
    mean = errors.pop("**mean over sources that print a time**")
    told = re.search(
        r"Over (\d+) public sources.*? off by (\d+)% in the mean and by up to (\d+)% on", TEXT["README.md"]
    )
    assert told
    assert told.groups() == (str(len(errors)), f"{mean:.0f}", f"{max(errors.values()):.0f}")


def test_readme_tells_the_errors_of_sources_that_were_left_out_of_the_fit() -> None:
    families = json.loads((ROOT / "benchmarks" / "fitted.json").read_text(encoding="utf-8")).values()
    errors = [100 * source["left_out_mape"] for family in families for source in family["sources"].values()]
    mean = sum(errors) / len(errors)
    told = f"by {mean:.0f}% in the mean, {min(errors):.0f} to {max(errors):.0f}%, where a source had no part"
    assert told in " ".join(TEXT["README.md"].split())


def test_spec_page_tells_every_schedule() -> None:
    told = re.findall(r"^- `([\w-]+)`: ", TEXT["docs/spec.md"].split("`pipeline_schedule` is one of")[1], re.MULTILINE)
    assert told == list(SCHEDULES)


def test_reference_has_every_exit_code_and_no_other() -> None:
    codes = {0, *(kind.exit_code for kind in _kinds(errors.FlagError))}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", REFERENCE, re.MULTILINE)} == codes


def test_reference_has_every_field_of_a_result(workshop: Path) -> None:
    data = json.loads((workshop / "runs" / "own" / "result.json").read_text())
    section = REFERENCE.split("## result.json")[1].split("\n## ")[0]
    first, second = (re.findall(r"^\| (`.*?`) \|", part, re.MULTILINE) for part in section.split("\nA trial:\n"))
    assert {name for row in first for name in re.findall(r"`(\w+)`", row)} == set(data)
    assert {name for row in second for name in re.findall(r"`(\w+)`", row)} == set(data["best"])
    best = data["best"]
    inner = {*_keys(best["predicted"]), *data["counts"], *best["measured"], *best["measured"]["step_time_s"]}
    assert {name for name in inner if f"`{name}`" not in section} == set()


def test_reference_has_every_file_of_a_run(workshop: Path) -> None:
    run = workshop / "runs" / "own"
    rows = re.findall(r"^\| (`.*?) \|", REFERENCE.split("## The files of a run")[1].split("\n## ")[0], re.MULTILINE)
    listed = {name for row in rows for name in _full_names(re.findall(r"`([^`]+)`", row))}
    found = {re.sub(r"^trials/\d+/", "trials/N/", str(file.relative_to(run))) for file in run.rglob("*")}
    found = {"best/" if name.startswith("best/") else name for name in found if (run / name).is_file() or "N/" in name}
    trial_program = {f"trials/N/{name}" for name in ("job.json", STEPS, METRICS)}
    assert listed == found | trial_program | {"best/"}


def test_tutorial_explains_what_the_table_and_the_books_show() -> None:
    page = TEXT["docs/tutorial.md"]
    learned = set(LEARNED) - {"does_not_fit"}
    assert {name for name in learned if f"`{name}`" not in page} == set()
    assert {short for short in SHORT.values() if short.isupper() and short not in page} == set()


def test_readme_marks_its_result_so_that_it_can_be_replaced() -> None:
    assert TEXT["README.md"].count("<!-- result -->") == TEXT["README.md"].count("<!-- /result -->") == 1


def test_picture_has_a_title_and_a_description() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "loop.svg").getroot()
    names = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in picture}
    assert names["title"]
    assert names["desc"]


def _slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _full_names(names: list[str]) -> Iterator[str]:
    """Yield the names of a row: the second one stands in the folder of the first."""
    folder = names[0].rpartition("/")[0] if not names[0].endswith("/") else ""
    for name in names:
        yield name if "/" in name or not folder else f"{folder}/{name}"


def _commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _commands(inner, (*path, name))


def _place(path: tuple[str, ...]) -> int:
    """Return where a command's heading stands in the reference."""
    return REFERENCE.index("# " + " ".join(("flag", *path)) + "\n") if path else 0


def _help(path: tuple[str, ...]) -> str:
    return CliRunner().invoke(flag, [*path, "--help"], prog_name="flag", terminal_width=80).output


def _kinds(kind: type[errors.FlagError]) -> Iterator[type[errors.FlagError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _variables() -> set[str]:
    """Return the names of environment variables that code of the core reads or marks trials with; those whose names
    are worked out are plugins' and specs' own."""
    found: set[str] = set()
    for file in (ROOT / "flagcore").rglob("*.py"):
        if "testing" in file.parts:  # its checks set and restore what plugins are given
            continue
        text = file.read_text(encoding="utf-8")
        if "os.environ" not in text and "FLAGCORE_" not in text:
            continue
        tree = ast.parse(text)
        constants = {
            target.id: each.value.value
            for each in tree.body
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
        asked = [name for node in ast.walk(tree) for name in _asked(node)]
        found |= {str(name.value) for name in asked if isinstance(name, ast.Constant)}
        found |= {str(constants[name.id]) for name in asked if isinstance(name, ast.Name) and name.id in constants}
        found |= {str(value) for value in constants.values() if re.fullmatch(r"FLAGCORE_[A-Z_]+", str(value))}
    return found


def _asked(node: ast.AST) -> list[ast.expr]:
    """Return what a piece of code asks the environment for."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if isinstance(node, ast.Call) and re.fullmatch(r"os\.environ\.\w+|os\.getenv", called):
        return node.args[:1]
    return [node.slice] if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ" else []


def _keys(data: Any) -> Iterator[str]:
    """Yield all keys of nested plain data."""
    for key, value in data.items() if isinstance(data, dict) else ():
        yield key
        yield from _keys(value)
