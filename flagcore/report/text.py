"""Candidates, states of trials and the funnel of a search space as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from flagcore.domain.candidate import Candidate
from flagcore.domain.plan import Counts
from flagcore.domain.trial import PROBE, RUN, Trial, TrialState
from flagcore.i18n import N_, _, ngettext
from flagcore.i18n.width import columns, left
from flagcore.report.formats import WIDTH, fits, lookup, render

SHORT = {
    "data_parallel_size": "DP",
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "micro_batch_size": "MBS",
    "sequence_parallel": "SP",
    "use_distributed_optimizer": "dist-opt",
    "num_layers_per_virtual_pipeline_stage": "layers/virtual stage",
    "use_recompute": "recompute",
    "recompute_granularity": "granularity",
    "recompute_method": "method",
    "recompute_num_layers": "layers",
}
"""Usual short names of knobs, for tables."""
USUALLY_ON = {"enable_prefix_caching": "prefix caching", "enable_chunked_prefill": "chunked prefill"}
"""Flags that engines enable by default: shown if they are off."""
DEVICES = (
    "data_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "instances",
)
"""Knobs that count devices or groups of devices: not shown if they are 1."""
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def funnel(counts: Counts, fidelity: str = RUN) -> str:
    """Return how many combinations each rule eliminated, a line per rule; states of trials once any ran."""
    rows = [(_("combinations"), counts.combinations)]
    rows += [("  " + _("illegal: {rule}", rule=_(name)), -number) for name, number in _largest_first(counts.illegal)]
    rows += [("  " + _("duplicates"), -counts.merged), (_("candidates"), counts.candidates)]
    rows += [("  " + _("predicted not to fit"), -counts.does_not_fit)]
    rows += [("  " + _("pruned: {rule}", rule=_(name)), -number) for name, number in _largest_first(counts.pruned)]
    measured = _("probed") if fidelity == PROBE else _("measured")
    ran = [(measured, counts.measured), (_("stopped early"), counts.stopped), (_("failed"), counts.failed)]
    if any(number for name, number in ran):
        rows += [(f"  {name}", -number) for name, number in ran]
    rows += [(_("untried"), counts.untried)]
    width, longest = max(columns(name) for name, number in rows), max(len(f"{number:,}") for name, number in rows)
    return "\n".join(f"{left(name, width)}  {number:>{longest},}" for name, number in rows)


def _largest_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda pair: -pair[1])


def repeats_text(lost: Mapping[int, str]) -> list[str]:
    """Return a note on repeats without a measurement, which the funnel does not count; none without any."""
    states = [_("trial {number} {state}", number=number, state=state_name(state)) for number, state in lost.items()]
    if not states:
        return []
    return [
        ngettext(
            "Not counted above: {count} failed repeat ({states}).",
            "Not counted above: {count} failed repeats ({states}).",
            len(lost),
            states=", ".join(states),
        )
    ]


STATES = (
    N_("predicted"),
    N_("running"),
    N_("measured"),
    N_("stopped"),
    N_("out of memory"),
    N_("invalid"),
    N_("failed"),
    N_("timed out"),
    N_("interrupted"),
)
ROLES = (N_("baseline"), N_("search"), N_("repeat"), N_("imported"))
FIDELITIES = (N_("estimate"), N_("probe"), N_("run"))


def state_text(trial: Trial) -> str:
    """Return how a trial ended in a word or two."""
    if trial.fidelity == PROBE and trial.state is TrialState.MEASURED:
        return _("probed")
    return state_name(trial.state.value)


def state_name(state: str) -> str:
    """Return the name of a state of trials."""
    return _(state.replace("_", " "))


def role_text(role: str) -> str:
    """Return the name of a role of trials."""
    return _(role)


def candidate_text(candidate: Candidate) -> str:
    """Return a candidate in one line without defaults: device counts of 1, flags that are off, unset knobs."""
    return values_text(candidate.as_dict())


def values_text(values: Mapping[str, Any]) -> str:
    """Return knobs and their values in one line, see `candidate_text`."""
    parts: list[str] = []
    for knob, value in values.items():
        if knob == "use_recompute" and value:
            how = [str(values[each]) for each in RECOMPUTE if values.get(each) is not None]
            parts.append(" ".join(["recompute", *how]))
        elif knob in USUALLY_ON:
            parts += [] if value else [f"no {USUALLY_ON[knob]}"]
        elif value is True:
            parts.append(SHORT.get(knob, knob))
        elif value not in (None, False, -1) and knob not in RECOMPUTE and not (value == 1 and knob in DEVICES):
            parts.append(f"{SHORT.get(knob, knob)} {value}")
    return ", ".join(parts) or "engine defaults"


def candidate_line(name: str, record: Mapping[str, Any]) -> str:
    """Return a candidate with its predicted time and memory in one line."""
    time, memory = lookup(record, "step_time_s.value"), lookup(record, "memory.device_used_gib")
    rate = lookup(record, "output_tokens_per_s")
    speed = _("time unknown") if time is None else _("~{seconds} s/step", seconds=f"{time:.4g}")
    speed = _("~{rate} output tokens/s", rate=f"{rate:,.4g}") if rate is not None else speed
    fits = ", " + _("does not fit") if lookup(record, "memory.fits") is False else ""
    return f"{name}: {values_text(record['candidate'])}: {speed}, ~{memory:.4g} GiB{fits}"


def candidate_columns(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return headings and keys of the knobs that differ between records or are not at their default."""
    knobs = dict.fromkeys(knob for record in records for knob in record["candidate"])
    values = {knob: [record["candidate"].get(knob) for record in records] for knob in knobs}
    shown = [knob for knob, of in values.items() if any(_is_set(knob, one) for one in of) or len(set(map(str, of))) > 1]
    return {SHORT.get(knob, knob): f"candidate.{knob}" for knob in shown}


def _is_set(knob: str, value: object) -> bool:
    """Return whether a value is not the default of the engine."""
    return value is False if knob in USUALLY_ON else value not in (None, False, -1)


def candidates_table(records: Sequence[Mapping[str, Any]], knobs: Mapping[str, str], figures: Mapping[str, str]) -> str:
    """Return a table of numbered records with columns for `knobs` and `figures`.

    If it does not fit, knobs go to separate lines below it.
    """
    number, width = {"#": "number"}, WIDTH.get()
    whole = {**number, **knobs, **figures}
    if width is None or fits(records, whole):
        return render(records, "table", whole)
    indent = len(str(len(records))) + 2
    lines = [
        textwrap.fill(
            f"{record['number']:<{indent}}{values_text(record['candidate'])}",
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
        )
        for record in records
    ]
    return "\n".join([render(records, "table", {**number, **figures}), "", *lines])
