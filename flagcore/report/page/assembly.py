"""From a run to its page: which sections there are, and in which order."""

from __future__ import annotations

from flagcore.domain.trial import ESTIMATE, PROBE, RUN
from flagcore.report.page.accuracy import accuracy
from flagcore.report.page.blocks import Page
from flagcore.report.page.environment import chips, environment
from flagcore.report.page.funnel import funnel
from flagcore.report.page.improvements import levers
from flagcore.report.page.memory import memory
from flagcore.report.page.progress import progress
from flagcore.report.page.run import RunData
from flagcore.report.page.serving import serving
from flagcore.report.page.step_time import step_time
from flagcore.report.page.summary import answer
from flagcore.report.page.timeline import pipeline
from flagcore.report.page.trials import trials

TRIED = {RUN: "tried", PROBE: "probed on one device", ESTIMATE: "as predicted, nothing ran"}


def page(run: RunData) -> Page:
    """Return all that is told of a run; sections that have nothing to tell are left out."""
    made = (
        answer(run),
        funnel(run),
        progress(run),
        serving(run),
        accuracy(run),
        memory(run),
        step_time(run),
        pipeline(run),
        levers(run),
        trials(run),
        environment(run),
        chips(run),
    )
    work = "Serving" if run.serves else "Training"
    where = f"{work} on {run.result['devices']} x {run.result['chip']}"
    return Page(
        title=f"{where}: {run.folder.resolve().name}",
        subtitle=f"{len(run.trials)} candidates, {TRIED[run.fidelity]}; objective {run.unit}",
        sections=tuple(section for section in made if section is not None),
    )
