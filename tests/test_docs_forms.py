"""A page holds blocks, links and inline names only in the forms that the other tests read."""

import json
import re

import click
import pytest
from click.testing import CliRunner

from flagcore.cli.main import flag
from tests.pages import PAGES, ROOT, TEXT, prose

UNSEEN = {
    "a block fenced with ~~~": r"^ *~~~",
    "a block by its indent alone": r"\n\n(?! *[-*\d|])(?: {4}|\t)\S(?<!\n)",
    "a link with its address elsewhere": r"\]\[|^\[[^\]]+\]: ",
    "a link or picture as HTML": r"<(?:a|img|pre|code)[\s>]",
}
OPTION = re.compile(r"`flag ([a-z][^`]*)`")
KEY = re.compile(r"`((?:auto_tuner|train|serve|cluster|model)\.\w+(?:\.\w+)*)")
FOREIGN = ("docs/flagscale.md", "CHANGELOG.md")
"""Pages that also contain FlagScale's keys."""
FILES = (".yaml", ".json", ".py")


@pytest.mark.parametrize("form", UNSEEN)
def test_every_form_on_a_page_is_tested(form: str) -> None:
    found = {page: re.search(UNSEEN[form], prose(page), re.MULTILINE) for page in PAGES}
    assert {page: match[0] for page, match in found.items() if match} == {}


def test_pages_are_at_their_expected_paths() -> None:
    folders = [ROOT / "docs", *ROOT.glob("plugins/*"), *ROOT.glob("extras/*")]
    lying = {str(file.relative_to(ROOT)) for folder in folders for file in folder.rglob("*.md")}
    assert {page for page in lying if "tests/" not in page} <= set(PAGES)


def test_options_that_sentences_name_exist() -> None:
    assert {line for page in PAGES for line in OPTION.findall(TEXT[page]) if not _are_options(line)} == set()


def _are_options(line: str) -> bool:
    """Return whether all options of a command line exist."""
    words, command = line.split(), flag
    while words and isinstance(command, click.Group):
        command = command.get_command(click.Context(command), words.pop(0))
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return {word.partition("=")[0] for word in words if word.startswith("--")} <= options


def test_keys_that_sentences_name_exist() -> None:
    schema = json.loads(CliRunner().invoke(flag, ["schema"]).output)
    found = {key for page in PAGES if page not in FOREIGN for key in KEY.findall(TEXT[page]) if not key.endswith(FILES)}
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
