"""The sections of a report page, in their order."""

from __future__ import annotations

from flagcore.i18n import N_, _, ngettext
from flagcore.report.page.accuracy import accuracy
from flagcore.report.page.blocks import Page
from flagcore.report.page.environment import chips, environment
from flagcore.report.page.improvements import improvements
from flagcore.report.page.resources import memory, step_time
from flagcore.report.page.run import HOW, RunData
from flagcore.report.page.search import funnel, progress
from flagcore.report.page.serving import serving
from flagcore.report.page.summary import summary
from flagcore.report.page.timeline import pipeline
from flagcore.report.page.trials import trials


def page(run: RunData) -> Page:
    """Return the page of a run; empty sections are omitted."""
    made = (
        summary(run),
        funnel(run),
        progress(run),
        serving(run),
        accuracy(run),
        memory(run),
        step_time(run),
        pipeline(run),
        improvements(run),
        trials(run),
        environment(run),
        chips(run),
    )
    title = N_("Serving on {hardware}: {run}") if run.serves else N_("Training on {hardware}: {run}")
    return Page(
        title=_(title, hardware=run.hardware, run=run.folder.resolve().name),
        subtitle=ngettext(
            "{count} candidate, {how}; objective: {objective}",
            "{count} candidates, {how}; objective: {objective}",
            len(run.trials),
            how=_(HOW[run.fidelity]),
            objective=run.unit,
        ),
        sections=tuple(section for section in made if section is not None),
    )
