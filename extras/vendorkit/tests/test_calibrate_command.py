"""`flag calibrate`: measured for real on the cores of this machine, in a few seconds."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from flagcore_vendorkit.calibration import measuring as calibration
from flagcore_vendorkit.calibration.store import Calibrations

from extras.vendorkit.tests.test_calibrations import MADE
from tests.launchers.processes import within
from tests.product.cli.conftest import Answer, Flag, Project
from tests.product.cli.conftest import answer as answer
from tests.product.cli.conftest import flag as flag
from tests.product.cli.conftest import project as project


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "calibrations"


def step_time(answer: Answer, spec: str) -> float:
    return float(answer("estimate", spec, "--top", "1")[0]["step_time_s"]["value"])


@pytest.mark.slow
def test_a_calibration_is_saved_listed_used_and_deleted(
    flag: Flag, answer: Answer, home: Path, project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    spec = project.spec(train={"command": None})
    seconds_before = step_time(answer, spec)
    assert "calibration" not in caplog.text

    completed = flag("calibrate", "--seconds", "5", "--json").worked()
    (file,) = home.iterdir()
    assert f"Saved to {file}" in completed.err
    rows = json.loads(completed.out)
    assert rows == json.loads(file.read_text())["rows"]
    kinds = {row.get("kernel") or row["collective"] for row in rows}
    assert {"gemm", "attention", "attention_backward", "copy", "elementwise", "launch"} <= kinds
    assert "host_copy" not in kinds
    assert all(row["us"] > 0 and row["repeats"] >= 3 for row in rows)
    (stored,) = answer("calibrate", "--list")
    assert (stored["chip"], stored["file"], stored["kernels"] + stored["collectives"]) == ("cpu", str(file), len(rows))
    assert ("all_reduce" in kinds) == (stored["devices"] > 1)

    seconds_after = step_time(answer, spec)
    assert seconds_after != seconds_before
    assert caplog.text.count("cpu is predicted from its calibration of ") == 1
    assert step_time(answer, spec) == seconds_after  # the file decides, nothing else

    file.unlink()
    assert step_time(answer, spec) == seconds_before


def test_a_failed_measurement_is_reported_in_one_line_and_not_saved(
    flag: Flag, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "benchmark", lambda name: "flagcore.no_such_program")
    completed = flag("calibrate", "--seconds", "5")
    assert completed.code == 2
    (line,) = [line for line in completed.err.splitlines() if line.startswith("flag: the measurement")]
    assert "no_such_program" in line
    assert "No module named flagcore.no_such_program" in line
    assert not any(home.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_leaves_no_process_and_saves_nothing(home: Path, project: Project) -> None:
    process = project.start("calibrate", "--seconds", "60")
    assert within(60, lambda: len(project.processes()) >= 3)  # flag, the guard, the program
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("flag: interrupted")
    assert project.all_gone()
    assert not any(home.iterdir())


@pytest.mark.parametrize("arguments", ["--seconds nan", "--seconds inf", "--seconds 1"])
def test_wrong_options_are_refused(flag: Flag, home: Path, arguments: str) -> None:
    assert flag("calibrate", *arguments.split()).code == 2
    assert not home.exists()


def test_an_unreadable_file_of_another_chip_is_reported_and_skipped(
    flag: Flag, answer: Answer, home: Path, project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    spec = project.spec(train={"command": None})
    seconds_before = step_time(answer, spec)
    home.mkdir(parents=True)
    (home / "h200--nvidia-h200--driver-1--torch-2.json").write_text("{")
    assert step_time(answer, spec) == seconds_before
    assert caplog.text.count("h200--nvidia-h200--driver-1--torch-2.json (") == 1
    assert answer("calibrate", "--list") == []
    assert flag("estimate", spec, "--chip", "H200").code == 2


@pytest.mark.parametrize(
    ("others", "text"), [(0.0, "H200 was calibrated on 2 of the 8 devices of a node"), (0.6, "60% of the processors")]
)
def test_what_is_wrong_with_a_calibration_is_reported_when_it_is_used(
    flag: Flag, home: Path, project: Project, caplog: pytest.LogCaptureFixture, others: float, text: str
) -> None:
    Calibrations(home).save(replace(MADE, chip="H200", aliases=("NVIDIA H200",), devices=2, others=others))
    spec = project.spec(train={"command": None}, cluster={"devices_per_node": 8, "memory_per_device": None})
    assert flag("estimate", spec, "--chip", "H200").code == 0
    assert caplog.text.count(text) == 1
    assert ("of the processors" in caplog.text) == bool(others)


@pytest.mark.parametrize(
    ("arguments", "words"), [(("--devices", "900"), "--devices 900: this machine has "), ((), "cannot be written: ")]
)
def test_missing_requirements_are_reported_before_anything_is_measured(
    flag: Flag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "file"))
    completed = flag("calibrate", *arguments)
    assert completed.code == 2
    assert words in completed.err
    assert "measuring" not in completed.err
