"""Memory of the best configuration by component and pipeline stage, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flagcore.i18n import N_, _
from flagcore.report.explanation import COMPONENTS, HEADINGS
from flagcore.report.formats import lookup, shown
from flagcore.report.page.blocks import Block, Chart, Section, Table, Text, cell, table
from flagcore.report.page.charts import bars, limit_line, points, rows_layout
from flagcore.report.page.run import RunData, number

LEVELS = {
    "peak_allocated_gib": N_("peak allocated"),
    "reserved_gib": N_("reserved"),
    "device_used_gib": N_("in use"),
}
MEASURED = {"peak_allocated_gib": "peak_allocated_gib", "reserved_gib": "peak_reserved_gib"}
GIB = 2**30


def memory(run: RunData) -> Section | None:
    """Return the memory of a device of each stage of the best; None without a best."""
    if run.best is None:
        return None
    predicted = run.best["predicted"].get("memory") or {}
    stages = run.insight.get("stages") or []
    blocks: list[Block] = []
    if any(stage["components"] for stage in stages):
        blocks += [_by_component(run, stages, predicted), _components(stages)]
    blocks.append(_levels(run, stages, predicted))
    kinds = {
        "static_gib": _("~weights and cache"),
        "activation_gib": _("~activations and graphs"),
        "kv_cache_gib": _("~KV cache"),
    }
    if run.serves and predicted:
        parts = [[text, cell(predicted[name])] for name, text in kinds.items() if name in predicted]
        if "kv_cache_tokens" in predicted:
            parts.append([_("~capacity of the KV cache, tokens"), cell(predicted["kv_cache_tokens"])])
        blocks.append(table(_("Parts, GiB"), [_("part"), _("GiB or tokens")], parts))
    return Section(anchor="memory", title=_("Memory of the best configuration"), blocks=tuple(blocks))


def _by_component(run: RunData, stages: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any]) -> Chart:
    names = [_("stage {number}", number=stage["stage"]) for stage in stages]
    traces = [
        bars(COMPONENTS.get(part, part), place, [_size(stage, part) for stage in stages], names, width=0.5)
        for place, part in enumerate(_parts(stages))
    ]
    for place, (level, text) in enumerate(LEVELS.items()):
        traces.append(points(f"~{_(text)}", place + 4, [stage[level] for stage in stages], names))
    measured = _measured_by_stage(run, len(stages))
    for place, (level, text) in enumerate(LEVELS.items()):
        there = [(figures[level], name) for figures, name in zip(measured, names, strict=False) if level in figures]
        if there:
            trace = points(
                _("{level}, measured", level=_(text)), place, [value for value, _ in there], [name for _, name in there]
            )
            traces.append(
                trace | {"marker": {**trace["marker"], "size": 12, "symbol": ("star", "hash", "bowtie")[place]}}
            )
    capacity = number(predicted.get("capacity_gib"))
    shapes = [] if capacity is None else [limit_line(_("capacity {gib} GiB", gib=shown(capacity)), capacity)]
    worst = max(stages, key=lambda stage: float(stage["device_used_gib"]))
    used = f"~{shown(worst['device_used_gib'])}" + ("" if capacity is None else f" / {shown(capacity)}")
    return Chart(
        title=_("Memory of a device by component and stage"),
        summary=_("Stage {number} needs the most memory: {used} GiB (predicted).", number=worst["stage"], used=used),
        traces=tuple(traces),
        layout=rows_layout("GiB", len(stages), barmode="stack", xaxis={"rangemode": "tozero"}, shapes=shapes)
        | {"height": 320 + 46 * len(stages)},
        table=_by_stage(stages, measured),
    )


def _by_stage(stages: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, float]]) -> Table:
    parts = _parts(stages)
    rows = []
    for stage in stages:
        figures = measured[stage["stage"]] if stage["stage"] < len(measured) else {}
        sizes = [cell(_size(stage, part)) for part in parts]
        levels = [cell(stage[level]) for level in LEVELS]
        rows.append([cell(stage["stage"]), *sizes, *levels, *(cell(figures.get(level)) for level in LEVELS)])
    return table(
        _("GiB per device of each stage. Components need not coexist, so they may not add up to the peak"),
        [
            _("stage"),
            *(f"~{COMPONENTS.get(part, part)}" for part in parts),
            *(f"~{_(text)}" for text in LEVELS.values()),
            *(_("{level}, measured", level=_(text)) for text in LEVELS.values()),
        ],
        rows,
    )


def _components(stages: Sequence[Mapping[str, Any]]) -> Table:
    keys = [key for key in HEADINGS if any(key in part for stage in stages for part in stage["components"].values())]
    rows = [
        [cell(stage["stage"]), COMPONENTS.get(name, name), *(cell(part.get(key)) for key in keys)]
        for stage in stages
        for name, part in stage["components"].items()
    ]
    return table(
        _("By component and kind (predicted)"),
        [_("stage"), _("component"), *(_(HEADINGS[key]) for key in keys)],
        rows,
        sortable=True,
    )


def _levels(run: RunData, stages: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any]) -> Block:
    """Return the memory of the fullest device: allocated, reserved, in use, capacity."""
    if not predicted:
        return Text(_("There is no prediction of memory."))
    assert run.best is not None
    measured = run.best["measured"] or {}
    rows = [
        [_(text), cell(number(predicted.get(level))), cell(number(measured.get(MEASURED.get(level, level))))]
        for level, text in LEVELS.items()
    ]
    rows.append([_("capacity"), cell(number(predicted.get("capacity_gib"))), cell(None)])
    caption = _("Fullest device, GiB")
    if len(stages) > 1:
        caption = _("Fullest device (stage {number}), GiB", number=predicted["worst_stage"])
    return table(caption, [_("level"), _("~predicted"), _("measured, worst rank")], rows)


def _measured_by_stage(run: RunData, count: int) -> list[dict[str, float]]:
    """Return the largest measured figures of the ranks of each stage; ranks are in the order of stages."""
    assert run.best is not None
    ranks = run.metrics(run.best).get("ranks") if run.best["measured"] else None
    if not isinstance(ranks, list) or not ranks or len(ranks) % count:
        return []
    found: list[dict[str, float]] = [{} for _ in range(count)]
    for place, rank in enumerate(ranks):
        for level in LEVELS:
            key = MEASURED.get(level, level).replace("_gib", "_bytes")
            figure = number(lookup(rank, key)) if isinstance(rank, Mapping) else None
            if figure is not None:
                largest = found[place // (len(ranks) // count)]
                largest[level] = max(largest.get(level, 0.0), figure / GIB)
    return found


def _parts(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    there = dict.fromkeys(name for stage in stages for name in stage["components"])
    return sorted(there, key=lambda name: (list(COMPONENTS).index(name) if name in COMPONENTS else 99, name))


def _size(stage: Mapping[str, Any], part: str) -> float:
    return sum(float(value) for key, value in stage["components"].get(part, {}).items() if key.endswith("_gib"))
