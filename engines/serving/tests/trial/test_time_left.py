"""What a trial says about a load that does not end in its time."""

import json
import math
from pathlib import Path

import pytest
from flagcore_serving.load.result import Progress
from flagcore_serving.trial.time_left import Limit, fewest_answers

from flagcore.domain.serving import Load

LOAD = Load(input_len=32, output_len=64, num_prompts=32, concurrency=16)
SLOW = Progress(answered=3, requests=32, seconds=31.0, each_s=29.0, all_s=310.0, has_tokens=True)


def limit(folder: Path, because: str, seconds: float = 100.0, start_s: float = 7.0) -> Limit:
    (folder / "launch.json").write_text(json.dumps({"timeout_because": because}))
    return Limit.of(folder, seconds, start_s)


@pytest.mark.parametrize(
    ("because", "seconds", "setting"),
    [
        ("auto_tuner.control.max_time_per_task = 100 s", 100.0, "auto_tuner.control.max_time_per_task: 400"),
        ("the rest of auto_tuner.control.max_time = 210 s", 100.0, "auto_tuner.control.max_time: 510"),
        ("1200 s to start", 100.0, "auto_tuner.control.max_time_per_task: 400"),
    ],
)
def test_the_setting_for_the_time_limit_is_computed(because: str, seconds: float, setting: str, tmp_path: Path) -> None:
    text = limit(tmp_path, because, seconds).short_of_time(SLOW, "the load", [LOAD], 88.0, 2.1)
    assert f"set {setting} or serve.profile.num_prompts: 7" in text
    for part in ("3 of 32", "29 s each", "predicted 2.1 s", "~310 s of 88 s"):
        assert part in text
    assert len(text) < 250


def test_later_loads_need_time_too(tmp_path: Path) -> None:
    text = limit(tmp_path, "").short_of_time(SLOW, "load 1 of 2", [LOAD, LOAD], 88.0, None)
    assert "~620 s of 88 s" in text


def test_a_start_that_took_most_of_the_time_is_named(tmp_path: Path) -> None:
    late = limit(tmp_path, "", start_s=80.0)
    assert "the start took 80 s of 100 s" in late.no_time("warm-up")
    assert "the start took 80 s of 100 s" in late.short_of_time(SLOW, "the load", [LOAD], 8.0, None)
    assert "the start" not in limit(tmp_path, "").no_time("warm-up")


def test_a_server_that_sent_nothing_gets_no_advice(tmp_path: Path) -> None:
    silent = Progress(answered=0, requests=32, seconds=88.0, each_s=None, all_s=None, has_tokens=False)
    text = limit(tmp_path, "").short_of_time(silent, "the load", [LOAD], 88.0, 2.1)
    assert "none of 32" in text
    assert "no token arrived" in text
    assert "set " not in text


def test_a_trial_without_a_launch_has_a_limit(tmp_path: Path) -> None:
    assert Limit.of(tmp_path, 60.0, 1.0).value_s == 60.0


@pytest.mark.parametrize(
    ("load", "fewest"),
    [
        (LOAD, 16),
        (Load(concurrency=2), 8),
        (Load(request_rate=4.0), 8),
        (Load(request_rate=math.inf, num_prompts=100), 100),
    ],
)
def test_every_request_in_flight_ends_once_in_a_load_that_is_cut(load: Load, fewest: int) -> None:
    assert fewest_answers(load) == fewest
