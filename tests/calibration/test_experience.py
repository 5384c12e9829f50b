"""What trials were measured at, as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagcore.calibration import Experience
from flagcore.domain.trial import Measurement, Role, Trial, TrialState
from tests import small


@pytest.fixture
def kept(tmp_path: Path) -> Experience:
    return Experience(tmp_path / "data" / "experience")


def trial(number: int, state: TrialState = TrialState.MEASURED) -> Trial:
    measured = Measurement(step_times_s=(2.0,), step_time_s=2.0, spread_s=0.1, tokens_per_second_per_device=5.0)
    return Trial(
        number=number,
        candidate=small.candidate(micro_batch_size=number + 1),
        role=Role.SEARCH,
        state=state,
        measurement=measured if state is TrialState.MEASURED else None,
    )


def test_measured_trials_are_found_again_by_chip_and_engine(kept: Experience) -> None:
    task = small.task(small.DENSE)
    chip, engine = task.cluster.groups[0].chip, task.spec.train.engine
    kept.keep("one", task, [trial(0), trial(1, TrialState.FAILED)])
    (record,) = kept.records(chip, engine)
    assert (record["id"], record["measured"]["step_time_s"]) == ("one/0", 2.0)
    assert list(kept.records(chip, "another")) == []
    assert list(kept.records(chip, engine, but="one")) == []


def test_a_run_that_measured_nothing_leaves_nothing(kept: Experience) -> None:
    assert kept.keep("one", small.task(small.DENSE), [trial(0, TrialState.FAILED)]) is None
    assert not kept.folder.exists()


def test_a_chip_is_forgotten_by_its_name_and_other_files_stay(kept: Experience) -> None:
    task = small.task(small.DENSE)
    chip = task.cluster.groups[0].chip
    file = kept.keep("one", task, [trial(0)])
    (kept.folder / "broken.jsonl").write_text("{")
    assert kept.forget("another") == ()
    assert kept.forget(chip.name.upper()) == (file,)
    assert [path.name for path in kept.folder.iterdir()] == ["broken.jsonl"]
    assert list(kept.records(chip, task.spec.train.engine)) == []
