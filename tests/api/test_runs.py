"""A run's folder as Python users read it, without secrets, and what importing flagcore costs."""

import dataclasses
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from flagcore_testing import toy_program

import flagcore
from flagcore import api
from flagcore.contracts import Event
from flagcore.errors import RunError, UsageError
from flagcore.plugins.entry_points import PAGES, names
from flagcore.spec.plain_data import lookup
from flagcore.tuner.planner import STOPPED
from flagcore.tuner.store import OptunaStore
from tests.cli.conftest import TRAIN, Project


def test_importing_flagcore_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import flagcore; print(*(set(sys.modules) - before))"
    completed = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert completed.stdout.split() == ["flagcore"]
    assert set(flagcore.__all__) <= set(dir(flagcore))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flagcore.nothing  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> flagcore.Outcome:
    """The outcome of a run of four trials."""
    project = Project(tmp_path_factory.mktemp("made"))
    return flagcore.tune(project.spec(control={"max_trials": 4}), run_dir=project.run_dir)


@pytest.fixture
def copied(made: flagcore.Outcome, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.run_dir, tmp_path / "run"))


@pytest.mark.slow
def test_the_run_the_outcome_and_its_result_agree(made: flagcore.Outcome) -> None:
    outcome, run = made, flagcore.load_run(made.run_dir)
    assert (run.trials, run.repeats, run.best, run.speedup) == (
        outcome.plan.trials,
        outcome.plan.repeats,
        outcome.plan.best,
        outcome.plan.speedup,
    )
    assert run.gain == outcome.data["gain"]
    assert run.data == json.loads(json.dumps(outcome.data))
    assert run.stopped_because == outcome.plan.stopped_because
    measurement = [each["measured"] for each in run.predictions]
    assert measurement == [each["measured"]["step_time_s"]["median"] for each in run.data["trials"]]
    assert run.predictions[-1]["believed"] is None or run.predictions[-1]["believed"] > 0
    for shown in (run, outcome):
        assert "\n" not in repr(shown)
        assert "best trial" in shown._repr_html_()
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.fidelity = "run"  # type: ignore[misc]


@pytest.mark.slow
def test_a_data_frame_has_the_fields_of_the_result(made: flagcore.Outcome) -> None:
    pytest.importorskip("pandas")
    frame, data = flagcore.load_run(made.run_dir).to_dataframe(), made.data
    trials = sorted([*data["trials"], *data["repeats"]], key=lambda trial: trial["number"])
    assert list(frame["number"]) == [trial["number"] for trial in trials]
    for name in ("step_time_s.median", "tokens_per_second_per_device"):
        assert list(frame[f"measured.{name}"]) == [lookup(trial, f"measured.{name}") for trial in trials]
    assert {f"candidate.{knob}" for knob in data["best"]["candidate"]} <= {*frame.columns}


def test_without_pandas_there_is_no_data_frame(made: flagcore.Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        flagcore.load_run(made.run_dir).to_dataframe()


@pytest.mark.slow
def test_a_callback_stops_the_search_which_can_be_resumed(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if event.kind == "trial_finished" and event.trials_finished == 2:
            event.stop()

    project = Project(tmp_path)
    spec = project.spec(control={"max_trials": 3, "repeats": 1})
    stopped = flagcore.tune(spec, run_dir=project.run_dir, on_event=stop)
    assert (len(stopped.plan.trials), stopped.plan.repeats, stopped.plan.stopped_because) == (2, (), STOPPED)
    assert stopped.plan.best
    resumed = flagcore.tune(spec, run_dir=project.run_dir)
    assert (resumed.plan.trials[:2], len(resumed.plan.trials)) == (stopped.plan.trials, 3)
    assert resumed.plan.repeats


@pytest.mark.slow
def test_reading_an_active_run_changes_nothing_in_its_folder(copied: Path) -> None:
    identity = json.loads((copied / "task.json").read_text())["run"]
    run = flagcore.load_run(copied)
    (copied / "result.json").unlink()
    OptunaStore(copied, {}, run=identity).begin(run.trials[0])
    files_before = {file: file.stat().st_mtime_ns for file in copied.rglob("*")}
    second_read = flagcore.load_run(copied)
    assert second_read.trials == run.trials  # the one that runs is no trial yet
    assert (dict(second_read.data), second_read.stopped_because) == ({}, None)
    assert {file: file.stat().st_mtime_ns for file in copied.rglob("*")} == files_before


def test_a_run_without_trials_has_its_predictions(tmp_path: Path) -> None:
    project = Project(tmp_path)
    outcome = flagcore.tune(project.spec(), run_dir=project.run_dir, fidelity="estimate")
    run = flagcore.load_run(project.run_dir)
    assert [trial.candidate for trial in run.trials] == [trial.candidate for trial in outcome.plan.trials]
    assert run.best is not None
    assert (str(run.best).count("\n"), str(run.best).endswith(" s/step"), len(str(run.best)) < 1000) == (0, True, True)
    assert run.best.number == outcome.data["best"]["number"]
    assert run.gain == outcome.data["gain"]


def test_folder_without_a_run_and_one_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        flagcore.load_run(tmp_path)
    for engine in ("[]", '"x"', "null"):
        (tmp_path / "result.json").write_text(f'{{"schema_version": 1, "engines": {{"a": {{}}}}, "engine": {engine}}}')
        with pytest.raises(RunError, match=r"result\.json cannot be read"):
            flagcore.load_run(tmp_path)


SHELL_SECRET, SPEC_SECRET, COMMAND_SECRET = "hf-of-my-shell-1", "wandb-of-the-spec-2", "typed-in-the-command-3"
LOGS = 'import os, sys\nprint({**os.environ})\nprint(sys.argv)\nprint("logged in with", sys.argv[3])\n'


@pytest.mark.slow
def test_secrets_are_not_exposed_and_best_sh_still_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SHELL_SECRET)
    project, where = Project(tmp_path), tmp_path / "run"
    (tmp_path / "train.py").write_text(LOGS + TRAIN)
    command = [sys.executable, "-S", "-E", str(tmp_path / "train.py"), toy_program.__file__]
    command += ["--api-key", COMMAND_SECRET]
    envs = {"HF_TOKEN": SHELL_SECRET, "WANDB_API_KEY": SPEC_SECRET}
    spec = project.spec(control={"max_trials": 2, "repeats": 0}, train={"command": command}, envs=envs)
    api.tune(spec, run_dir=where)

    logged = (where / "trials/0/stdout.log").read_text()
    assert all(secret in logged for secret in (SHELL_SECRET, SPEC_SECRET, COMMAND_SECRET))
    shared_files = [
        "result.json",
        *(["report.html"] if names(PAGES) else []),
        "report.txt",
        "best.sh",
        "journal.log",
        "task.json",
        "best/launch.json",
        "trials/0/launch.json",
    ]
    texts = {name: (where / name).read_text() for name in shared_files}
    for name, text in texts.items():
        assert not [secret for secret in (SHELL_SECRET, SPEC_SECRET, COMMAND_SECRET) if secret in text], name
    for name in ("spec.yaml", "best.yaml", "best/secrets.sh"):
        assert stat.S_IMODE((where / name).stat().st_mode) == 0o600, name
    assert SHELL_SECRET not in (where / "best/secrets.sh").read_text()

    completed = subprocess.run([where / "best.sh"], capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0
    assert all(secret in completed.stdout for secret in (SHELL_SECRET, SPEC_SECRET, COMMAND_SECRET))
    clean_environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    incomplete = subprocess.run([where / "best.sh"], capture_output=True, text=True, timeout=60, env=clean_environment)
    assert incomplete.returncode != 0
    assert "HF_TOKEN: set it" in incomplete.stderr

    monkeypatch.setenv("HF_TOKEN", "another")  # a new token is no other task
    project.spec(control={"max_trials": 2, "repeats": 0}, train={"command": command}, envs={**envs, "HF_TOKEN": "new"})
    api.tune(spec, run_dir=where)
