"""The figures that the page of comparisons quotes are those of the pages that measured them."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
PAGE = " ".join((DOCS / "comparison.md").read_text(encoding="utf-8").split())
PRIORITY = "FlagScale, priority performance"
FLAGCORE = "flagcore, `learned`"
FIRST = ", first run on a chip"
KORTHIKANTI = "Korthikanti 2022 Table 5 (via Calculon)"
SIMUMAX = "SimuMax B200 release v1.2"


def row(page: str, section: str, name: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    cells, *_ = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)
    return cells.split(" | ")


def test_trials_to_the_best_match_the_replay() -> None:
    names = (FLAGCORE, FLAGCORE + FIRST, "FlagScale, defaults", PRIORITY, "Optuna TPE")
    flagcore_row, first, flagscale_row, priority, tpe = (row("replay.md", "vTrain's sweeps", name)[0] for name in names)
    assert f"| flagcore | {flagcore_row}, and {first} on the first run on a chip |" in PAGE
    assert f"| FlagScale, defaults | {flagscale_row} |" in PAGE
    assert f"| FlagScale, priority performance | {priority} |" in PAGE
    assert f"| Optuna's TPE | {tpe} |" in PAGE


def test_effects_of_less_memory_match_the_replay() -> None:
    flagscale_row, flagcore_row, first = (
        row("replay.md", "Less memory", name) for name in (PRIORITY, FLAGCORE, FLAGCORE + FIRST)
    )
    assert (
        f"it needs {flagscale_row[0]} trials and misses the best in {_lost(flagscale_row):.0f}% of the sweeps" in PAGE
    )
    assert _lost(flagcore_row) == 0
    assert f"against {flagcore_row[0]} and none, or {first[0]} and {_lost(first):.1f}% on a first run" in PAGE


def test_errors_of_training_and_serving_match_their_pages() -> None:
    calculon = row("accuracy.md", "Step time", KORTHIKANTI)
    simumax = row("accuracy.md", "Step time", SIMUMAX)
    assert f"| 8 runs of Korthikanti et al. 2022, by which Calculon is validated | {calculon[2]} |" in PAGE
    assert f"| {simumax[0]} runs of SimuMax's B200 release | {simumax[2]} |" in PAGE
    unseen = (row("accuracy.md", "Fitted and left out", name)[2] for name in (KORTHIKANTI, SIMUMAX))
    assert f"the errors of fits without them ({next(unseen)} and {next(unseen)})" in PAGE
    tpot, ttft = (row("serving-model.md", "Accuracy", name)[0].split()[1].rstrip(",") for name in ("TPOT", "TTFT"))
    assert f"off by {tpot} (median) in time per token and {ttft} in time to the first token" in PAGE


def _lost(cells: list[str]) -> float:
    return round(100 - float(cells[-1].rstrip("%")), 1)
