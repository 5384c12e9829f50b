"""Transcripts of the vendor's tools in tests/smi: complete, truncated and garbled."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence

from flagcore.domain.chip import Device
from flagcore.testing import fakes
from flagcore.testing.kit import Problems, check
from flagcore.testing.subject import Problem, Skip, Subject
from flagcore.testing.transcripts import FOLDER, SOURCES, Transcript

PIECES = 36
"""Truncated and garbled variants of all transcripts together; each has at least six."""
SLOW_SECONDS = 1.0
"""A detection that takes this long is tried on fewer variants."""


@check()
def transcripts_have_sources(plugin: Subject) -> Problems:
    listed = {each.name for each in plugin.transcripts}
    present = {path.name for path in (plugin.source / FOLDER).iterdir()} - {SOURCES}
    for name in sorted(present - listed):
        yield Problem(f"{FOLDER / SOURCES} has no entry for {name}", "add where it was printed")
    for name in sorted(listed - present):
        yield Problem(f"{FOLDER / name} is missing, but {SOURCES} lists it", "add the file, or remove the entry")
    for each in plugin.transcripts:
        if not each.source.strip():
            yield Problem(f"{FOLDER / SOURCES}: {each.name} has no source", "add where it was printed")


@check(f"correct the parser, or `lists` in {SOURCES}")
def transcripts_are_parsed(plugin: Subject) -> Problems:
    for each in (each for each in plugin.transcripts if each.tool):
        found = fakes.devices(plugin, fakes.printing(each))
        if each.devices == 0 and fakes.without_tools(plugin):
            continue  # this machine has devices of its own
        wanted = [listed for listed in each.lists for _ in range(listed.devices)]
        if len(found) != len(wanted) or not all(one.matches(is_) for one, is_ in zip(wanted, found, strict=True)):
            yield f"{FOLDER / each.name}: flagcore_devices returns {_shown(found)}"


@check("leave out a device with incomplete lines")
def truncated_transcripts_add_no_devices(plugin: Subject) -> Problems:
    for each, whole, pieces in _whole(plugin):
        lines = [match.end() for match in re.finditer("\n", each.text)]
        ends = [len(each.text) * place // pieces for place in range(0, pieces, 2)]
        ends += [lines[len(lines) * place // pieces] for place in range(1, pieces, 2)]
        expected = {(device.index, device.chip, device.memory_bytes) for device in whole}
        texts = ((f"truncated after {end} characters", each.text[:end]) for end in ends)
        for how, found in _tried(plugin, each, texts):
            strange = [each for each in found if (each.index, each.chip, each.memory_bytes) not in expected]
            if strange:
                yield f"{how}: {_shown(strange)}"
                break


@check("leave out rows that share an index or have an unknown format")
def garbled_transcripts_add_no_devices(plugin: Subject) -> Problems:
    for each, whole, pieces in _whole(plugin):
        texts = ((f"garbled ({seed})", _garbled(each.text, seed)) for seed in range(pieces))
        for how, found in _tried(plugin, each, texts):
            if len(found) > len(whole) or len({device.index for device in found}) != len(found):
                yield f"{how}: flagcore_devices returns {_shown(found)}"
                break


@check("add it to the aliases of its chip, or mark it other: true in sources.yaml")
def transcript_names_match_one_chip(plugin: Subject) -> Problems:
    plugin.own_chips()
    known = [(each, listed) for each in plugin.listings for listed in each.lists if not listed.other]
    if not known:
        raise Skip("the transcripts list only unknown chips")
    for each, listed in known:
        count = sum(chip.has_name(listed.chip) for chip in plugin.chips)
        if count != 1:
            yield f"{FOLDER / each.name} lists {listed.chip!r}, a name of {count} chips"


def _whole(plugin: Subject) -> Iterator[tuple[Transcript, tuple[Device, ...], int]]:
    """Yield each listing with its devices, those of this machine included, and the number of variants to try."""
    share = max(PIECES // len(plugin.listings), 6)
    own = fakes.without_tools(plugin)
    for each in plugin.listings:
        start = time.monotonic()
        whole = fakes.devices(plugin, fakes.printing(each))
        yield each, (*whole, *own), share if time.monotonic() - start < SLOW_SECONDS else 2


def _tried(
    plugin: Subject, transcript: Transcript, texts: Iterable[tuple[str, str]]
) -> Iterator[tuple[str, tuple[Device, ...]]]:
    """Yield the devices that are found in each text, after words for the text. Raises BadPlugin."""
    for how, text in texts:
        where = f"{FOLDER / transcript.name}, {how}"
        yield where, fakes.devices(plugin, {transcript.tool: fakes.prints(text)}, where)


def _garbled(text: str, seed: int) -> str:
    dice, garbled = random.Random(seed), bytearray(text.encode())
    for _ in range((1, 20, 400)[seed % 3]):
        garbled[dice.randrange(len(garbled))] = dice.randrange(1, 256)
    return garbled.decode("utf-8", "replace")


def _shown(devices: Sequence[Device]) -> str:
    if not devices:
        return "no device"
    first = devices[0]
    mib = first.memory_bytes // 2**20 if first.memory_bytes else None
    return f"{len(devices)} devices, the first {first.index} {first.chip!r} with {mib} MiB, driver {first.driver!r}"
