"""Where every combination of a spec or of a run went."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flagcore.api.common.context import load_snapshot
from flagcore.api.common.inputs import SpecLike
from flagcore.api.common.runs import Run
from flagcore.api.planning.estimate import before_trials, knob_record, plugin_notes
from flagcore.domain.plan import Counts, count, failed_repeats
from flagcore.domain.trial import RUN
from flagcore.errors import NothingFits, RunError
from flagcore.problem import require_candidate
from flagcore.report.formats import Notebook
from flagcore.report.text import funnel, repeats_text
from flagcore.stages.prune import LEARNED


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Notebook):
    """Where all combinations went, the message of each rule by name, and why the run stopped.

    `nothing_fits` says, if no candidate is left before any trial, how close the closest came. `knobs` are those that
    plugins bring to the engine here, named by the spec or not, and `notes` what they say of engine and chip.
    `lost_repeats` are a run's repeats that gave no measurement, and how they ended: `counts` are of candidates.
    `fidelity` is that of a run's trials.
    """

    counts: Counts
    says: Mapping[str, str]
    ended_because: str | None = None
    nothing_fits: str | None = None
    knobs: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    lost_repeats: Mapping[int, str] = field(default_factory=dict)
    fidelity: str = RUN

    def __repr__(self) -> str:
        return f"<Explanation of {self.counts.combinations:,} combinations, {self.counts.candidates:,} candidates>"

    def __str__(self) -> str:
        return "\n".join([funnel(self.counts, self.fidelity), *repeats_text(self.lost_repeats)])


def explain(where: SpecLike, *, chip: str | None = None, without: Collection[str] = ()) -> Explanation:
    """Tell where every combination of a spec file went, or of a run's folder with what its trials taught.

    Raises the errors of `flagcore.errors`.
    """
    found = load_snapshot(where, chip, without)
    problem, task = found.problem, found.task
    counts, because, lost = before_trials(problem), None, dict[int, str]()
    if found.run is not None:
        lost = failed_repeats(found.run.repeats)
        counts, because = (
            _saved_counts(found.run) or count(problem.space, found.pruned, found.search_state),
            found.run.stopped_because,
        )
    says = {rule.name: rule.message for rule in problem.legality.rules}
    says |= {rule.name: rule.message for rule in problem.rules}
    nothing_fits = None
    try:
        require_candidate(problem)
    except NothingFits as error:
        nothing_fits = str(error)
    return Explanation(
        counts=counts,
        says=says | LEARNED,
        ended_because=because,
        nothing_fits=nothing_fits,
        knobs=tuple(knob_record(task, knob) for knob in problem.platform.knobs),
        notes=plugin_notes(problem.platform),
        lost_repeats=lost,
        fidelity=RUN if found.run is None else found.run.fidelity,
    )


def _saved_counts(run: Run) -> Counts | None:
    """Return the counts that a run saved when it ended, None for one in progress. Raises RunError."""
    if run.in_progress:
        return None
    try:
        counts = Counts(**run.data["counts"])
        if not counts.balanced:
            raise ValueError("its counts do not add up")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"{run.folder / 'result.json'} cannot be read ({error!r}); `flag tune` writes it when it ends"
        raise RunError(message) from None
    return counts
