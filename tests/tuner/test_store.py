"""The run directory and its trials: what a kill, a full disk or a stranger may leave, and who is let in."""

import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from flagcore.domain.records import belief_record
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.trial import Measurement, Role, Trial, TrialState
from flagcore.errors import RunError
from flagcore.tuner.journal import read_journal
from flagcore.tuner.run_folder import RunDirectory
from flagcore.tuner.store import OptunaStore, stored_trials
from tests import tasks

CHOICES: dict[str, tuple[KnobValue, ...]] = {
    "micro_batch_size": (1, 2, 4, 8),
    "sequence_parallel": (False, True),
    "recompute_method": (None, "uniform"),
}
MEASURED = Measurement(
    step_times_s=(1.5, 2.5),
    step_time_s=2.0,
    spread_s=0.5,
    tokens_per_second_per_device=512.0,
    peak_allocated_bytes=1 << 30,
    losses=(9.0, None),
    effective={"micro_batch_size": 2},
    versions={"torch": "2.13"},
    telemetry={"power_watts": 300.0},
)


PREDICTED = replace(tasks.prediction(compute_s=1.0, capacity=float(80 << 30)), limit="compute", model_flops=0.0)


def candidate(micro_batch_size: int = 1) -> Candidate:
    return Candidate.of({"micro_batch_size": micro_batch_size, "sequence_parallel": False, "recompute_method": None})


def store(path: Path, **options: str) -> OptunaStore:
    return OptunaStore(path, CHOICES, **{"run": "run", **options})


def planned(candidate: Candidate, role: Role = Role.SEARCH, **fields: Any) -> Trial:
    return Trial(**{"number": 0, "candidate": candidate, "role": role, "state": TrialState.RUNNING, **fields})


def run(into: OptunaStore, micro_batch_size: int = 1, state: TrialState = TrialState.MEASURED) -> Trial:
    trial = into.begin(planned(candidate(micro_batch_size), predicted=PREDICTED))
    measured = MEASURED if state is TrialState.MEASURED else None
    done = replace(trial, state=state, measurement=measured, reason=None if measured else "why", duration_s=3.5)
    into.finish(done)
    return done


def test_finished_trials_are_read_back_unchanged(tmp_path: Path) -> None:
    first = store(tmp_path)
    trials = [run(first, 1), run(first, 2, TrialState.OUT_OF_MEMORY), run(first, 4, TrialState.STOPPED)]
    assert list(first.trials()) == trials
    assert list(store(tmp_path).trials()) == trials
    assert [trial.number for trial in trials] == [0, 1, 2]
    assert Path(first.folder(trials[1])) == tmp_path / "trials" / "1"
    assert Path(first.folder(trials[1])).is_dir()


@pytest.mark.parametrize("step", [0.0, 1e305, float("nan"), float("inf"), -1.0])
def test_a_stored_reading_that_cannot_be_costs_only_its_trial(tmp_path: Path, step: float) -> None:
    first = store(tmp_path)
    good, bad = run(first, 1), first.begin(planned(candidate(2), predicted=PREDICTED))
    wrong = replace(MEASURED, step_time_s=step, step_times_s=(step,))
    first.finish(replace(bad, state=TrialState.STOPPED, measurement=wrong, duration_s=1.0))
    kept, ignored = store(tmp_path).trials()
    assert (kept, ignored.state, ignored.measurement) == (good, TrialState.FAILED, None)
    assert "unusable step time" in (ignored.reason or "")


def test_an_imported_trial_is_read_back_with_its_source(tmp_path: Path) -> None:
    imported = planned(candidate(), state=TrialState.MEASURED, measurement=MEASURED, source="history.csv")
    stored = store(tmp_path).add(imported)
    assert store(tmp_path).trials() == (stored,)
    assert stored.source == "history.csv"


def test_trials_are_read_without_the_lock_and_without_writing(tmp_path: Path) -> None:
    assert read_journal(tmp_path, "run").trials == {}
    trial_ = run(store(tmp_path))
    before = (tmp_path / "journal.log").read_bytes()
    assert read_journal(tmp_path, "run").trials == {0: trial_}
    with pytest.raises(RunError, match="of the run run, not of another"):
        read_journal(tmp_path, "another")
    assert (tmp_path / "journal.log").read_bytes() == before
    with pytest.raises(RunError):
        stored_trials("run", f"sqlite:///{tmp_path}/none.db")


def test_notes_of_the_search_are_read_back(tmp_path: Path) -> None:
    notes: Any = {"began_s": 1.5, "chosen_because": "fast", "search_ended": "done"}
    first, belief = store(tmp_path), tasks.belief(2.0, max_expected_gain=0.5)
    first.finish(first.begin(planned(candidate(1), predicted=PREDICTED, believed=belief, **notes)))
    first.finish(first.begin(planned(candidate(2), chosen_because="fast")))
    believed, other = store(tmp_path).trials()
    assert (believed.predicted, believed.believed) == (PREDICTED, belief)
    assert believed.search_fields == {**notes, "believed": belief_record(belief)}
    assert (other.predicted, other.believed, other.search_fields["believed"]) == (None, None, {})


def test_a_running_trial_is_closed_as_interrupted_at_the_next_start(tmp_path: Path) -> None:
    first = store(tmp_path)
    run(first)
    first.begin(planned(candidate(2), Role.BASELINE))
    assert len(first.trials()) == 1
    second = store(tmp_path)
    assert [trial.state for trial in second.trials()] == [TrialState.MEASURED, TrialState.INTERRUPTED]
    assert second.trials()[1].role is Role.BASELINE
    assert run(second, 2).number == 2
    assert len(store(tmp_path).trials()) == 3


def test_a_kill_between_writing_a_result_and_its_optuna_trial_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(OptunaStore, "_close_in_optuna", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(first)
    assert [trial.state for trial in store(tmp_path).trials()] == [TrialState.MEASURED]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("size", [1, 10, -2, -40])
def test_a_journal_line_cut_short_is_dropped_and_the_next_one_is_whole(tmp_path: Path, size: int) -> None:
    trial_ = run(store(tmp_path))
    journal = tmp_path / "journal.log"
    content = journal.read_bytes()
    journal.write_bytes(content + content.splitlines(keepends=True)[-1][:size])
    second = store(tmp_path)
    assert second.trials() == (trial_,)
    run(second, 2)
    assert (len(store(tmp_path).trials()), "damaged lines: 5" in second.notes[0]) == (2, True)
    assert all(json.loads(line) for line in journal.read_text().splitlines())


def test_a_stale_lock_of_the_journal_does_not_block(tmp_path: Path) -> None:
    run(store(tmp_path))
    (tmp_path / "journal.log.lock").touch()
    began = time.monotonic()
    run(store(tmp_path), 2)
    assert time.monotonic() - began < 5
    assert len(store(tmp_path).trials()) == 2


@pytest.mark.parametrize("url", ["nonsense", "sqlite:////proc/no/such.db", "nodialect://x", "redis://127.0.0.1:1"])
def test_a_storage_that_cannot_be_opened_is_refused_in_one_line(tmp_path: Path, url: str) -> None:
    with pytest.raises(RunError, match="cannot be used") as caught:
        store(tmp_path, url=url)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_any_optuna_storage_holds_the_trials(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trials.db"
    trial_ = run(store(tmp_path, url=url))
    assert store(tmp_path, url=url).trials() == (trial_,)
    assert store(tmp_path, url=url, run="another run").trials() == ()
    assert not (tmp_path / "journal.log").exists()


@pytest.mark.parametrize(("objective", "best"), [("tokens_per_second_per_device", 512.0), ("step_time_s", 2.0)])
def test_optunas_own_tools_see_the_objective(tmp_path: Path, objective: str, best: float) -> None:
    trial_store = store(tmp_path, objective=objective)
    run(trial_store)
    run(trial_store, 2, TrialState.FAILED)
    run(trial_store, 4, TrialState.STOPPED)
    slower = replace(MEASURED, step_time_s=4.0, tokens_per_second_per_device=256.0)
    trial_store.add(planned(candidate(8), state=TrialState.MEASURED, measurement=slower))
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.log"))
    study = optuna.load_study(study_name="run", storage=optuna.storages.JournalStorage(backend))
    assert study.best_value == best
    assert study.best_params == {"micro_batch_size": 1, "sequence_parallel": False, "recompute_method": None}
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "PRUNED", "COMPLETE"]


@pytest.fixture
def locked_folder(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory(tmp_path / "run")
    directory.open()
    yield directory
    directory.close()


def test_a_folder_in_use_is_refused_with_the_process_that_uses_it(locked_folder: RunDirectory) -> None:
    with pytest.raises(RunError, match=f"{os.getpid()}"):
        RunDirectory(locked_folder.path).open()
    with pytest.raises(RunError, match="in use"):
        RunDirectory(locked_folder.path).open(new=True)
    locked_folder.close()
    after = RunDirectory(locked_folder.path)
    after.open()
    after.close()


def test_the_same_task_resumes_with_its_name_and_fixed_values(locked_folder: RunDirectory) -> None:
    task = {"spec": {"train": {"seq_length": 128}}}
    assert locked_folder.identity() is None
    name = locked_folder.claim(task, {"baseline": {"micro_batch_size": 1}})
    assert locked_folder.claim(task, {"baseline": {"micro_batch_size": 2}}) == name
    assert locked_folder.identity() == {"run": name, "task": task, "fixed": {"baseline": {"micro_batch_size": 1}}}
    other = RunDirectory(locked_folder.path.with_name("other"))
    other.open()
    assert other.claim(task, {}) != name
    other.close()


def test_another_task_is_refused_and_the_differences_are_listed(locked_folder: RunDirectory) -> None:
    locked_folder.claim({"spec": {"train": {"seq_length": 128}, "model": "a"}, "hardware": {"nodes": 1}}, {})
    changed = {"spec": {"train": {"seq_length": 256}, "envs": {"A": "1"}}, "hardware": {"nodes": 1}}
    with pytest.raises(RunError) as caught:
        locked_folder.claim(changed, {})
    words = str(caught.value)
    assert "spec.train.seq_length: 128 -> 256" in words
    assert 'spec.envs: null -> {"A": "1"}' in words
    assert 'spec.model: "a" -> null' in words
    assert "nodes" not in words
    assert "--new" in words


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"\xff", b"[]", b'{"run": 1}'])
def test_a_modified_identity_is_refused(locked_folder: RunDirectory, content: bytes) -> None:
    (locked_folder.path / "task.json").write_bytes(content)
    with pytest.raises(RunError, match="--new"):
        locked_folder.claim({"a": 1}, {})


def test_new_moves_an_earlier_run_aside_and_deletes_nothing(tmp_path: Path) -> None:
    names = set()
    for round_ in range(3):
        directory = RunDirectory(tmp_path / "run")
        directory.open(new=True)
        names.add(directory.claim({"round": round_}, {}))
        directory.close()
    rounds = sorted(json.loads((folder / "task.json").read_text())["task"]["round"] for folder in tmp_path.iterdir())
    assert rounds == [0, 1, 2]
    assert len(names) == 3


def test_new_does_not_move_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    directory = RunDirectory(tmp_path)
    directory.open(new=True)
    directory.close()
    assert (tmp_path / "thesis.txt").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/flagcore"), tmp_path / ("x" * 300)):
        with pytest.raises(RunError, match="cannot be written"):
            RunDirectory(path).open()


def test_a_full_disk_is_reported_with_the_saved_files(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"No space left .* finished trials are saved"):
        _write_to_full_disk(tmp_path)


def _write_to_full_disk(path: Path) -> None:
    trial_store = store(path)
    (path / "journal.log").unlink()
    (path / "journal.log").symlink_to("/dev/full")
    trial_store.begin(planned(tasks.candidate()))


def test_an_identity_with_a_secret_is_readable_only_by_its_owner(locked_folder: RunDirectory) -> None:
    locked_folder.claim({}, {"command": ["serve", "--api-key", "s3cr3tv4lu3"]})
    assert stat.S_IMODE((locked_folder.path / "task.json").stat().st_mode) == 0o600
