"""The pages as the tests read them: which there are, and their fenced blocks that people wrote."""

import re
from dataclasses import dataclass
from pathlib import Path

from docs.site.generate import without_blocks

ROOT = Path(__file__).parents[2]
ROOMS = ("*.md", "docs/*.md", "[epx]*/*/README.md", "benchmarks/*.md", "findings/*.md")
PAGES = sorted(str(file.relative_to(ROOT)) for room in ROOMS for file in ROOT.glob(room))
"""All pages, a new one too."""
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
CAPTION = re.compile(r"\*\*`([^`]+)`\*\*(?: \(at its end\))?\n\n\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its page, the line of its fence, its language, what is in it, and the file that it shows."""

    page: str
    line: int
    language: str
    text: str
    file: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first(self) -> str:
        """Its first line."""
        return self.text.strip("\n").partition("\n")[0]


def blocks_of(page: str, text: str) -> tuple[Block, ...]:
    """Return the fenced blocks of a page, in their order."""
    found = []
    for match in FENCE.finditer(text):
        caption = CAPTION.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 1
        inner = "\n".join(each.removeprefix(match[1]) for each in match[3].splitlines())
        found.append(Block(page, line, match[2], f"{inner}\n", caption[1] if caption else None))
    return tuple(found)


BLOCKS = tuple(block for page in PAGES for block in blocks_of(page, without_blocks(TEXT[page])))


def prose(page: str) -> str:
    """Return a page without its blocks."""
    return FENCE.sub("", TEXT[page])
