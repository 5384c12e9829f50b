"""Lists and ranges as English has them: "a, b or c", "1 to 4"; and how Chinese joins what was told in parts."""

from __future__ import annotations

import re

_HIDDEN = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\][]*\]|\{[^{}]*\}")
"""What is not looked into: quoted texts and brackets."""
_VALUE = re.compile(r"\S+")
_ALL = re.compile(r"[^\s,;:'\"`]+(?:, [^\s,;:'\"`]+)+")
_BETWEEN = re.compile(r",? (?:or|and) |, ")
_WORDS = {"or": " 或 ", "and": " 和 "}
_RANGE = re.compile(r"(\S*\d\S*) to (\S*\d\S*)(| \S+)")
_CHINESE = "\u4e00-\u9fff"
_NO_BLANK = re.compile(
    f"(?<=[{_CHINESE}，。；：、？]) +(?=[{_CHINESE}])|(?<=[，。；：、？（]) (?=\\S)|(?<=\\S) (?=[，。；：、？（）])"
)
_BLANK = re.compile(f"(?<=[{_CHINESE}])\0(?=[A-Za-z0-9~`])|(?<=[A-Za-z0-9`])\0(?=[{_CHINESE}])")
EDGE = "\0"
"""What `tidy` takes for the edge of a place that was filled in."""


def items(text: str) -> tuple[list[str], str] | None:
    """Return the items of "a, b or c" or "a and b", and the Chinese word between the last two; None for no list."""
    if " or " not in text and " and " not in text:
        return None
    hidden = _HIDDEN.sub(lambda match: "\0" * len(match.group()), text)
    between = list(_BETWEEN.finditer(hidden))
    words = {word for match in between if (word := match.group().strip(", "))}
    if len(words) != 1 or between[-1].group() == ", ":
        return None
    starts, ends = [0, *(match.end() for match in between)], [*(match.start() for match in between), len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)], _WORDS[words.pop()]


def is_value(text: str) -> bool:
    """Return whether a text is one name, figure or quoted text, which no language changes."""
    return _VALUE.fullmatch(_HIDDEN.sub("0", text)) is not None


def joined(told: list[str], word: str) -> str:
    """Return what was told of a list's items as a Chinese list."""
    return tidy("、".join(told[:-1]) + word + told[-1])


def span(text: str) -> str | None:
    """Return "1 to 4" with Chinese between the ends; None for anything else."""
    found = _RANGE.fullmatch(text)
    return found and f"{found[1]} 到 {found[2]}{found[3]}"


def values(text: str) -> str | None:
    """Return "a, b, c" or "1 to 4" with Chinese between the values; None for anything else."""
    return span(text) or (text.replace(", ", "、") if _ALL.fullmatch(text) else None)


def tidy(text: str) -> str:
    """Return a text with a blank between Chinese and Latin at the edges of places, and none between Chinese."""
    return _NO_BLANK.sub("", _BLANK.sub(" ", text).replace(EDGE, ""))
