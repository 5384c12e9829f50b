"""The catalogues that our plugins ship: in the form of the core's, and of what the plugin says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from flagcore.i18n.catalogue import HERE, read
from flagcore.i18n.phrases import Phrases
from tests.i18n.sources import PLACE, ROOT, files, texts

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


@pytest.mark.parametrize("file", CATALOGUES, ids=lambda file: file.parts[-3])
def test_what_a_plugins_data_say_has_its_chinese(file: Path) -> None:
    package, own = file.parents[1], read(file)
    phrases, known = Phrases({**_core(), **own}), set(map(_plain, own))
    data = [*package.glob("*.yaml"), *package.glob("chips/*.yaml")]
    said = {text for each in data for text in _sentences(yaml.safe_load(each.read_text(encoding="utf-8")))}
    unknown = [text for text in sorted(said) if _plain(text) not in known]
    assert [text for text in unknown if ENGLISH.search(phrases.text(text))] == []


ENGLISH = re.compile(r"[a-z]{2,} [a-z]{2,}")
QUOTED = ("source", "example", "pattern", "tool", "software")
"""Keys of what others wrote, or of what it was done with."""


def _sentences(data: object) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from () if key in QUOTED else _sentences(value)
    elif isinstance(data, list):
        for each in data:
            yield from _sentences(each)
    elif isinstance(data, str) and ENGLISH.search(data):
        yield data


def _core() -> dict[str, str]:
    return {english: other for each in sorted((HERE / "zh").glob("*.yaml")) for english, other in read(each).items()}


def _plain(text: str) -> str:
    return re.sub(r"[\s\"'\\]+", "", text)
