"""Replays searches on measured sweeps, and reports their results by number of trials and seconds.

    python benchmarks/replay.py [FILE] [--strategy NAME]... [--fitting SHARE] [--ablations | --wrong | --subsets]
    python benchmarks/replay.py [FILE] [--strategy NAME]... --at-once NUMBER...

FILE has job records with measurements; the default are the CPU sweeps in `benchmarks/sweeps/`. Records that differ only
in their candidate are a sweep. The result of a trial is its measured row, its cost the seconds of its steps and, if
known, of its start. A search that stops before it has found a candidate within the tolerance of the best costs the
whole sweep. The last line of stdout is one JSON object with means over sweeps; with `--subsets` it has one for each
subset.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from searchers import Search, Searcher, by_strategy, cost, flagscale, oracle, random, tpe
from sweeps import Sweep, on_smaller_devices, read_sweeps
from variants import ablations, print_at_once, subsets, wrong_models

from flagcore import plugins
from flagcore.api.inputs import loaded_plugins
from flagcore.errors import FlagError

SHIPPED = Path(__file__).with_name("sweeps")
TOLERANCES = {"5pct": 0.05, "1pct": 0.01, "0pct": 0.0}
MAX_ROWS = 5
SPACES = ("measured", "candidates", "combinations")
"""Reference spaces of `untried`: measured candidates, legal and distinct candidates, and all combinations."""
DEFAULT = ("learned", "predicted")
"""flagcore's strategies to compare, if installed; the last line has the result of the first one."""
OTHER_SEARCHES = {
    "flagscale": flagscale(),
    "flagscale_priority_performance": flagscale("performance"),
    "flagscale_priority_memory": flagscale("memory"),
    "flagscale_memory_model": flagscale(memory_model=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one search on one sweep. `trials` and `seconds` are by tolerance, `untried` by the reference space.

    Fields of a finished search are None or empty if the search never stops by itself.
    """

    trials: Mapping[str, float]
    seconds: Mapping[str, float]
    regret: float
    untried: Mapping[str, float]
    regret_when_done: float | None


def main() -> None:
    """Print a table, and one JSON object at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument(
        "--strategy", action="append", help="strategy (repeatable); the first one is `flagcore` in the summary"
    )
    parser.add_argument("--fitting", type=float, help="shrink memory until this share of a sweep's candidates fits")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds of TPE")
    parser.add_argument("--by-sweep", action="store_true", help="also print one line per sweep")
    parser.add_argument("--every", type=int, default=1, help="replay every Nth sweep; all provide experience")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--ablations", action="store_true", help="compare the search with variants that lack one part")
    kinds.add_argument("--wrong", action="store_true", help="distort the predictions of each sweep")
    kinds.add_argument("--at-once", type=int, nargs="+", help="compare searches that run this many trials at once")
    kinds.add_argument("--subsets", action="store_true", help="replay parts of the sweeps only")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("flagcore").setLevel(logging.ERROR)
    files = [options.file] if options.file else sorted(SHIPPED.glob("*.jsonl"))
    records = [record for file in files for record in _records(file)]
    with tempfile.TemporaryDirectory() as nothing_calibrated:
        os.environ["FLAGCORE_HOME"] = nothing_calibrated
        with loaded_plugins(()) as loaded:
            sweeps = read_sweeps(records, loaded)
        if not sweeps:
            sys.exit("no sweep: a sweep needs eight measured records that differ only in the candidate")
        if options.fitting is not None:
            sweeps = [on_smaller_devices(sweep, options.fitting) for sweep in sweeps]
        if options.at_once:
            print(json.dumps(print_at_once(options.strategy or ["learned"], sweeps, options.at_once, options.every)))
        elif options.subsets:
            print(json.dumps({name: _compare(name, some, options) for name, some in subsets(sweeps).items()}))
        else:
            print(json.dumps(_compare("", sweeps, options)))


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; lines that are not records are reported on stderr."""
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        try:
            record = json.loads(line) if line.strip() else {}
        except ValueError as error:
            record = error
        if isinstance(record, dict):
            yield record
        else:
            print(f"{file.name}:{number} is left out: not a JSON object", file=sys.stderr)


def _compare(name: str, sweeps: Sequence[Sweep], options: argparse.Namespace) -> dict[str, Any]:
    """Print a table of searches over `sweeps`, and return its values."""
    without_comparison = options.ablations or options.wrong
    kind = ablations if options.ablations else wrong_models
    own_searches = kind(sweeps) if without_comparison else _own_searches(options.strategy, sweeps)
    other_searches = (
        {} if without_comparison else {**OTHER_SEARCHES, "tpe": tpe(options.seeds), "random": random, "oracle": oracle}
    )
    sweeps = sweeps[:: options.every]
    scores = {
        name: [_scores(sweep, search) for sweep in sweeps]
        for name, search in {**own_searches, **other_searches}.items()
    }
    if options.by_sweep:
        _print_sweeps(sweeps, scores)
    figures = {name: _figures(each) for name, each in scores.items()}
    _print_table(name, sweeps, figures)
    named = {
        "flagcore": next(iter(own_searches)),
        **{name: name for name in ("flagscale", "tpe", "random") if name in other_searches},
    }
    short = {short: round(figures[name]["trials_to_within_1pct"], 3) for short, name in named.items()}
    last: dict[str, Any] = {"trials_to_within_1pct": short, "sweeps": len(sweeps), "strategy": named["flagcore"]}
    last |= {f"mean_{name}": float(np.mean([_spaces(sweep)[name] for sweep in sweeps])) for name in SPACES}
    last["candidates"] = sum(len(sweep.seconds) for sweep in sweeps)
    return {**last, "figures": figures}


def _own_searches(names: Sequence[str] | None, sweeps: Sequence[Sweep]) -> dict[str, Searcher]:
    searches = {}
    for name in names or DEFAULT:
        try:
            searches[name] = by_strategy(plugins.strategy(name), sweeps)
            if name == "learned":
                searches["learned, first run on a chip"] = by_strategy(plugins.strategy(name))
        except FlagError as error:
            if names:
                sys.exit(str(error))
    return searches


def _spaces(sweep: Sweep) -> dict[str, int]:
    """Return the sizes of a sweep's space by the reference."""
    return dict(zip(SPACES, (len(sweep.seconds), sweep.candidates, sweep.combinations), strict=True))


def _scores(sweep: Sweep, search: Searcher) -> Score:
    """Return the mean score of a searcher's runs on a sweep."""
    scores = [_score(sweep, run) for run in search(sweep)]
    done = [each.regret_when_done for each in scores if each.regret_when_done is not None]
    return Score(
        trials={tol: float(np.mean([each.trials[tol] for each in scores])) for tol in TOLERANCES},
        seconds={tol: float(np.mean([each.seconds[tol] for each in scores])) for tol in TOLERANCES},
        regret=float(np.mean([each.regret for each in scores])),
        untried={space: float(np.mean([each.untried[space] for each in scores])) for space in scores[0].untried},
        regret_when_done=float(np.mean(done)) if done else None,
    )


def _score(sweep: Sweep, search: Search) -> Score:
    steps = np.nan_to_num(sweep.seconds, nan=np.inf)
    slowest = np.nanmax(sweep.seconds)  # the result of a search without any success
    so_far = (
        np.minimum.accumulate(np.minimum(steps[list(search.rows)], slowest)) if search.rows else np.array([slowest])
    )
    spent_seconds = search.probe_seconds + np.cumsum([0.0, *search.seconds])
    every = search.probe_seconds + sum(cost(sweep, row) for row in range(len(steps)))
    trials, seconds = {}, {}
    for name, tolerance in TOLERANCES.items():
        hits = np.flatnonzero(so_far <= sweep.best * (1 + tolerance)) if search.rows else np.zeros(0, dtype=np.int64)
        trials[name] = float(hits[0] + 1) if hits.size else float(len(steps))
        seconds[name] = float(spent_seconds[hits[0] + 1]) if hits.size else max(every, float(spent_seconds[-1]))
    is_done = search.says_done
    return Score(
        trials=trials,
        seconds=seconds,
        regret=float(so_far[:MAX_ROWS][-1] / sweep.best - 1),
        untried={space: 1 - len(search.rows) / size for space, size in _spaces(sweep).items()} if is_done else {},
        regret_when_done=float(so_far[-1] / sweep.best - 1) if is_done else None,
    )


def _figures(scores: Sequence[Score]) -> dict[str, Any]:
    """Return means over sweeps; None for a figure that no sweep has."""
    figures: dict[str, Any] = {}
    for tol in TOLERANCES:
        figures[f"trials_to_within_{tol}"] = float(np.mean([score.trials[tol] for score in scores]))
        figures[f"trial_seconds_to_within_{tol}"] = float(np.mean([score.seconds[tol] for score in scores]))
    figures["regret_at_5_trials"] = float(np.mean([score.regret for score in scores]))
    figures["worst_regret_at_5_trials"] = float(np.max([score.regret for score in scores]))
    regrets = [score.regret_when_done for score in scores if score.regret_when_done is not None]
    for space in SPACES:
        shares = [score.untried[space] for score in scores if score.untried]
        figures[f"never_tried_of_{space}"] = float(np.mean(shares)) if shares else None
    figures["best_kept_within_1pct"] = float(np.mean(np.array(regrets) <= TOLERANCES["1pct"])) if regrets else None
    figures["regret_when_done"] = float(np.mean(regrets)) if regrets else None
    figures["worst_regret_when_done"] = float(np.max(regrets)) if regrets else None
    return {name: value if value is None else round(value, 4) for name, value in figures.items()}


HEADS = ("search", "trials to 5%", "1%", "best", "trial seconds to 1%", "regret at 5")
HEADS_WHEN_DONE = ("never tried of measured", "of candidates", "of combinations", "best found")


def _print_table(title: str, sweeps: Sequence[Sweep], figures: Mapping[str, Mapping[str, Any]]) -> None:
    sizes, heads = sorted(len(sweep.seconds) for sweep in sweeps), (*HEADS, *HEADS_WHEN_DONE)
    summary = f"{len(sweeps)} sweeps of {sizes[0]} to {sizes[-1]} candidates, {sum(sizes)} in all"
    print(f"{title}{': ' * bool(title)}{summary}; means over sweeps")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for name, reported in figures.items():
        trials = (f"{reported[f'trials_to_within_{tol}']:.2f}" for tol in TOLERANCES)
        done = (*(reported[f"never_tried_of_{space}"] for space in SPACES), reported["best_kept_within_1pct"])
        shares = ("never stops" if share is None else f"{share:.1%}" for share in done)
        cells = (
            *trials,
            f"{reported['trial_seconds_to_within_1pct']:.1f}",
            f"{reported['regret_at_5_trials']:.2%}",
            *shares,
        )
        print(f"| {name} | {' | '.join(cells)} |")


def _print_sweeps(sweeps: Sequence[Sweep], scores: Mapping[str, Sequence[Score]]) -> None:
    for at, sweep in enumerate(sweeps):
        trials = ", ".join(f"{name} {each[at].trials['1pct']:.1f}" for name, each in scores.items())
        print(f"{sweep.name} ({len(sweep.seconds)}): {trials}")


if __name__ == "__main__":
    main()
