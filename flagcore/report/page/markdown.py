"""A page as Markdown, and a result as plain text; charts are tables."""

from __future__ import annotations

import re
from collections.abc import Iterator

from flagcore.domain.plan import failed_repeats
from flagcore.domain.trial import TrialState
from flagcore.i18n import _
from flagcore.report import formats
from flagcore.report.page.blocks import Block, Chart, Code, Collapsed, Facts, Page, Table, Text
from flagcore.report.page.run import RunData
from flagcore.report.page.search import learning
from flagcore.report.page.serving import front_table
from flagcore.report.page.summary import stopped, summary
from flagcore.report.page.trials import trial_table
from flagcore.report.text import funnel, repeats_text

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!])")


def as_markdown(page: Page) -> str:
    """Return a page as GitHub-flavoured Markdown."""
    parts = [f"# {_text(page.title)}", _text(page.subtitle)]
    for section in page.sections:
        parts.append(f"## {_text(section.title)}")
        parts += [text for block in section.blocks for text in _block(block)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        yield f"**{_('Note:')}** {_text(block.text)}" if block.warning else _text(block.text)
    elif isinstance(block, Facts):
        yield "\n".join(f"- {_text(name)}: **{_text(cell.whole)}**" for name, cell in block.items)
    elif isinstance(block, Code):
        yield from (_text(block.caption) + ":", _code_block(block.text))
    elif isinstance(block, Table):
        yield from (_text(block.caption) + ":", _table(block))
    elif isinstance(block, Chart):
        yield from (f"### {_text(block.title)}", _text(block.summary), *_block(block.table))
    elif isinstance(block, Collapsed):
        yield f"### {_text(block.title)}"
        for inner in block.blocks:
            yield from _block(inner)


def _table(table: Table) -> str:
    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rule = line(["---:" if each else "---" for each in table.figures])
    rows = [line([_text(cell.text) for cell in row]) for row in table.rows]
    return "\n".join([line([_text(heading) for heading in table.headings]), rule, *rows])


def _text(text: str) -> str:
    return SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("&", "&amp;")


def _code_block(text: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def result_text(run: RunData) -> str:
    """Return a result as text."""
    ending = stopped(run)
    blocks = [block for block in summary(run).blocks if block not in ending and not isinstance(block, Chart)]
    parts = [text for block in blocks for text in _plain_text(block)]
    if run.all_trials:
        failed_trials = [trial for trial in run.all_trials if trial.reason and trial.state is not TrialState.STOPPED]
        texts = [_("trial {number}: {reason}", number=trial.number, reason=trial.reason) for trial in failed_trials]
        parts.append("\n".join([_plain_table(trial_table(run)), *(texts if run.best else [])]))
    parts += [text for block in (front_table(run), learning(run)) for text in _plain_text(block)]
    parts.append("\n".join([funnel(run.counts, run.fidelity), *repeats_text(failed_repeats(run.repeats))]))
    return "\n\n".join([*parts, *(each.text for each in ending)])


def _plain_text(block: Block | None) -> Iterator[str]:
    if isinstance(block, Text):
        yield block.text
    elif isinstance(block, Facts):
        lines = [f"  {name}: {cell.whole}" for name, cell in block.items]
        yield "\n".join([lines[0].lstrip(), *lines[1:]] if block.lead else lines)
    elif isinstance(block, Chart):
        yield f"{block.summary}\n{_plain_table(block.table)}"
    elif isinstance(block, Table):
        yield f"{block.caption}:\n{_plain_table(block)}"


def _plain_table(table: Table) -> str:
    return formats.table(table.headings, [[cell.text for cell in row] for row in table.rows])
