"""The result of a run as plain text: the summary, every trial, the errors of predictions, and the funnel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flagcore.domain.knob import Knobs
from flagcore.domain.plan import Counts
from flagcore.i18n import _
from flagcore.report import formats
from flagcore.report.page.accuracy import learning
from flagcore.report.page.blocks import Block, Chart, Facts, Table, Text
from flagcore.report.page.run import Record, RunData
from flagcore.report.page.serving import front_table
from flagcore.report.page.summary import stopped, summary
from flagcore.report.page.trials import trial_table
from flagcore.report.text import funnel, lost_repeats, repeats_text


def result_text(result: Record, knobs: Knobs) -> str:
    """Return a result (in the format of result.json) as text."""
    run = RunData(result=result, folder=Path(result["run_dir"]), knobs=knobs)
    ending = stopped(run)
    parts = [text for block in summary(run).blocks if block not in ending for text in _text(block)]
    if run.all_trials:
        parts.append("\n".join([_table(trial_table(run)), *_reasons(run)]))
    parts += [text for block in (front_table(run), learning(run)) for text in _text(block)]
    parts.append("\n".join([funnel(Counts(**result["counts"]), run.fidelity), *repeats_text(lost_repeats(result))]))
    return "\n\n".join([*parts, *(each.text for each in ending)])


def _reasons(run: RunData) -> list[str]:
    failed = [trial for trial in run.all_trials if trial["reason"] and trial["state"] != "stopped" and run.best]
    return [_("trial {number}: {reason}", number=trial["number"], reason=trial["reason"]) for trial in failed]


def _text(block: Block | None) -> Iterator[str]:
    if isinstance(block, Text):
        yield block.text
    elif isinstance(block, Facts):
        (title, first), *facts = block.items
        yield "\n".join([f"{title}: {first.text}", *(f"  {name}: {cell.text}" for name, cell in facts)])
    elif isinstance(block, Chart):
        yield f"{block.summary}\n{_table(block.table)}"
    elif isinstance(block, Table):
        yield f"{block.caption}:\n{_table(block)}"


def _table(table: Table) -> str:
    return formats.table(table.headings, [[cell.text for cell in row] for row in table.rows])
