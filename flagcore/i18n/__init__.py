"""Translates messages to the user's language with the gettext catalogues in `locale/`, and measures wide characters.

The code marks a message with `_("...")` or `ngettext`. Messages without a translation are shown in English. Records,
logs and machine-readable output are always English. The catalogue is loaded by the first message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

VARIABLE = "FLAGCORE_LANG"
"""The environment variable that selects the language."""
LANGUAGES = ("en", "zh")
LOCALE = Path(__file__).parent / "locale"

COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that can command a terminal, reorder a line or break UTF-8."""

_chosen_language = ""


def choose(language: str) -> bool:
    """Select a language by its name or by a locale such as `zh_CN.UTF-8`. An empty name selects English.

    Returns whether the language is known. If it is not, nothing changes.
    """
    global _chosen_language
    name = language.strip().lower().replace("-", "_").replace(".", "_").partition("_")[0] or "en"
    if name not in LANGUAGES:
        return False
    _chosen_language = name
    return True


def choose_by_locale() -> None:
    """Select the language of the locale for messages, which LC_ALL, LC_MESSAGES or LANG set. English is the default."""
    locales = (os.environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    if not choose(next(filter(None, locales), "")):
        choose("en")


def language() -> str:
    """Return the selected language: that of the environment variable, or else that of the locale."""
    if not _chosen_language and not choose(os.environ.get(VARIABLE, "") or "?"):
        choose_by_locale()
    return _chosen_language


@contextmanager
def in_english() -> Iterator[None]:
    """Switch to English within this context, for records that programs read."""
    global _chosen_language
    before, _chosen_language = _chosen_language, "en"
    try:
        yield
    finally:
        _chosen_language = before


def _(message: str, /, **values: object) -> str:
    """Return a message in the selected language, with `values` filled into its `{name}` fields."""
    if isinstance(message, Message):
        return _(
            message.template,
            **{name: _(each) if isinstance(each, Message) else each for name, each in message.values.items()},
        )
    text = _catalogue(language()).get(message, message)
    return text.format(**values) if values else text


class Message(str):
    """An English text that can be stored in a record, and that `_` can translate later, when it is printed."""

    def __new__(cls, template: str, /, **values: object) -> Message:
        message = super().__new__(cls, template.format(**values) if values else template)
        message.template, message.values = template, values
        return message

    template: str
    values: dict[str, object]

    @property
    def record(self) -> dict[str, object]:
        """The template and its values as plain data, from which `from_record` restores the message."""
        values = {name: value.record if isinstance(value, Message) else value for name, value in self.values.items()}
        return {"template": self.template, "values": values}


def from_record(text: str, record: object) -> str:
    """Return `text` in the selected language.

    `record`: the stored `Message.record` of the text. It is ignored if it does not yield exactly `text`.
    """
    try:
        message = _message(record)
    except (LookupError, TypeError, ValueError, AttributeError):
        return _(text)
    return _(message if message == text else text)


def _message(record: Any) -> Message:
    template, values = record["template"], record["values"]
    if _catalogue(language()).get(template, template) == template:
        raise LookupError(template)
    fields = {name: _message(value) if isinstance(value, dict) else value for name, value in values.items()}
    return Message(template, **fields)


def printable(text: str) -> str:
    """Return text without terminal colours, and with other control characters as escapes of JSON."""
    return CONTROLS.sub(lambda found: json.dumps(found[0])[1:-1], COLOURS.sub("", text))


def ngettext(one: str, many: str, count: int, /, **values: object) -> str:
    """Return the singular or plural form of a message in the selected language. `count` fills its field `{count}`."""
    return _catalogue(language()).get(one, one if count == 1 else many).format(count=count, **values)


def N_(message: str) -> str:
    """Return `message` unchanged, and mark it for translation. `_` translates it later, where it is used."""
    return message


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a "did you mean" question with the most similar known name, ignoring case, or an empty string.

    `cutoff`: the minimum similarity, from 0 to 1.
    """
    names = {each.casefold(): each for each in known}
    match = closest(name.casefold(), names, cutoff)
    return _("did you mean {name!r}?", name=names[match]) if match else ""


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the most similar of the `known` names, or an empty string. `cutoff`: as in `did_you_mean`."""
    common = [(each, (_letters(name) & _letters(each)).bit_count()) for each in known]  # difflib's filter is slower
    near = [each for each, count in common if 2 * count >= cutoff * (len(name) + len(each)) - 0.01]
    return next(iter(get_close_matches(name, near, n=1, cutoff=cutoff)), "")


@lru_cache(maxsize=1 << 16)
def _letters(name: str) -> int:
    """Return the letters of a name as bits, one for each letter and number of the same letters before it."""
    text = bytes(each % 32 for each in name.encode("ascii", "replace")[:256])
    return sum({1 << letter * 16 + min(15, text.count(letter, 0, at)) for at, letter in enumerate(text)})


@cache
def _catalogue(name: str) -> dict[str, str]:
    """Return the translations of a language by their English texts, without those that are missing.

    The form of a plural is that of all counts, for Chinese has one.
    """
    file = LOCALE / name / "LC_MESSAGES" / "flagcore.po"
    found = _TEXT.findall(file.read_text(encoding="utf-8") if file.is_file() else "")
    texts = json.loads(f"[{','.join(found)}]".replace('"\n"', ""))  # at once, because the start waits for it
    return {message: text for message, text in zip(texts[::2], texts[1::2], strict=True) if message and text}


_TEXT = re.compile(r'^msg(?:id|str)(?:\[0\])? (".*"(?:\n".*")*)', re.MULTILINE)
"""A text of a gettext catalogue, whose lines are strings of JSON: by turns a message and its translation."""
_CLOSING = re.escape("，。；：、！？）】》」』”’,.;:!?)]}%")
_OPENING = re.escape("([{（【《「『“‘")
_NARROW = r"[^\s⺀-鿿豈-﫿＀-￯、-〿]+"
_PIECES = re.compile(rf"\s+|[{_OPENING}]*(?:{_NARROW}|\S)[{_CLOSING}]*")


def columns(text: str) -> int:
    """Return the width of a line in terminal columns."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def left(text: str, width: int) -> str:
    """Return a text aligned to the left: padded on its right to `width` columns."""
    return text + " " * (width - columns(text))


def right(text: str, width: int) -> str:
    """Return a text aligned to the right: padded on its left to `width` columns."""
    return " " * (width - columns(text)) + text


def pieces(text: str) -> list[str]:
    """Split a text where lines may break: into blanks, words, and wide characters with their punctuation."""
    return _PIECES.findall(text)


def wrapped(text: str, width: int, indent: str = "", cut: bool = True) -> list[str]:
    """Wrap a text to lines of at most `width` columns.

    `indent`: precedes all lines except the first.
    `cut`: whether words that are longer than a line are cut. Otherwise their lines are longer.
    """
    lines, line = [], ""
    for piece in pieces(text):
        while columns(line + piece.rstrip()) > width:
            if line.strip():
                lines.append(line.rstrip())
            elif cut and len(piece) > 1:
                fitting = max(sum(columns(line + piece[:end]) <= width for end in range(1, len(piece) + 1)), 1)
                lines.append(line + piece[:fitting])
                piece = piece[fitting:]
            else:
                break
            line, piece = indent, piece.lstrip()
        if line.strip() or not lines or not piece.isspace():
            line += piece
    return [*lines, line.rstrip()] if line.strip() or not lines else lines
