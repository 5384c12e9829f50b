"""Transcripts of the vendor's tools in tests/smi: complete, truncated and garbled."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator

from flagcore.domain.chip import Device
from flagcore.testing import fakes
from flagcore.testing.problem import Problem, Skip
from flagcore.testing.subject import Subject
from flagcore.testing.transcripts import FOLDER, SOURCES, Transcript

PIECES = 36
"""Truncated and garbled variants of all transcripts together; each has at least six."""
SLOW_SECONDS = 1.0
"""A detection that takes this long is tried on fewer variants."""


def transcripts_have_sources(plugin: Subject) -> Iterator[Problem]:
    listed = {each.name for each in plugin.transcripts}
    present = {path.name for path in (plugin.source / FOLDER).iterdir()} - {SOURCES}
    for name in sorted(present - listed):
        yield Problem(f"{FOLDER / SOURCES} has no entry for {name}", "say there where it was printed")
    for name in sorted(listed - present):
        yield Problem(f"{FOLDER / name} is missing, but {SOURCES} lists it", "add the file, or remove the entry")
    for each in plugin.transcripts:
        if not each.source.strip():
            yield Problem(f"{FOLDER / SOURCES}: {each.name} has no source", "say where it was printed")


def transcripts_are_parsed(plugin: Subject) -> Iterator[Problem]:
    for each in (each for each in plugin.transcripts if each.tool):
        found = fakes.devices(plugin, {each.tool: fakes.prints(each.text)})
        if each.devices == 0 and fakes.without_tools(plugin):
            continue  # this machine has devices of its own
        wanted = [listed for listed in each.lists for _ in range(listed.devices)]
        if len(found) != len(wanted) or not all(one.matches(is_) for one, is_ in zip(wanted, found, strict=True)):
            yield Problem(
                f"{FOLDER / each.name}: flagcore_devices returns {_shown(found)}",
                f"correct the parser, or `lists` in {SOURCES}",
            )


def truncated_transcripts_add_no_devices(plugin: Subject) -> Iterator[Problem]:
    for each, whole, pieces in _whole(plugin):
        lines = [match.end() for match in re.finditer("\n", each.text)]
        ends = [len(each.text) * place // pieces for place in range(0, pieces, 2)]
        ends += [lines[len(lines) * place // pieces] for place in range(1, pieces, 2)]
        expected = {_who(device) for device in (*whole, *fakes.without_tools(plugin))}
        for end in ends:
            try:
                found = fakes.devices(plugin, {each.tool: fakes.prints(each.text[:end])})
            except Exception as error:
                yield _raised(each, f"truncated after {end} characters", error)
                break
            if strange := [device for device in found if _who(device) not in expected]:
                yield Problem(
                    f"{FOLDER / each.name}, truncated after {end} characters: {_shown(strange)}",
                    "leave out a device with incomplete lines",
                )
                break


def garbled_transcripts_add_no_devices(plugin: Subject) -> Iterator[Problem]:
    for each, whole, pieces in _whole(plugin):
        for seed in range(pieces):
            dice = random.Random(seed)
            garbled = bytearray(each.text.encode())
            for _ in range((1, 20, 400)[seed % 3]):
                garbled[dice.randrange(len(garbled))] = dice.randrange(1, 256)
            text = garbled.decode("utf-8", "replace")
            try:
                found = fakes.devices(plugin, {each.tool: fakes.prints(text)})
            except Exception as error:
                yield _raised(each, f"garbled ({seed})", error)
                break
            most = len(whole) + len(fakes.without_tools(plugin))
            if len(found) > most or len({device.index for device in found}) != len(found):
                yield Problem(
                    f"{FOLDER / each.name}, garbled ({seed}): flagcore_devices returns {_shown(found)}",
                    "leave out rows that share an index or have an unknown format",
                )
                break


def transcript_names_match_one_chip(plugin: Subject) -> Iterator[Problem]:
    plugin.own_chips()
    seen = False
    for each in plugin.listings:
        for listed in each.lists:
            if listed.other:
                continue
            seen = True
            answering = [chip.name for chip in plugin.chips if chip.has_name(listed.chip)]
            if len(answering) != 1:
                yield Problem(
                    f"{FOLDER / each.name} lists {listed.chip!r}, a name of {len(answering)} chips",
                    "add it to the aliases of its chip, or mark it other: true in sources.yaml",
                )
    if not seen:
        raise Skip("the transcripts list only unknown chips")


def _whole(plugin: Subject) -> Iterator[tuple[Transcript, tuple[Device, ...], int]]:
    share = max(PIECES // len(plugin.listings), 6)
    for each in plugin.listings:
        start = time.monotonic()
        whole = fakes.devices(plugin, {each.tool: fakes.prints(each.text)})
        fakes.without_tools(plugin)
        yield each, whole, share if time.monotonic() - start < SLOW_SECONDS else 2


def _who(device: Device) -> tuple[int, str, int | None]:
    return device.index, device.chip, device.memory_bytes


def _raised(each: Transcript, how: str, error: Exception) -> Problem:
    return Problem(
        f"{FOLDER / each.name}, {how}: flagcore_devices raises {type(error).__name__}: {str(error)[:120]}",
        "skip lines that cannot be parsed",
    )


def _shown(devices: tuple[Device, ...] | list[Device]) -> str:
    if not devices:
        return "no device"
    first = devices[0]
    mib = first.memory_bytes // 2**20 if first.memory_bytes else None
    return f"{len(devices)} devices, the first {first.index} {first.chip!r} with {mib} MiB, driver {first.driver!r}"
