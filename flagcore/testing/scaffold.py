"""Creates a plugin for a new vendor: a complete distribution from the template of `flagcore.vendorkit`."""

from __future__ import annotations

import keyword
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path

from flagcore import __version__, plugins
from flagcore.errors import UsageError
from flagcore.hooks import HOOKS_API
from flagcore.plugins.installed import installed, origin

SUFFIX = ".tmpl"


def new_plugin(name: str, *, vendor: str | None = None, chip: str | None = None, directory: str = ".") -> Path:
    """Write `directory`/flagcore-NAME and return it. Raises UsageError for an invalid or existing name."""
    _check_name(name)
    vendor, chip = vendor or name.capitalize(), chip or f"{name[0].upper()}1"
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*( [\w.+-]+)*", vendor, re.ASCII):
        raise UsageError(f"--vendor {vendor!r} must be words of Latin letters, digits, '-', '.', '+' and '_'")
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", chip, re.ASCII):
        word = re.sub(r"[^\w.+-]+", "-", chip, flags=re.ASCII).strip("-._+")
        hint = f"; name it {word}" if word else ""
        raise UsageError(f"--chip {chip!r} must be one word of Latin letters, digits, '-', '.', '+' and '_'{hint}")
    if owner := plugins.load_plugins().owner(chip):
        raise UsageError(f"--chip {chip!r} is a chip of the plugin {owner} already; use the name of your chip")
    folder = Path(directory) / f"flagcore-{name}"
    if folder.exists():
        raise UsageError(f"{folder} exists already; give another NAME or --directory, or remove it")
    words = {
        "name": name,
        "NAME": name.upper(),
        "Vendor": vendor,
        "Class": name.title().replace("_", ""),
        "chip": chip,
        "file": chip.casefold(),
        "release": ".".join(__version__.split(".")[:2]),
        "api": str(HOOKS_API),
        "next": _next(__version__),
    }
    try:
        for path, text in _rendered(words):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    return folder


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]{,39}", name) or name.endswith("_") or keyword.iskeyword(name):
        raise UsageError(
            f"NAME {name[:60]!r} must be at most 40 lower-case letters, digits and '_', begin with a letter, "
            "not end with '_', and be no keyword"
        )
    points = installed(plugins.GROUP).points
    if name in points:
        distribution = origin(points[name][0]).metadata["Name"]
        raise UsageError(f"NAME {name!r} is an installed plugin (from {distribution}); use another name")
    if f"flagcore_{name}" in sys.modules or name in ("core", "testing"):
        raise UsageError(f"NAME {name!r} is taken; use another name")


def _rendered(words: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file."""
    template = Path(str(files("flagcore.vendorkit"))) / "template"
    for file in sorted(template.rglob(f"*{SUFFIX}")):
        path = _filled(file.relative_to(template).as_posix(), words)
        yield path.removesuffix(SUFFIX).replace("dot-", "."), _filled(file.read_text("utf-8"), words)


def _filled(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"@(\w+)@", lambda match: words[match[1]], text)


def _next(version: str) -> str:
    major, minor, *_ = version.split(".")
    return f"{major}.{int(minor) + 1}"
