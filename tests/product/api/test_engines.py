"""Several serving engines for one load."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flagcore.api.commands.tune import each_engine
from flagcore.api.inputs import LoadedSpec, read_spec
from flagcore.errors import Interrupted, NoDevice, SpecError

DATA = {
    "serve": {"engine": ["slow", "quick", "absent"]},
    "auto_tuner": {"space": {"a": [1], "quick": {"b": [2]}}, "control": {"max_trials": 9, "max_time": "90s"}},
}
ENGINES = ("slow", "quick", "absent")
RATES = {"slow": 10.0, "quick": 20.0}


@dataclass(frozen=True)
class Found:
    plan: Any
    data: dict[str, Any]
    run_dir: Path
    heading: str = ""
    seen: list[Any] = field(default_factory=list)


def outcome(data: dict[str, Any], run_dir: Path) -> Any:
    engine = data["serve"]["engine"]
    if engine not in RATES:
        raise NoDevice(f"{engine} is not installed")
    run_dir.mkdir(parents=True)
    (run_dir / "best.yaml").write_text(engine)
    (run_dir / "best").mkdir()
    (run_dir / "best" / "launch.json").write_text(engine)
    best = SimpleNamespace(number=0, step_seen_s=1 / RATES[engine], predicted_step_s=None)
    return Found(
        SimpleNamespace(best=best, median_s=lambda trial: trial.step_seen_s, stopped_because=""),
        {"given": data},
        run_dir,
    )


def test_the_best_engine_wins_and_an_unavailable_one_is_skipped(tmp_path: Path) -> None:
    result = each_engine(DATA, ENGINES, tmp_path / "run", outcome)
    assert result.data["engine"] == "quick"
    assert list(result.data["engines"]) == ["quick", "slow", "absent"]
    assert "absent is not installed" in result.data["engines"]["absent"]["error"]
    assert (tmp_path / "run" / "best.yaml").read_text() == "quick"
    assert (tmp_path / "run" / "best" / "launch.json").read_text() == "quick"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["engine"] == "quick"


def test_each_engine_has_its_own_knobs_and_a_share_of_the_budget(tmp_path: Path) -> None:
    result = each_engine(DATA, ENGINES, tmp_path / "run", outcome)
    inputs = {engine: result.data["engines"][engine]["given"]["auto_tuner"] for engine in RATES}
    assert inputs["quick"] == {"space": {"a": [1], "b": [2]}, "control": {"max_trials": 3, "max_time": 30.0}}
    assert inputs["slow"]["space"] == {"a": [1]}


def test_if_no_engine_can_run_each_error_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(data: dict[str, Any], run_dir: Path) -> Any:
        raise NoDevice("no device" if run_dir.name != "third" else "no plugin")

    with caplog.at_level(logging.WARNING, "flagcore"), pytest.raises(NoDevice, match="first, second, third"):
        each_engine(DATA, ("first", "second", "third"), tmp_path, fails)
    assert [" device" in each for each in caplog.messages] == [True, False, False]


def test_an_interrupt_ends_all_engines(tmp_path: Path) -> None:
    def interrupted(data: dict[str, Any], run_dir: Path) -> Any:
        raise Interrupted("interrupted")

    with pytest.raises(Interrupted):
        each_engine(DATA, ENGINES, tmp_path, interrupted)


def test_an_unknown_strategy_and_launcher_are_reported_with_all_other_errors() -> None:
    tuner = {"strategy": "lerned", "launcher": "lokal", "space": {"nope": 1}}
    data = {"model": {}, "serve": {"engine": "vllm"}, "auto_tuner": tuner}
    with pytest.raises(SpecError) as refused:
        read_spec(LoadedSpec("x", data))
    result = {(each.key, each.value) for each in refused.value.problems}
    assert result > {("auto_tuner.strategy", "lerned"), ("auto_tuner.launcher", "lokal"), ("auto_tuner.space.nope", 1)}


@pytest.mark.parametrize("cluster", [{"chip": "nosuch"}, {"groups": [{"chip": "cpu"}, {"chip": "nosuch"}]}])
def test_an_unknown_chip_is_listed_with_the_other_problems_of_a_spec(cluster: dict[str, Any]) -> None:
    model = {"num_layers": 2, "hidden_size": 65, "ffn_hidden_size": 96, "num_attention_heads": 4, "vocab_size": 100}
    train = {"engine": "megatron", "seq_length": 8, "global_batch_size": 2, "precision": "bf16"}
    chip = "cluster.groups[1].chip" if "groups" in cluster else "cluster.chip"
    with pytest.raises(SpecError) as error:
        read_spec(LoadedSpec("x", {"model": model, "cluster": cluster, "train": train}))
    assert [(each.key, each.value) for each in error.value.problems] == [("model.hidden_size", 65), (chip, "nosuch")]
    assert read_spec(LoadedSpec("x", {"model": {**model, "hidden_size": 64}, "cluster": cluster, "train": train}))
