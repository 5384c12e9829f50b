"""Renders the accuracy page."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scores import Errors, Ranking

MAX_SHOWN = 3
"""Jobs with wrong verdicts that are listed per source."""
HEAD = """# Accuracy

<!-- accuracy -->

Predictions compared with measured training runs, by source. `make accuracy` generates this page from job records with a
`measured` part. Each record is predicted by `flag estimate --jobs`; none is omitted.

- **error** of a run: predicted / measured - 1. **MAPE** is the mean of the absolute errors; median and worst refer
  to the same errors. **Bias** is the geometric mean of predicted / measured, minus one.
- **inside**: share of measurements within the predicted 80% interval. 70 to 90% is correct.
- **tau**: Kendall's tau-b over jobs that differ only in the candidate (groups of three or more), mean of the groups.
  **Regret**: how much slower the candidate predicted best is than the best measured one, mean and worst of the groups.

In the plots, blue points are within the predicted interval (or there is none), orange points outside. Dashed lines mark
a factor of 1.25.
"""

END = "<!-- end -->\n"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The errors of the predictions of one source."""

    source: str
    runs: int
    errors: Errors | None
    inside: float | None
    ranking: Ranking | None


NOTHING = Summary(source="", runs=0, errors=None, inside=None, ranking=None)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The number of a source's jobs with a memory verdict, and the wrong verdicts."""

    source: str
    judged: int
    wrong: Sequence[str]


def text(
    *,
    steps: Sequence[Summary],
    published: Sequence[Summary],
    tuned: Sequence[Summary],
    peaks: Sequence[Summary],
    ranks: Mapping[str, Mapping[str, Summary]],
    verdicts: Sequence[Verdict],
    unpredicted: Sequence[tuple[str, str, str]],
    fitted_curves: Mapping[str, Any],
) -> str:
    """Return the page without empty sections."""
    sections = [
        HEAD,
        _section("Step time", [*_steps(steps), "![Step times](accuracy-time.svg)\n"]) if steps else "",
        _section("Published runs", [PUBLISHED, *_published(published)]) if published else "",
        _section("Fine-tuning", [FINE_TUNING, *_published(tuned)]) if tuned else "",
        _section("Fitted and left out", _fitted_section(fitted_curves)) if fitted_curves else "",
        _section("Peak memory", [PEAK, *_plain(peaks), "![Peak memory](accuracy-memory.svg)\n"]) if peaks else "",
        _section("Single ranks", [RANKS, *_ranks(ranks)]) if ranks else "",
        _section("Memory verdicts", _verdicts(verdicts)) if verdicts else "",
        _section("Rejected records", _unpredicted_section(unpredicted)),
        END,
    ]
    return "\n".join(section for section in sections if section)


PUBLISHED = """The runs that `flag estimate --evidence` shows, by source. No fit has used the sources marked *unseen*.

A plan is the best of many predictions, and published runs differ in how well they were tuned. Measured / planned
seconds of dense jobs are 1.04 in the geometric mean for one vendor's own recipes (52 jobs), and 1.18 for all other
sources (37; 1.29 if the run recomputed all layers, which its plan does not need). With experts they are 1.17 (55). The
expected time and interval of a plan include this, but not of one with lengths or adapters, which these jobs lack.

Not modelled: the trainer of Llama 3.1 405B on 16,384 devices shards gradients, and frees tensors early
(arXiv 2407.21783, 3.3.2). No setting of Megatron's distributed optimizer does, so the run is predicted 6% too large.
"""
FINE_TUNING = """\
Steps of fine-tuning on packed samples or with LoRA, published in 2026, by repository. Records name packing, LoRA and
what else their source says in notes; lengths are assumed (see [job records](results.md#defaults-of-job-records)).
No number is fitted to these runs, but they are not unseen: those of Megatron-Bridge led to the causes that are modelled
(kernels for each packed sample and expert, settings of its recipes), and those of ms-swift decided that plain `packing`
has the mean that imports assume. Only those of NeMo AutoModel changed nothing.
Unseen are three runs of a later revision of Megatron-Bridge's card of Qwen3-8B (@18af16ef), whose model has the single
kernel of rotary embeddings: 1% off for 8,192 tokens, 6% with LoRA, and 11% for 32,768 tokens on two context-parallel
ranks. That setting was looked up after the first comparison: the card does not state it, and without it, as in other
recipes, the predictions are 2.0, 1.4 and 1.3 times the measured times. *Weak* runs are functional tests, or
leave open what matters, such as the exchange of context parallelism.

Known to be wrong: pipelines of NeMo AutoModel, here written as runs of Megatron-LM without recompute (half of the
time), and experts of transformers under ZeRO 3, which are gathered one by one (ms-swift, 4% of the time).
"""
PEAK = """Largest memory of tensors on any rank, as printed by the source, compared with `peak_allocated_gib`.
"""
RANKS = """One rank of a larger job without communication: compute and memory only. MAPE, and the worst error in
parentheses.
"""
FITTED = """\
The errors above include sources that the parameters were fitted to. The parameters of a family's curve (the shares of
the peak rates in `costs/<chip>/curve.yaml` of its plugin) are fitted to the sources below together, each source with
the same weight, by `benchmarks/fit_curves.py`. **Fitted** is the MAPE with those parameters. **Left out** is that of a
fit without the source: the expected error for new runs. The last column is the range of measured / left-out prediction
that contains 80% of the measurements.
"""


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"## {title}\n", *lines])


def _steps(steps: Sequence[Summary]) -> list[str]:
    head = ["source", "runs", "answered", "MAPE", "median", "worst", "bias", "inside", "groups", "tau", "regret"]
    rows = [[*_errors(each), _percent(each.inside), *_ranking(each.ranking)] for each in steps]
    timed = [each for each in steps if not each.source.endswith("flops)")]
    found, ranked = [each.errors for each in timed if each.errors], [each.ranking for each in timed if each.ranking]
    mean = ["**mean over sources that print a time**", str(sum(each.runs for each in timed))]
    mean += [str(sum(each.answered for each in found)), _percent(_mean([each.mape for each in found]))]
    mean += [_percent(_mean([each.median for each in found])), "", "", ""]
    mean += [str(sum(each.groups for each in ranked)), _two_digits(_mean([each.tau for each in ranked]))]
    mean.append(_percent(_mean([each.regret for each in ranked])))
    return [*_table(head, [*rows, mean]), *([CONVERTED] if len(timed) < len(steps) else [])]


CONVERTED = """\
If a source prints only a rate, we convert it to a step time. *From model flops* uses Megatron-LM's FLOP count per step
without recomputation, as `flag estimate` does. *From hardware flops* uses the count of Narayanan et al. 2021
(arXiv 2104.04473, equation 3), which includes recomputation of all layers: these runs are predicted with it.
Settings that a source's pages and recipes state, but its records omit, are in `benchmarks/corrections.yaml`.
"""


def _published(summaries: Sequence[Summary]) -> list[str]:
    head = ["source", "runs", "answered", "MAPE", "median", "worst", "bias", "inside"]
    return _table(head, [[*_errors(each), _percent(each.inside)] for each in summaries])


def _plain(summaries: Sequence[Summary]) -> list[str]:
    head = ["source", "runs", "answered", "MAPE", "median", "worst", "bias"]
    return _table(head, [_errors(each) for each in summaries])


def _ranks(ranks: Mapping[str, Mapping[str, Summary]]) -> list[str]:
    """Return a row per source with all metrics of a rank."""
    figures = list(dict.fromkeys(figure for rows in ranks.values() for figure in rows))
    rows = []
    for source, summaries in ranks.items():
        cells = [
            f"{_percent(each.errors.mape)} ({_percent(each.errors.worst)})" if each.errors else ""
            for each in (summaries.get(figure, NOTHING) for figure in figures)
        ]
        rows.append([source, str(max(each.runs for each in summaries.values())), *cells])
    return _table(["source", "ranks", *figures], rows)


def _errors(each: Summary) -> list[str]:
    found = each.errors
    if found is None:
        return [each.source, str(each.runs), "0", "", "", "", ""]
    figures = (found.mape, found.median, found.worst)
    return [each.source, str(each.runs), str(found.answered), *map(_percent, figures), f"{found.bias:+.1%}"]


def _ranking(ranking: Ranking | None) -> list[str]:
    if ranking is None:
        return ["", "", ""]
    return [str(ranking.groups), _two_digits(ranking.tau), f"{ranking.regret:.1%} (worst {ranking.worst_regret:.1%})"]


def _fitted_section(fitted_curves: Mapping[str, Any]) -> list[str]:
    lines = [FITTED]
    for family, fit in fitted_curves.items():
        head = ["source", "runs", "fitted", "left out", "measured / predicted, 10% to 90%"]
        rows = []
        for source, each in fit["sources"].items():
            spread = each.get("left_out_measured_over_predicted")
            between = f"{spread[0]:.2f} to {spread[-1]:.2f}" if spread else ""
            errors = [_percent(each["fitted_mape"]), _percent(each.get("left_out_mape")) or "the only one"]
            rows.append([source, str(each.get("runs", "")), *errors, between])
        lines += [f"**{family}**\n", *_table(head, rows)]
        if arguments := fit.get("parameters"):
            lines.append(", ".join(f"`{name}` {value:g}" for name, value in arguments.items()) + "\n")
    return lines


def _verdicts(verdicts: Sequence[Verdict]) -> list[str]:
    judged, wrong = sum(each.judged for each in verdicts), sum(len(each.wrong) for each in verdicts)
    lines = [
        f"A run that finished fits; a run that ran out of memory does not. {wrong} of {judged} verdicts are wrong.\n"
    ]
    rows = [
        [each.source, str(each.judged), str(len(each.wrong)), ", ".join(each.wrong[:MAX_SHOWN])]
        for each in verdicts
        if each.wrong
    ]
    return [*lines, *(_table(["source", "judged", "wrong", "wrong jobs (at most three)"], rows) if rows else [])]


def _unpredicted_section(unpredicted: Sequence[tuple[str, str, str]]) -> list[str]:
    if not unpredicted:
        return ["Every job has a prediction.\n"]
    return _table(["job", "source", "reason"], [list(each) for each in unpredicted])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table followed by an empty line."""
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *body, ""]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _two_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
