"""Assertions that many tests share: refused keys, counts of a run that add up, and trials that were stored once."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from flagcore.errors import SpecError

Value = TypeVar("Value")


@contextmanager
def refuses(key: str, *value: object, match: str | None = None) -> Iterator[pytest.ExceptionInfo[SpecError]]:
    """Assert that a key is refused, with this value if one is given."""
    with pytest.raises(SpecError, match=match) as error:
        yield error
    assert (error.value.key, *[error.value.value for _ in value]) == (key, *value)


def given(value: Value | None) -> Value:
    """Return a value that must not be None."""
    assert value is not None
    return value


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
