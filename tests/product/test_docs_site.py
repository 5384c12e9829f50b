"""The documentation site has every page, answers common searches, and works offline."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
JOINED = {"CONTRIBUTING.md", "CHANGELOG.md", "lab-notes.md"}
LOADED = re.compile(r'<(?:script|img|iframe|link)[^>]*\s(?:src|href)="?(?:https?:)?//|@import|url\("?https?:')
"""What a browser would fetch from elsewhere; links that a reader may follow are none of it."""


def test_each_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    pages = {str(file.relative_to(docs)) for file in docs.rglob("*.md")} | JOINED
    assert sorted(_pages(SITE["nav"])) == sorted(pages)


def test_first_page_leads_to_every_page() -> None:
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([^)#]+)", (docs / "index.md").read_text(encoding="utf-8")))
    assert {file.name for file in docs.glob("*.md")} - linked == {"index.md"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="`make docs` installs mkdocs-material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_loads_nothing_from_elsewhere(built: Path) -> None:
    files = [*built.rglob("*.html"), *built.rglob("*.css")]
    assert files
    assert {file.name: found.group() for file in files if (found := LOADED.search(file.read_text()))} == {}


def _pages(nav: list[Any]) -> Iterator[str]:
    for part in nav:
        ((_, inner),) = part.items()
        yield from _pages(inner) if isinstance(inner, list) else [inner]
