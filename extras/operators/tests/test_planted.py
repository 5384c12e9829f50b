"""A library with planted costs: the best right implementations are found, set, and confirmed by trials."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from flagcore_operators.contract import find_library
from flagcore_operators.measuring import calibrate_operators
from flagcore_vendorkit.choices import CALIBRATED

from extras.operators.tests.planted import BEST, MS, VARIABLE
from flagcore import api

PROGRAM = Path(__file__).with_name("planted.py")


def spec(tmp_path: Path, **envs: str) -> dict[str, Any]:
    step = r"step (?P<step>\d+) took (?P<ms>[\d.]+) ms"
    return {
        "model": {
            "num_layers": 1,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 512,
        },
        "cluster": {"chip": "auto", "devices_per_node": 1},
        "train": {
            "engine": "command",
            "seq_length": 32,
            "global_batch_size": 1,
            "precision": "fp32",
            "command": [sys.executable, str(PROGRAM), "6"],
            "directory": str(tmp_path),
            "program": {"knobs": {"unused": {"flag": "--unused={}", "values": [1]}}, "log": {"step": step}},
        },
        "auto_tuner": {"control": {"train_iters": 6, "warmup_iters": 1, "max_trials": 2, "repeats": 0}},
        "envs": {"OMP_NUM_THREADS": 1, **envs},
    }


def install(site: Path) -> None:
    """Install the library, as another distribution does."""
    info = site / "planted-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flagcore.operators]\nplanted = planted:PLANTED\n")
    (site / "planted.py").symlink_to(PROGRAM)


@pytest.mark.slow
def test_the_planted_optimum_is_found_and_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "home"))
    reasons = {"neg": {"avoided": "known to be wrong (a vendor)"}}
    monkeypatch.setattr("flagcore_operators.measuring.avoided", lambda package, names: reasons)

    job = spec(tmp_path)
    choice, file = calibrate_operators(job, library="planted", seconds=60.0)
    rows = {row["operator"]: row for row in choice.rows}
    assert {name: row["chosen"] for name, row in rows.items() if row["chosen"] != row["default"]} == BEST
    assert rows.keys() == MS.keys()
    assert all(row["calls"] == 24 for row in rows.values())
    excluded = {implementation: why for row in rows.values() for implementation, why in row["excluded"].items()}
    assert excluded.keys() == {"wrong", "crashes", "hangs", "spoils", "avoided"}
    assert "wrong result" in excluded["wrong"]
    assert "wrong result" in excluded["spoils"]
    usual, best = (sum(MS[name][chosen.get(name, "usual")] for name in MS) for chosen in ({}, BEST))
    assert choice.time[0] == pytest.approx(best / usual, rel=0.15)
    assert find_library("planted").in_effect(choice.environment, "") == BEST
    assert file.with_suffix(".yaml").read_text() == choice.file
    assert not list((tmp_path / "home").glob("experience/*"))

    outcome = api.tune(api.changed_spec(job, {"auto_tuner.space.planted_operators": "auto"}), run_dir=tmp_path / "run")
    trials = outcome.data["trials"]
    assert [each["candidate"]["planted_operators"] for each in trials] == [None, CALIBRATED]
    assert outcome.data["best"]["candidate"]["planted_operators"] == CALIBRATED
    launch = json.loads((tmp_path / "run" / "trials" / "1" / "launch.json").read_text())
    assert launch["environment"][VARIABLE] == choice.environment[VARIABLE]
    assert choice.environment[VARIABLE] in (tmp_path / "run" / "best.sh").read_text()
    seconds = [each["measured"]["step_time_s"]["median"] for each in trials]
    assert seconds[1] / seconds[0] == pytest.approx(best / usual, rel=0.15)
