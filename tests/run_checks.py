"""Whether the counts of a run add up, and each finished trial was stored once."""

import json
from pathlib import Path
from typing import Any


def books_balance(result: Any) -> bool:
    counts = result["counts"]
    completed = counts["measured"] + counts["stopped"] + counts["failed"]
    settled = counts["does_not_fit"] + sum(counts["pruned"].values()) + completed
    return (
        counts["combinations"] == sum(counts["illegal"].values()) + counts["merged"] + counts["candidates"]
        and counts["candidates"] == settled + counts["untried"]
        and completed == len(result["trials"])
    )


def check_kept_once(run_dir: Path, result: Any) -> None:
    """Assert that every finished trial of the journal was written once, and that the result has those measured."""
    stored: dict[int, Any] = {}
    for line in map(json.loads, (run_dir / "journal.log").read_text().splitlines()):
        done = line.get("user_attr", {}).get("result") if "trial_id" in line else None
        if done is not None:
            assert line["trial_id"] not in stored, "a finished trial was written twice"
            stored[line["trial_id"]] = done
    shown = [*result["trials"], *result["repeats"]]
    numbers = [trial["number"] for trial in shown]
    assert len(set(numbers)) == len(numbers)
    measured = {number for number, trial in stored.items() if trial["state"] == "measured"}
    assert {trial["number"] for trial in shown if trial["state"] == "measured"} == measured
