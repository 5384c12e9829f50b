"""Whether the catalogue has what the sources say, and nothing else."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest
import yaml

from flagcore.i18n.catalogue import HERE, read
from tests.i18n.sources import CORE, PLACE, files, texts, wanted

ROOMS = sorted(each.stem for each in CORE.iterdir() if each.is_dir() or each.suffix == ".py")
"""All rooms of the core; what they say has its Chinese."""
FILES = sorted((HERE / "zh").glob("*.yaml"))
FOREIGN = ("click.yaml", "words.yaml")
"""Files of texts that are not ours, or that the sources have as names."""


def entries() -> dict[str, str]:
    return {english: other for file in FILES for english, other in read(file).items()}


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_room_says_has_its_chinese(room: str) -> None:
    known = entries()
    lacking = [f"{place}: {template}" for template, place in wanted(room).items() if template not in known]
    told = "`python tests/i18n/sources.py ROOM` prints them as entries for flagcore/i18n/zh/"
    assert not lacking, "\n".join([told, *lacking])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_both_sides_have_the_same_places(file: Path) -> None:
    pairs = read(file)
    wrong = [english for english, other in pairs.items() if other and places(english) != places(other)]
    assert not wrong


def places(text: str) -> set[str]:
    return set(PLACE.findall(text))


def test_every_entry_is_said_somewhere() -> None:
    said = {text.template for file in files(str(CORE)) for text in texts(file)}
    dead = [
        f"{file.name}: {english}"
        for file in FILES
        if file.name not in FOREIGN
        for english in read(file)
        if english not in said
    ]
    assert not dead, "\n".join(dead)


def test_every_text_has_one_entry() -> None:
    heads = [line for file in FILES for line in file.read_text(encoding="utf-8").splitlines() if line.endswith('":')]
    twice = [json.loads(head[:-1]) for head, count in collections.Counter(heads).items() if count > 1]
    assert not twice


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_catalogue_is_yaml(file: Path) -> None:
    assert yaml.safe_load(file.read_text(encoding="utf-8")) == read(file)
