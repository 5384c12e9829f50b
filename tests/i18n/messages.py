"""The messages of the sources and their catalogue.

python -m tests.i18n.messages update        # add new messages to the catalogue
python -m tests.i18n.messages untranslated  # list the messages without a translation
"""

import ast
import inspect
import io
import sys
from collections.abc import Collection, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import get_args, get_type_hints

import yaml
from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po

from flagcore.domain.chip import Source, Support
from flagcore.domain.trial import FIDELITIES, Role, TrialState
from flagcore.report.formats import COLUMNS, NAMES
from flagcore.spec.plain_data import SafeLoader

ROOT = Path(__file__).parents[2]
CORE = ROOT / "flagcore"
FILE = CORE / "i18n" / "locale" / "zh" / "LC_MESSAGES" / "flagcore.po"
MARKS = {"_": 1, "N_": 1, "Message": 1, "ngettext": 2}
"""The functions that mark messages, and how many of their arguments are texts."""

CLICK = (
    "Usage:",
    "Options",
    "Commands",
    "Missing command.",
    "Missing argument",
    "Missing option",
    "Missing parameter",
    "Error: {message}",
    "Try '{command} {option}' for help.",
    "No such option {name!r}.",
    "Option {name!r} requires an argument.",
    "Invalid value: {message}",
    "Invalid value for {param_hint}: {message}",
    "{value!r} is not a valid {number_type}.",
    "{value} is not in the range {range}.",
    "Show the version and exit.",
    "Show this message and exit.",
    "default: {default}",
    "required",
)
"""Messages of click itself."""

PLAIN = {"short_rates", "short_latencies", "training_units"}
"""Names that are the same in all languages."""

DATA = {
    "plugins/*/*/quirks.yaml": ("reason", "note", "advice", "install"),
    "plugins/*/*/knobs.yaml": ("says", "claim", "method", "risk"),
    "extras/vendorkit/*/knobs.yaml": ("says", "claim", "method", "risk"),
    "plugins/*/*/chips/*.yaml": ("notes",),
    "e[nx]*/*/flagcore_*/*.yaml": ("why", "message", "advice"),
    "e[nx]*/*/flagcore_*/*/*.yaml": ("why", "message", "advice"),
    "plugins/*/*/settings.yaml": ("why",),
}
"""The texts for users in the data files of plugins and engines: the keys that contain them, by files."""

Message = str | tuple[str, ...]


def sources() -> Catalog:
    """Return all messages of the sources."""
    catalogue = Catalog(project="flagcore", domain="flagcore", fuzzy=False)
    for file in sorted([*CORE.rglob("*.py"), *ROOT.glob("e[nx]*/*/flagcore_*/**/*.py")]):
        text, file_name = file.read_text(encoding="utf-8"), str(file.relative_to(ROOT))
        tree = ast.parse(text)
        for message in [*_marked(tree), *(_help(tree) if "import click\n" in text else [])]:
            catalogue.add(message, locations=[(file_name, 0)])
    for pattern, keys in DATA.items():
        for file in sorted(ROOT.glob(pattern)):
            for message in _texts(list(yaml.load_all(file.read_text(encoding="utf-8"), SafeLoader)), keys):
                catalogue.add(message, locations=[(str(file.relative_to(ROOT)), 0)])
    tables = [*COLUMNS.values(), *({name: key for key, name in NAMES[each].items()} for each in NAMES.keys() - PLAIN)]
    for name in (name for table in tables for name in table):
        catalogue.add(name, locations=[("flagcore/report/names.yaml", 0)])
    states = (state.value.replace("_", " ") for state in TrialState)
    words = (*(each.value for each in (*Role, *Support)), *get_args(get_type_hints(Source)["kind"]))
    for word in (*CLICK, *states, *words, *FIDELITIES):
        catalogue.add(word)
    return catalogue


def _marked(tree: ast.Module) -> Iterator[Message]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MARKS:
            texts = [each.value for each in node.args[: MARKS[node.func.id]] if isinstance(each, ast.Constant)]
            if texts and all(texts):
                yield texts[0] if len(texts) == 1 else tuple(texts)


def _texts(content: object, keys: Collection[str], key: str = "") -> Iterator[str]:
    """Yield the texts under `keys` of a data file."""
    if isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else ((key, each) for each in content)
        for name, each in items:
            yield from _texts(each, keys, name)
    elif isinstance(content, str) and key in keys and content:
        yield content


def _help(tree: ast.Module) -> Iterator[str]:
    """Yield the help of commands and options."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(map(_is_command, node.decorator_list)):
            for paragraph in inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n"):
                yield " ".join(paragraph.split())
        elif isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield node.value.value


def _is_command(decorator: ast.expr) -> bool:
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(call, ast.Attribute) and call.attr in ("command", "group")


def translations() -> Catalog:
    """Return the Chinese catalogue."""
    with FILE.open("rb") as stream:
        return read_po(stream, locale="zh")


def update() -> None:
    """Put the messages of the sources into the catalogue."""
    catalogue = translations()
    catalogue.update(sources(), no_fuzzy_matching=True, update_creation_date=False)
    catalogue.obsolete.clear()
    catalogue.revision_date = datetime(2026, 1, 1, tzinfo=timezone.utc)
    text = io.BytesIO()
    write_po(text, catalogue, width=120, sort_output=True, include_lineno=False)
    FILE.write_bytes(text.getvalue())


def untranslated() -> None:
    """Print the messages without a translation, and how many have one."""
    known, messages = translations(), [each for each in sources() if each.id]
    untranslated_messages = [
        each for each in messages if (found := known.get(each.id)) is None or not any(found.string)
    ]
    for message in untranslated_messages:
        print(f"{message.locations[0][0]}: {message.id!r}")
    print(f"{len(messages) - len(untranslated_messages)} of {len(messages)} messages are translated")


if __name__ == "__main__":
    {"update": update, "untranslated": untranslated}[sys.argv[1]]()
