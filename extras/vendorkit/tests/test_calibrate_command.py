"""`flag calibrate`: kernels are measured for real in a few seconds, collectives with the benchmark replaced."""

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from flagcore_vendorkit import choices
from flagcore_vendorkit.calibration import collectives
from flagcore_vendorkit.calibration import measuring as calibration
from flagcore_vendorkit.calibration.store import Calibrations
from flagcore_vendorkit.engines import Listed, VariableKnob

from extras.vendorkit.tests.test_calibrations import MADE
from flagcore import api
from flagcore.domain.chip import Source
from flagcore.errors import RunError, UsageError
from tests.checks import refuses, within
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


@pytest.mark.costly
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


@pytest.mark.costly
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.costly
def test_ctrl_c_leaves_no_process_and_saves_nothing(home: Path, project: Project) -> None:
    process = project.start("calibrate", "--seconds", "60")
    assert within(60, lambda: len(project.processes()) >= 3)  # flag, the guard, the program
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("flag: interrupted")
    assert project.all_gone()
    assert not any(home.glob("*"))


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


@pytest.mark.costly
@pytest.mark.parametrize(
    ("arguments", "words"), [(("--devices", "900"), "--devices 900: this machine has "), ((), "cannot be written: ")]
)
def test_missing_requirements_are_reported_before_anything_is_measured(
    flag: Flag, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "file"))
    completed = flag("calibrate", *arguments).refused(2, words)
    assert "measuring" not in completed.err


VALUES: dict[str, dict[int | str, float]] = {
    "ACME_ALGO": {"tree": 0.4},  # rounds sums differently
    "ACME_BUFFER": {1: 0.8, 2: 1.2},
    "ACME_CHANNELS": {4: 0.5, 8: 0.7, 16: 0.99},
    "ACME_PROTO": {"wrong": 0.1, "crashes": 0.1},
    "ACME_SHM": {0: 0.9},  # no gain where ACME_CHANNELS is set
}
SPEC: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 512},
    "cluster": {"chip": "auto", "devices_per_node": 2},
    "train": {"engine": "megatron", "seq_length": 64, "global_batch_size": 4, "precision": "fp32"},
    "auto_tuner": {
        "space": {"tensor_model_parallel_size": [1, 2]},
        "baseline": {"tensor_model_parallel_size": 2, "micro_batch_size": 1},
    },
}


def run(name: str, job: Mapping[str, Any], environment: Mapping[str, str], timeout_seconds: float) -> list[list[Any]]:
    assert (name, job["devices"]) == ("collectives", 2)
    factor, proto = 1.0, environment.get("ACME_PROTO")
    for variable, values in VALUES.items():
        if variable != "ACME_SHM" or "ACME_CHANNELS" not in environment:
            factor *= {str(value): each for value, each in values.items()}.get(environment.get(variable, ""), 1.0)
    if proto == "crashes":
        raise RunError("crashed")
    return [[1e-3 * call[3] * factor, proto, environment.get("ACME_ALGO")] for call in job["calls"]]


@pytest.fixture(autouse=True)
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        VariableKnob(
            variable=name, values=tuple(values), says="x", risk="y", source=Source(kind="published", detail="z")
        )
        for name, values in VALUES.items()
    ]
    listed = [Listed(scope=each, knob=each.knob, is_screened=True) for each in rows]
    monkeypatch.setattr(collectives, "all_knobs", lambda package: listed)
    monkeypatch.setattr(collectives, "run_benchmark", run)
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("own", "rounding", "expected", "factor"),
    [
        ({}, False, {"ACME_BUFFER": "1", "ACME_CHANNELS": "4"}, 0.4),
        ({"ACME_CHANNELS": "4"}, False, {"ACME_BUFFER": "1"}, 0.8),
        ({}, True, {"ACME_ALGO": "tree", "ACME_BUFFER": "1", "ACME_CHANNELS": "4"}, 0.16),
    ],
)
def test_the_best_right_values_are_combined(
    own: Mapping[str, str], rounding: bool, expected: Mapping[str, str], factor: float
) -> None:
    choice, file = collectives.calibrate_collectives({**SPEC, "envs": dict(own)}, rounding=rounding)
    assert choice.environment == expected
    assert choice.time[0] == pytest.approx(factor, rel=0.2)  # the engine does not add calls up alone
    assert "tp_comm_s" in choice.part
    why = {row["setting"]: row["excluded"] for row in choice.rows}
    assert not {setting for setting in why for name in own if name in setting}
    assert {setting for setting, text in why.items() if text} == {"ACME_PROTO=wrong", "ACME_PROTO=crashes"} | (
        set() if rounding else {"ACME_ALGO=tree"}
    )
    assert [(path, each.environment) for path, each in choices.choices(print)] == [(file, expected)]


def test_a_choice_is_a_knob_that_predicts_the_time_of_collectives() -> None:
    choice, _ = collectives.calibrate_collectives(SPEC)
    found = api.estimate(api.changed_spec(SPEC, {"auto_tuner.space.collectives": "auto"}), top=1000)
    parts = {
        each["candidate"]["collectives"]: each["time"]
        for each in found.candidates
        if (each["candidate"]["tensor_model_parallel_size"], each["candidate"]["micro_batch_size"]) == (2, 1)
    }
    usual, better = parts[None], parts[choices.CALIBRATED]
    assert better["tp_comm_s"] == pytest.approx(choice.time[0] * usual["tp_comm_s"])
    assert better["compute_s"] == usual["compute_s"]
    with refuses("envs.ACME_CHANNELS"):
        api.estimate(api.changed_spec(SPEC, {"auto_tuner.space.collectives": "auto", "envs.ACME_CHANNELS": 8}))


def test_nothing_to_compare_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no collectives"):
        collectives.calibrate_collectives(api.changed_spec(SPEC, {"cluster.devices_per_node": 1, "auto_tuner": {}}))
    monkeypatch.setattr(collectives, "all_knobs", lambda package: [])
    with pytest.raises(UsageError, match="no variable"):
        collectives.calibrate_collectives(SPEC)


@pytest.mark.parametrize("options", [("--rounding",), ("--collectives", "job.yaml", "--devices", "2")])
def test_options_that_do_nothing_are_refused(options: tuple[str, ...], flag: Flag) -> None:
    assert flag("calibrate", *options).code == 2


def test_the_command_shows_each_setting(flag: Flag, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(SPEC))
    rows = json.loads(flag("calibrate", "--collectives", str(tmp_path / "job.yaml"), "--json").worked().out)
    assert {row["setting"] for row in rows} >= {"", "ACME_ALGO=tree", "ACME_CHANNELS=4 ACME_BUFFER=1"}
