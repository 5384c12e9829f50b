"""The catalogues that our plugins ship: in the form of the core's, and of what the plugin says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flagcore.language.catalogue import read
from tests.language.sources import PLACE, ROOT, files, texts

CATALOGUES = sorted(ROOT.glob("plugins/*/flagcore_*/messages/zh.yaml"))


def test_every_plugin_of_ours_has_one() -> None:
    assert {file.parts[-3] for file in CATALOGUES} == {file.parent.name for file in ROOT.glob("plugins/*/*/hooks.py")}


@pytest.mark.parametrize("file", CATALOGUES, ids=lambda file: file.parts[-3])
def test_both_sides_have_the_same_places(file: Path) -> None:
    pairs = read(file)
    wrong = [key for key, other in pairs.items() if other and set(PLACE.findall(key)) != set(PLACE.findall(other))]
    assert not wrong


@pytest.mark.parametrize("file", CATALOGUES, ids=lambda file: file.parts[-3])
def test_every_entry_is_said_by_the_plugin(file: Path) -> None:
    package = file.parents[1]
    data = [*package.glob("*.yaml"), *package.glob("chips/*.yaml")]
    told = _plain(" ".join(each.read_text(encoding="utf-8") for each in data))
    said = {text.template for each in files(str(package)) for text in texts(each)}
    assert [key for key in read(file) if key not in said and _plain(key) not in told] == []


def _plain(text: str) -> str:
    return re.sub(r"[\s\"'\\]+", "", text)
