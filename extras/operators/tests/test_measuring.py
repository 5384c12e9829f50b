"""The benchmark of operators, of which an implementation ends the process."""

from pathlib import Path
from typing import Any

import pytest
from flagcore_operators import measuring

from flagcore.domain.launch import Exit


def _ended(code: int, by: str | None = None) -> Exit:
    return Exit(code=code, ended_by=by, duration_s=1.0, peak_memory_bytes=None)


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (_ended(-6), "crashes with exit code -6"),
        (_ended(-9, "request"), "hangs for more than 15 s"),
    ],
)
def test_an_implementation_that_ends_the_benchmark_is_excluded_and_the_others_are_timed(
    ended: Exit, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()

    def run(job: Any, environment: Any, folder: Path, left: float, hang_seconds: float) -> Any:
        asked.append(job["todo"])
        lines = list[dict[str, Any]]([{}])
        for call, names in job["todo"]:
            for name in names:
                lines.append({"call": call, "implementation": name})
                if name == "bad":
                    return lines, ended
                lines.append({**lines[-1], "seconds": 1.0, "done": True})
        return lines, _ended(0)

    monkeypatch.setattr(measuring, "_run", run)
    todo = [(0, ["usual", "bad", "fast"]), (1, ["usual", "bad"]), (2, ["usual", "bad"])]
    job = {"calls": [{"operator": name} for name in ("relu", "relu", "exp")]}
    rows = measuring._time(job, todo, {}, tmp_path, 60.0)
    assert asked == [todo, [(0, ["fast"]), (1, ["usual"]), (2, ["usual", "bad"])]]
    assert [(row["call"], row["failed"]) for row in rows if "failed" in row] == [(0, why), (2, why)]
    timed = [(row["call"], row["implementation"]) for row in rows if "seconds" in row]
    assert timed == [(0, "usual"), (0, "fast"), (1, "usual"), (2, "usual")]
