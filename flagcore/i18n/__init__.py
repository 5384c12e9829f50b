"""What is told to a person, in the language of that person; records and data stay English.

The sources speak English. A finished text is looked up line by line among the templates of a catalogue, which has
English and Chinese side by side, just before it is printed, or written into a page. What is not in it stays as it is.
Where English is spoken, none of this is loaded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flagcore.i18n.phrases import Phrases

VARIABLE = "FLAGCORE_LANG"
"""The environment variable that names the language."""
LANGUAGES = ("en", "zh")

_name = ""
_phrases: Phrases | None = None


def choose(asked: str) -> bool:
    """Speak the language that is asked for, English for nothing; return whether there is one of that name.

    A locale's name (`zh_CN.UTF-8`) stands for its language.
    """
    global _name, _phrases
    name = asked.strip().lower().replace("-", "_").replace(".", "_").partition("_")[0] or "en"
    if name not in LANGUAGES:
        return False
    _name, _phrases = name, None
    if name != "en":
        from flagcore.i18n.catalogue import phrases

        _phrases = phrases(name)
    return True


def spoken() -> str:
    """Return the language that is spoken: where nobody has chosen, that of the environment, if it is known."""
    if not _name and not choose(os.environ.get(VARIABLE, "")):
        choose("")
    return _name


def foreign() -> bool:
    """Return whether another language than English is spoken."""
    return spoken() != "en"


def said(text: str) -> str:
    """Return a text in the language that is spoken, line by line."""
    return _phrases.text(text) if foreign() and _phrases is not None else text


def said_from(start: str) -> str:
    """Return a text that may be the first sentence of a known one, or its start and three dots."""
    return _phrases.begun(start) if foreign() and _phrases is not None else start


def keep(lines: list[str]) -> list[str]:
    """Return lines that are said already, and have `said` leave them as they are."""
    if _phrases is not None:
        _phrases.finished.update(lines)
    return lines
