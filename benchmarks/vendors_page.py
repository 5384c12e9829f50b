"""The page of vendors, written from what their plugins ship: `python benchmarks/vendors_page.py > docs/vendors.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from flagcore.domain.chip import Chip, Fact, Source
from flagcore.domain.maturity import Claim
from flagcore.domain.plugin_knob import Factor
from flagcore.vendorkit.chip_file import load_chips
from flagcore.vendorkit.knobs import all_knobs
from flagcore.vendorkit.maturity import maturity
from flagcore.vendorkit.quirks import quirks
from flagcore.vendorkit.variables import variables

VENDORS = ("nvidia", "metax", "iluvatar", "cambricon")
HEAD = """# Vendors

What each vendor's plugin ships as data, with its sources: `flag explain` and `flag estimate` use all of it. This page
is written from the plugins' own files by `benchmarks/vendors_page.py`; what is not here, nobody published or measured,
and flagcore says so instead of guessing. Chips that are not here are calibrated: `flag calibrate`.

A source is *measured* by this project, a *datasheet* (a document of the vendor), *published* by others, or *estimated*.
"""


def page() -> str:
    """Return the whole page."""
    parts = [HEAD, *_overview()]
    for vendor in VENDORS:
        parts += [f"\n## {vendor}\n", *_vendor(f"flagcore_{vendor}")]
    return "\n".join(parts).rstrip("\n") + "\n"


def _overview() -> Iterator[str]:
    said = {vendor: maturity(f"flagcore_{vendor}") for vendor in VENDORS}
    rows = [
        [vendor, each.word, _claims(each.run_on_hardware), _claims(each.checked_on_transcripts), _not(each.not_checked)]
        for vendor, each in said.items()
    ]
    yield "## How well founded\n"
    yield table(["vendor", "best", "run on hardware", "checked on transcripts", "not checked"], rows)


def _claims(claims: Sequence[Claim]) -> str:
    return "; ".join(f"{each.what} ({each.by}; {', '.join(each.chips) or 'no chip'})" for each in claims) or "nothing"


def _not(sentences: Sequence[str]) -> str:
    return "; ".join(sentences)


def _vendor(package: str) -> Iterator[str]:
    yield "### Chips\n"
    rows = []
    for chip in chips(package):
        found = [[chip.name, key, f"{fact.value:.6g}", source(fact.source)] for key, fact in facts(chip)]
        rows += found or [[chip.name, "nothing is published", "", ""]]
    yield table(["chip", "fact", "value", "source"], rows)
    known = quirks(package)
    where = [
        *([each.engine, _scope(each.chips, each.versions), each.reason, source(each.source)] for each in known.support),
    ]
    refused = [
        [
            each.refused.name,
            each.engine,
            _scope(each.chips, each.versions),
            f"`{each.refused.knob}`: {_values(each.refused.values, each.refused.above)}",
            each.refused.reason,
            source(each.source),
        ]
        for each in known.refusals
    ]
    refused += [
        [
            each.forced.name,
            each.engine,
            _scope(each.chips, each.versions),
            f"`{each.forced.setting}` must be {each.forced.value}",
            each.forced.reason,
            source(each.source),
        ]
        for each in known.forced
    ]
    notes = [
        [", ".join(each.engines) or "all", _scope(each.chips, each.versions), each.message, source(each.source)]
        for each in known.notes
    ]
    yield from _section("Engines", ["engine", "where", "what is known", "source"], where)
    yield from _section("Refused and forced", ["rule", "engine", "where", "what", "why", "source"], refused)
    yield from _section("Notes", ["engines", "where", "note", "source"], notes)
    yield from _section(
        "Knobs", ["knob", "value", "time", "peak memory", "switched on by", "what it is"], list(_knobs(package))
    )
    rows = [
        [
            f"`{each.name}`",
            f"`{each.value}`" if each.value else f"not given; its source sets `{each.used}`",
            ", ".join(filter(None, [", ".join(each.engines), each.condition])) or "always",
            each.meaning,
            source(each.source),
        ]
        for each in variables(package)
    ]
    yield from _section("Variables", ["variable", "value", "when", "meaning", "source"], rows)
    failures = [
        [f"`{each.pattern.pattern}`", each.pattern.state.value, each.pattern.advice, source(each.source)]
        for each in known.failures
    ]
    yield from _section("Failures", ["log line", "means", "advice", "source"], failures)


def _section(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield f"\n### {title}\n"
        yield table(headings, rows)


def chips(package: str) -> Sequence[Chip]:
    """Return the chips of a plugin."""
    return load_chips(package)


def facts(chip: Chip) -> Iterator[tuple[str, Fact]]:
    """Yield every fact of a chip with its key."""
    for field in fields(chip):
        value = getattr(chip, field.name)
        if isinstance(value, Fact):
            yield field.name, value
        elif isinstance(value, dict):
            yield from ((f"{field.name}.{name}", fact) for name, fact in value.items() if isinstance(fact, Fact))
    if chip.link:
        yield f"link.bytes_per_second ({chip.link.name}, {chip.link.topology})", chip.link.bytes_per_second


def _knobs(package: str) -> Iterator[list[str]]:
    try:
        listed = all_knobs(package)
    except FileNotFoundError:
        listed = ()
    for each in listed:
        for choice in each.knob.choices:
            how = " ".join([*choice.flags, *(f"{name}={value}" for name, value in choice.environment.items())])
            formula = f"as {', '.join(f'{key}: {value}' for key, value in choice.settings.items())}; "
            yield [
                each.knob.name,
                str(choice.value).lower(),
                f"{formula if choice.settings else ''}{_factor(choice.time)} of {choice.part}",
                _factor(choice.memory),
                f"`{how}`" if how else "not published: planned with only",
                f"{each.knob.message}. Source: {each.knob.claim} ({source(each.knob.source)})",
            ]


def _factor(factor: Factor) -> str:
    return f"{factor.value:g} ({factor.low:g} to {factor.high:g})" if factor != Factor() else "1"


def _values(values: Iterable[object], above: int | None) -> str:
    return ", ".join([*map(str, values), *([f"above {above}"] if above is not None else [])])


def _scope(chips: Sequence[str], versions: str) -> str:
    return ", ".join([*(chips or ("all chips",)), *([f"releases {versions}"] if versions else [])])


def source(each: Source) -> str:
    """Return where something is from."""
    return f"{each.kind}: {each.detail}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    cells = [[" ".join(cell.split()).replace("|", "&#124;") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


if __name__ == "__main__":
    print(page(), end="")
