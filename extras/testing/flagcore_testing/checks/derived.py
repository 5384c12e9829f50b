"""Checks of figures against a second way to the same figure: units, clock and operations, or lanes, or transfers."""

import re
from collections.abc import Iterator

from flagcore_testing.checks.chips import BANDWIDTH, LINK, PEAK
from flagcore_testing.kit import Problems, Subject, check

CLOCK = re.compile(r"\bat (\d+(?:\.\d+)?) ?(GHz|MHz)")
UNITS = re.compile(r"\b(\d+) (?:[a-z]+ )?(?:units|cores)(?: at [\d.]+ ?[GM]Hz)? of (\d+)\b")
OF_FORMATS = re.compile(r"\b(\d+) (fp64|fp32|tf32|bf16|fp16|fp8|fp4|int8)\b(?=[^;]*multiply-adds)")
TRANSFERS = re.compile(r"\b(\d+) bits? (?:x|at) (\d+(?:\.\d+)?) ?(GHz|MHz)(.*?two transfers)?")
HERTZ = {"GHz": 1e9, "MHz": 1e6}
PART = 0.12
"""Tolerance of a derived figure: clocks are rounded, and cores differ between models."""


@check("correct the figure, or the units, clock and operations in its source: a multiply-add is two operations")
def figures_follow_from_their_sources(plugin: Subject) -> Problems:
    for chip in plugin.own_chips():
        for key, fact in chip.figures.items():
            values = [*_derived(key, fact.source.detail)]
            if values and not any(abs(fact.value / value - 1) < PART for _, value in values):
                shown = ", ".join(f"{text} = {value:.4g}" for text, value in values)
                yield f"{chip.name}: {key} = {fact.value:g}, but its source has {shown}"


TAKEN = re.compile(r"\b([\d.]+) GB/s\b[^;]*?\btaken as (\d+)% of (?:the|a) link")
LINKS = re.compile(r"\b(two|three|four|six|seven|eight) links")
NUMBERS = {"two": 2.0, "three": 3.0, "four": 4.0, "six": 6.0, "seven": 7.0, "eight": 8.0}


def _derived(key: str, detail: str) -> Iterator[tuple[str, float]]:
    """Yield the text and the value of each figure that a source allows to compute."""
    if key == BANDWIDTH:
        for match in TRANSFERS.finditer(detail):
            bits, clock = float(match[1]), float(match[2]) * HERTZ[match[3]]
            yield f"{match[1]} bit x {match[2]} {match[3]}", bits / 8 * clock * (2 if match[4] else 1)
    if key == LINK and (taken := TAKEN.search(detail)):
        links = LINKS.search(detail)
        rate = float(taken[1]) * 1e9 / (int(taken[2]) / 100) * (NUMBERS[links[1]] if links else 1.0)
        yield f"{links[0] + ' of ' if links else ''}{taken[1]} GB/s / {taken[2]}%", rate
    clock_found, units = CLOCK.search(detail), UNITS.findall(detail)
    if key.startswith(PEAK) and "multiply-adds" in detail and clock_found and units:
        clock = float(clock_found[1]) * HERTZ[clock_found[2]]
        of_formats = {name: float(number) for number, name in OF_FORMATS.findall(detail)}
        if not of_formats:
            text = " and ".join(f"{count} x {each}" for count, each in units)
            yield f"2 x {text} at {clock:g} Hz", 2 * clock * sum(float(count) * float(each) for count, each in units)
        elif (each := of_formats.get(key.removeprefix(PEAK))) is not None:
            yield f"2 x {units[0][0]} x {each:g} at {clock:g} Hz", 2 * clock * float(units[0][0]) * each
