"""The pages of the vendors on the site, and the table of docs/vendors.md, from the files of the plugins."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields

from flagcore_vendorkit.chip_file import load_chips
from flagcore_vendorkit.engines import (
    Claim,
    Maturity,
    Report,
    Variable,
    all_knobs,
    read_engines,
    read_maturity,
    read_quirks,
    read_variables,
)
from flagcore_vendorkit.fields import Scope

from flagcore.domain.chip import Chip, Fact, Source, Support
from flagcore.domain.engine import EngineSupport, Stack
from flagcore.domain.knob import Factor

VENDORS = {
    "nvidia": "NVIDIA",
    "amd": "AMD",
    "metax": "MetaX",
    "iluvatar": "Iluvatar CoreX",
    "cambricon": "Cambricon",
    "ascend": "Huawei Ascend",
    "mthreads": "Moore Threads",
    "hygon": "Hygon",
    "kunlunxin": "Kunlunxin",
    "enflame": "Enflame",
    "thead": "T-Head",
}

ALL_ENGINES = {
    "train": "all training engines",
    "serve": "all serving engines",
    "rl": "all engines of reinforcement learning",
}
STATUS = {
    Support.YES: "works",
    Support.IMPOSSIBLE: "not supported",
    Support.NOT_YET: "not supported yet",
    Support.UNKNOWN: "untested",
}


def pages() -> dict[str, str]:
    """Return the text of the page of each vendor by its place on the site."""
    return {f"vendors/{name}.md": _page(name) for name in VENDORS}


def render_overview(_mark: str) -> str:
    """Return the table of all vendors with the maturity of their plugins and the number of their chips."""
    rows = [
        [
            f"[{shown}](../plugins/{name}/README.md)",
            _maturity_of(f"flagcore_{name}").word,
            str(len(chips(f"flagcore_{name}"))),
        ]
        for name, shown in VENDORS.items()
    ]
    return table(["vendor", "maturity", "chips"], rows)


def _page(name: str) -> str:
    """Return the page of one vendor."""
    head = (
        f"# {VENDORS[name]}\n\n"
        f"This page is generated from the data files of the plugin `flagcore-{name}`. [Vendors](../vendors.md)\n"
        "explains the columns. Values that are neither published nor measured are absent.\n"
    )
    package = f"flagcore_{name}"
    sources = Sources()
    parts = [head, *_maturity(_maturity_of(package)), *_vendor(package, sources.number)]
    parts += ["\n## Sources\n", *(f"{number}. {text}" for text, number in sources.numbers.items())]
    return "\n".join(parts).rstrip("\n") + "\n"


class Sources:
    """Numbers the sources of a page in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, source: Source) -> str:
        """Return the kind of a source and its number."""
        text = f"{source.kind}: {' '.join(source.detail.split())}"
        return f"{source.kind} [{self.numbers.setdefault(text, len(self.numbers) + 1)}]"


def _maturity_of(package: str) -> Maturity:
    return read_maturity(package) or Maturity()


def _maturity(found: Maturity) -> Iterator[str]:
    yield "## Maturity\n"
    rows = [["run on hardware", text] for text in _claims(found.run_on_hardware)]
    rows += [["checked on transcripts", text] for text in _claims(found.checked_on_transcripts)]
    rows += [["from documents", text] for text in _claims(found.from_documents)]
    rows += [["not checked", each] for each in found.not_checked]
    yield table(["level", "what"], rows)


def _claims(claims: Sequence[Claim]) -> Iterator[str]:
    for each in claims:
        details = [text for text in (each.by, ", ".join(each.chips)) if text]
        yield f"{each.what} ({'; '.join(details)})" if details else each.what


def _vendor(package: str, source: Callable[[Source], str]) -> Iterator[str]:
    yield "\n## Chips\n"
    rows = []
    for chip in chips(package):
        fact_rows = [[chip.name, key, f"{fact.value:.6g}", source(fact.source)] for key, fact in facts(chip)]
        rows += fact_rows or [[chip.name, "no published values", "", ""]]
    yield table(["chip", "fact", "value", "source"], rows)
    quirks = read_quirks(package)
    engines = [
        [ALL_ENGINES[kind], "all chips", _support_text(each), ""] for kind, each in read_engines(package).items()
    ]
    engines += [
        [ALL_ENGINES[kind], "all chips", _stack_text(each.stack), source(each.stack.source)]
        for kind, each in read_engines(package).items()
        if each.stack
    ]
    engines += [[*_scope(each), _reported_text(each), source(each.source)] for each in quirks.support]
    yield from _section("Engines", ["engines", "applies to", "status", "source"], engines)
    rejected = [
        [
            each.name,
            *_scope(each),
            f"`{each.knob}`: {_values(each.values, each.above)}",
            each.reason,
            source(each.source),
        ]
        for each in quirks.refused
    ]
    rejected += [
        [each.name, *_scope(each), f"`{each.setting}` must be {each.value}", each.reason, source(each.source)]
        for each in quirks.forced
    ]
    heads = ["rule", "engines", "applies to", "value", "reason", "source"]
    yield from _section("Rejected and forced values", heads, rejected)
    defaults = [
        [*_scope(each), f"`{each.setting}` = {each.value}", each.reason, source(each.source)]
        for each in quirks.preferred
    ]
    defaults += [
        [*_scope(each), f"first {each.count} steps or requests do not count", each.reason, source(each.source)]
        for each in quirks.warmup
    ]
    yield from _section("Defaults", ["engines", "applies to", "default", "reason", "source"], defaults)
    notes = [[*_scope(each), each.note, source(each.source)] for each in quirks.notes]
    yield from _section("Notes", ["engines", "applies to", "note", "source"], notes)
    knobs = ["knob", "value", "time", "peak memory", "enabled by", "description"]
    yield from _section("Knobs", knobs, list(_knobs(package, source)))
    rows = [
        [
            f"`{each.name}`",
            f"`{each.value}`" if each.value else f"not set by flagcore; the source sets `{each.used}`",
            ", ".join(filter(None, [_engines(each), each.condition, _not_with(each)])),
            each.meaning,
            source(each.source),
        ]
        for each in read_variables(package)
    ]
    yield from _section("Environment variables", ["variable", "value", "when", "meaning", "source"], rows)
    failures = [[f"`{each.pattern}`", each.state.value, each.advice, source(each.source)] for each in quirks.failures]
    yield from _section("Failure patterns", ["log line", "state", "advice", "source"], failures)


def _support_text(support: EngineSupport) -> str:
    """Return the support of a kind of engine, with torch's device type and backend."""
    reason = f": {support.reason}" if support.reason else ""
    return f"{STATUS[support.support]}{reason} (torch device `{support.device_type}`, `{support.distributed_backend}`)"


def _stack_text(stack: Stack) -> str:
    """Return what plans assume of production jobs."""
    settings = "".join(f", `{key}: {str(value).lower()}`" for key, value in stack.settings.items())
    return f"plans assume `{stack.implementation}` layers{settings.replace('none', 'null')}"


def _reported_text(report: Report) -> str:
    word = "" if report.works is None else "works: " if report.works else "does not work: "
    return f"{word}{report.reason}"


def _not_with(variable: Variable) -> str:
    return f"without effect while `{variable.overridden_by}` is set" if variable.overridden_by else ""


def _engines(scope: Scope) -> str:
    return ", ".join([*scope.engines, *(ALL_ENGINES[kind] for kind in scope.kinds)]) or "all"


def _scope(scope: Scope) -> tuple[str, str]:
    """Return the scope of an entry as text: engines, chips and releases."""
    chips = ", ".join([*(scope.chips or ("all chips",)), *([f"releases {scope.versions}"] if scope.versions else [])])
    return _engines(scope), chips


def _section(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield f"\n## {title}\n"
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


def _knobs(package: str, source: Callable[[Source], str]) -> Iterator[list[str]]:
    for each in all_knobs(package):
        for value, choice in each.knob.effects.items():
            launch_text = " ".join([*choice.flags, *(f"{name}={text}" for name, text in choice.environment.items())])
            formula = f"as {', '.join(f'{key}: {value}' for key, value in choice.settings.items())}; "
            yield [
                each.knob.name,
                str(value).lower(),
                f"{formula if choice.settings else ''}{_factor(choice.time)} of {choice.part}",
                _factor(choice.memory),
                f"`{launch_text}`" if launch_text else "not public: set by the vendor's build",
                f"{each.knob.help}. {each.knob.claim} ({source(each.knob.source)})",
            ]


def _factor(factor: Factor) -> str:
    return f"{factor.value:g} ({factor.low:g} to {factor.high:g})" if factor != Factor() else "1"


def _values(values: Iterable[object], above: int | None) -> str:
    return ", ".join([*map(str, values), *([f"above {above}"] if above is not None else [])])


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    cells = [[" ".join(cell.split()).replace("|", "&#124;") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
