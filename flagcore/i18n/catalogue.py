"""The catalogue: files of English texts, each with its translation below it.

A file is YAML of one form: lines that begin with `#`, and strings in double quotes, `"English {0}":` and in the next
line `"中文 {0}"`. `{0}`, `{1}` stand for what is filled in. An empty translation is for a text that nobody reads as a
sentence, and that stays as it is. Read as JSON, which takes a hundredth of the time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from flagcore.i18n.phrases import Phrases

HERE = Path(__file__).parent
PLUGINS, FOLDER = "flagcore.plugins", "messages"
"""The group of the plugins' entry points, and the folder in a plugin's package that has its catalogues."""


def read(file: Path) -> dict[str, str]:
    """Return the translations of one file by their English. Raises ValueError for what is no such file."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    joined = "".join(line if line.endswith('":') else f"{line},\n" for line in lines)
    found: dict[str, str] = json.loads("{" + joined.rstrip(",\n") + "}")
    return found


def phrases(language: str) -> Phrases:
    """Return all that can be said in a language: the core's catalogue, and those of the installed plugins."""
    entries: dict[str, str] = {}
    for file in sorted((HERE / language).glob("*.yaml")):
        entries |= read(file)
    for file in _of_plugins(language):
        with suppress(OSError, ValueError):  # a broken file of a plugin costs its texts only
            entries = {**read(file), **entries}
    return Phrases(entries)


def _of_plugins(language: str) -> Iterator[Path]:
    """Yield the catalogues of installed plugins, without importing them."""
    for point in entry_points(group=PLUGINS):
        with suppress(ImportError, ValueError, AttributeError):
            found = find_spec(point.value.partition(":")[0].partition(".")[0])
            for place in (found and found.submodule_search_locations) or ():
                if (file := Path(place, FOLDER, f"{language}.yaml")).is_file():
                    yield file
