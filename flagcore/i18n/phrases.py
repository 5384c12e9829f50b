"""Texts matched against templates, so that what was put together in English is told in another language.

A template's places (`{0}`) are told in turn, as they may hold texts of the catalogue themselves. Where no template is
as long as a text, its parts between commas, colons and the like are told one by one, and so are the items of a list.
Of several ways that in which most letters belong to templates is taken, then that whose places hold fewest clauses.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from flagcore.i18n import lists

PLACE = re.compile(r"\{(\d+)\}")
WORD = re.compile(r"[A-Za-z]{2,}")
BETWEEN = re.compile(r"(; |: |, |\. | \(|\) (?=\w)|\)(?=$|[\s,;:.])|  \[|\]$|\.$|\n)")
"""What stands between the parts of a text."""
WIDE_BETWEEN = {"; ": "；", ": ": "：", ", ": "，", ". ": "。", " (": "（", ") ": "）", ")": "）", ".": "。"}
"""The same beside a Chinese text."""
CHINESE = re.compile("[\u4e00-\u9fff]")
LEADING = re.compile(r"(?:\s|[-*•] |flag: )*")
KEY = re.compile(r"(?:[^\s;:,]|,(?=\d))+ (?P<value>= )?")
"""What stands before what is told of it: a name, or a key and its value, which may hold blanks."""
PREDICTED = re.compile(r"~(?=[A-Za-z])")
"""What marks the name of a predicted figure."""
MOST_PARTS = 40
SHORTEST_START = 12
LEAST, WEAK = 3, 14
"""A template of fewer letters than the first is none; one of fewer than the second takes no prose into a place."""
PROSE = re.compile(r"[;:.] |, (?=[a-z~])|(?:^|\s)[a-z]{2,}\s+[a-z]{2,}(?:\s|$)")
"""Words of a sentence, and what stands between its parts."""
CLAUSES = re.compile(r"[;:,.] | \(")


@dataclass(frozen=True, slots=True)
class _Found:
    """A text that is told: how many of its letters are the catalogue's, how many clauses its places hold."""

    letters: int
    text: str
    held: int = 0
    last: str = ""

    @property
    def rank(self) -> tuple[int, int]:
        """How well it is told, the larger the better."""
        return self.letters, -self.held


@dataclass
class _Template:
    """One entry of the catalogue that has places."""

    english: str
    other: str
    letters: int = field(init=False)

    def __post_init__(self) -> None:
        self.letters = sum(letter.isalpha() for letter in PLACE.sub("", self.english))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """What matches a text that was made of it; a full stop is not that of a figure."""
        literals = PLACE.split(self.english)
        parts = [f"(?P<p{part}>.*?)" if at % 2 else re.escape(part) for at, part in enumerate(literals)]
        parts = [f"{part}(?!\\d)" if part.endswith("\\.") else part for part in parts]
        return re.compile("".join(parts), re.DOTALL)

    @cached_property
    def open(self) -> str:
        """The place at the end that a colon or the like leads to, which may hold any text."""
        found = re.search(r"(?:[:;] | \()\{(\d+)\}\)?\.?$", self.english)
        return "" if found is None else f"p{found[1]}"

    @cached_property
    def words(self) -> list[str]:
        """The whole words that a text must have to match."""
        found = []
        for match in WORD.finditer(PLACE.sub("\0", self.english)):
            before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
            if "\0" not in (before, after):
                found.append(match.group())
        return found


class Phrases:
    """What can be said: `text` tells a text, line by line; the lines in `finished` are told already."""

    def __init__(self, entries: Mapping[str, str]) -> None:
        self.finished: set[str] = set()
        self._whole = {english: other for english, other in entries.items() if other and not PLACE.search(english)}
        templates = [_Template(english, other) for english, other in entries.items() if other and PLACE.search(english)]
        templates = [each for each in templates if each.letters >= LEAST]
        self._by_word = _index(templates)
        self._known: dict[str, _Found | None] = {}

    def text(self, text: str) -> str:
        """Return a text in the language; what is unknown of it stays."""
        return "\n".join(self._line(line) for line in text.split("\n"))

    def begun(self, start: str) -> str:
        """Return the text that begins so, up to its first full stop."""
        if start not in self._whole and len(start) > SHORTEST_START:
            begin = start.removesuffix("...").rstrip()
            other = next((other for english, other in self._whole.items() if english.startswith(begin)), None)
            if other is not None:
                return "".join(other.partition("。")[:2])
        return self.text(start)

    def _line(self, line: str) -> str:
        if line in self.finished or not line or line.isspace():
            return line
        start = LEADING.match(line)
        assert start is not None, "it may match nothing"
        bare = line[start.end() :].rstrip(" :")
        found = self._told(bare)
        if found is None:
            return line
        return line[: start.end()] + found.text + line[start.end() + len(bare) :].replace(":", "：")

    def _told(self, text: str) -> _Found | None:
        """Return the best way to tell a text, None where nothing of it is known."""
        if text not in self._known:
            if len(self._known) > 20_000:
                self._known.clear()
            self._known[text] = None  # what holds itself is not told for ever
            self._known[text] = self._parts(text)
        return self._known[text]

    def _parts(self, text: str) -> _Found | None:
        """Return the best of all ways to cut a text into parts and tell each by a template."""
        if text.startswith("(") and text.endswith(")") and text.count("(") == 1:
            inner = self._told(text[1:-1])
            return inner and _Found(inner.letters, f"（{inner.text}）")
        if PREDICTED.match(text) and text not in self._whole:
            inner = self._told(text[1:])
            return inner and _Found(inner.letters, f"~{inner.text}")
        pieces = BETWEEN.split(text)
        count = len(pieces[::2])
        if count == 1 or count > MOST_PARTS:
            return self._whole_of(text)
        best: list[_Found] = [_Found(0, "")]
        for end in range(1, count + 1):
            choices = []
            for begin in range(end):
                part = "".join(pieces[2 * begin : 2 * end - 1])
                stop = pieces[2 * end - 1 : 2 * end] == [". "]
                found = (self._sentence(part) if stop else None) or self._whole_of(part)
                if found is None and end - begin > 1:
                    continue
                told, before = found or _Found(0, part), best[begin]
                between = _between(pieces[2 * begin - 1], before, told.text) if begin else ""
                letters, held = before.letters + told.letters, before.held + told.held
                choices.append(_Found(letters, before.text + between + told.text, held, told.text))
            best.append(max(choices, key=lambda choice: choice.rank))
        return best[-1] if best[-1].letters else None

    def _sentence(self, text: str) -> _Found | None:
        """Return a text told as a sentence whose full stop is left to what stands between sentences."""
        found = self._by_template(f"{text}.", set(WORD.findall(text)))
        return found and replace(found, text=found.text.removesuffix("。"))

    def _whole_of(self, text: str) -> _Found | None:
        """Return a text told by the one template that fits it best, or by one for what its key breaks."""
        words = set(WORD.findall(text))
        if not words:
            return None
        if ends := lists.span(text):
            return _Found(2, ends)
        found = max(filter(None, (self._listed(text), self._by_template(text, words))), key=_rank, default=None)
        key = KEY.match(text)
        end = key.end() if key else 0
        while found is None and end:
            rest = self._by_template(text[end:], set(WORD.findall(text[end:])))
            found = rest and _Found(rest.letters, lists.tidy(text[:end] + rest.text), rest.held)
            end = text.find(" ", end) + 1 if key and key["value"] else 0
        return found

    def _by_template(self, text: str, words: set[str]) -> _Found | None:
        if text in self._whole:
            return _Found(sum(letter.isalpha() for letter in text), self._whole[text])
        found = [each for word in (*words, "") for each in self._by_word.get(word, ()) if words.issuperset(each.words)]
        told = [self._filled(each, match) for each in found if (match := each.pattern.fullmatch(text))]
        return max((each for each in told if each), key=_rank, default=None)

    def _listed(self, text: str) -> _Found | None:
        """Return a list told item by item, None where one of them is neither known nor a mere value."""
        found = lists.items(text)
        if found is None:
            return None
        told = [self._item(item) for item in found[0]]
        known = [item for item in told if item]
        if len(known) < len(told):
            return None
        return _Found(2 + sum(item.letters for item in known), lists.joined([item.text for item in known], found[1]))

    def _item(self, text: str) -> _Found | None:
        told = self._by_template(text, set(WORD.findall(text)))
        return _Found(0, text) if told is None and lists.is_value(text) else told

    def _filled(self, template: _Template, match: re.Match[str]) -> _Found | None:
        """Return a template's translation with its places told; None for a weak one that would swallow sentences."""
        letters, places, held = template.letters, {}, 0
        for name, value in match.groupdict().items():
            bare = value.strip(" ")
            told = self._told(bare) if bare else None
            if value.count("(") != value.count(")"):
                return None
            if value.endswith(".") and match.end(name) == len(match.string) and not (told and told.text.endswith("。")):
                return None  # the full stop is the sentence's, not the place's
            joined = lists.values(bare)
            text = joined if told is None else told.text
            prose = PROSE.search(value) and (text is None or PROSE.search(text))
            if prose and template.letters < WEAK and name != template.open:
                return None
            letters += told.letters if told else 0
            held += 0 if joined else len(CLAUSES.findall(value))
            places[name[1:]] = value if text is None else value.replace(bare, text)
        text = PLACE.sub(lambda place: f"{lists.EDGE}{places[place[1]]}{lists.EDGE}", template.other)
        return _Found(letters, lists.tidy(text), held)


def _index(templates: Iterable[_Template]) -> dict[str, list[_Template]]:
    """Return templates by their rarest word; those without any by nothing."""
    known = list(templates)
    count: dict[str, int] = defaultdict(int)
    for template in known:
        for word in template.words:
            count[word] += 1
    found: dict[str, list[_Template]] = defaultdict(list)
    for template in known:
        found[min(template.words, key=lambda word: count[word], default="")].append(template)
    return found


def _rank(found: _Found) -> tuple[int, int]:
    return found.rank


def _between(between: str, before: _Found, after: str) -> str:
    """Return what stands between two parts, wide beside Chinese; a bracket is closed as it was opened."""
    if between.startswith(")"):
        wide = before.text.count("（") > before.text.count("）")
    elif between == ", ":
        wide = bool(CHINESE.match(before.text[-1:]) or CHINESE.match(after) or before.text.endswith("）"))
    else:
        wide = between == "; " or bool(CHINESE.search(before.last) or CHINESE.match(after))
    return WIDE_BETWEEN.get(between, between) if wide else between
