"""The messages of the sources and their catalogues.

python -m tests.i18n.messages update        # put new messages into the catalogues (.po), and compile them (.mo)
python -m tests.i18n.messages untranslated  # list what has no translation
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.extract import extract
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).parents[2]
CORE = ROOT / "flagcore"
FILE = CORE / "i18n" / "locale" / "zh" / "LC_MESSAGES" / "flagcore.po"
KEYWORDS = {"_": None, "N_": None, "ngettext": (1, 2)}


def sources() -> Catalog:
    """Return all messages of the sources."""
    catalogue = Catalog(project="flagcore", domain="flagcore", fuzzy=False)
    for file in sorted(CORE.rglob("*.py")):
        place = str(file.relative_to(ROOT))
        with file.open("rb") as stream:
            for line, message, *_ in extract("python", stream, KEYWORDS, options={"encoding": "utf-8"}):
                catalogue.add(message, locations=[(place, line)])
        for line, text in help_texts(file):
            catalogue.add(text, locations=[(place, line)])
    return catalogue


def help_texts(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the help of commands and options, and the headings of tables: keys of `..._COLUMNS`."""
    if file.parent != CORE / "cli":
        return
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and any(map(_is_command, node.decorator_list)):
            for paragraph in inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n"):
                yield node.lineno, " ".join(paragraph.split())
        elif isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield node.lineno, node.value.value
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_COLUMNS"):
            assert isinstance(node.value, ast.Dict)
            for key in node.value.keys:
                if isinstance(key, ast.Constant):
                    yield key.lineno, key.value


def _is_command(decorator: ast.expr) -> bool:
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(call, ast.Attribute) and call.attr in ("command", "group")


def translations() -> Catalog:
    """Return the catalogue in Chinese."""
    with FILE.open("rb") as stream:
        return read_po(stream, locale="zh")


def update() -> None:
    """Write the catalogue with the messages of the sources, and compile it."""
    catalogue = translations() if FILE.is_file() else Catalog(locale="zh", domain="flagcore", fuzzy=False)
    catalogue.update(sources(), no_fuzzy_matching=True, update_creation_date=False)
    catalogue.obsolete.clear()
    catalogue.revision_date = datetime(2026, 1, 1, tzinfo=timezone.utc)
    text = io.BytesIO()
    write_po(text, catalogue, width=120, omit_header=False, sort_output=True, include_lineno=False)
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_bytes(text.getvalue())
    FILE.with_suffix(".mo").write_bytes(compiled(catalogue))


def compiled(catalogue: Catalog) -> bytes:
    """Return a catalogue in gettext's binary format."""
    binary = io.BytesIO()
    write_mo(binary, catalogue)
    return binary.getvalue()


def untranslated() -> None:
    """Print how much of the sources is translated, and what is not."""
    known, messages = translations(), [each for each in sources() if each.id]
    missing = [each for each in messages if (found := known.get(each.id)) is None or not found.string]
    for message in missing:
        print(f"{message.locations[0][0]}: {message.id!r}")
    print(f"{len(messages) - len(missing)} of {len(messages)} messages are translated")


if __name__ == "__main__":
    {"update": update, "untranslated": untranslated}[sys.argv[1]]()
