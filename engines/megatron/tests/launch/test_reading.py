"""From what a trial left in its folder to a measurement, or to one line that says what is missing."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flagcore_megatron.engine import ENGINE
from flagcore_megatron.reading import MegatronLog
from flagcore_training.reading import program_progress

from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Control
from flagcore.errors import FlagError
from tests.product import tasks

TASK = tasks.task(control=Control(train_iters=5, warmup_iters=1))
COMMAND = tasks.task(control=Control(train_iters=5, warmup_iters=1), command=("make", "train"))
ONE = tasks.candidate(data_parallel_size=4)
STEPS = [{"step_time_s": seconds, "loss": 7.0, "grad_norm": 1.0} for seconds in (9.0, 2.0, 1.0, 4.0, 3.0)]
METRICS: dict[str, Any] = {
    "steps": STEPS,
    "ranks": [
        {"peak_allocated_bytes": 100, "peak_reserved_bytes": 200, "device_used_bytes": 300},
        {"peak_allocated_bytes": 150, "peak_reserved_bytes": None, "device_used_bytes": 250},
    ],
    "effective": {"micro_batch_size": 1},
    "versions": {"torch": "2.13"},
}


def write(folder: Path, metrics: object) -> None:
    (folder / "metrics.json").write_text(metrics if isinstance(metrics, str) else json.dumps(metrics))


def refusal(folder: Path, **how: bool) -> str:
    with pytest.raises(FlagError) as caught:
        ENGINE.read(TASK, ONE, str(folder), **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_warm_up_is_dropped_and_the_rest_summarized(tmp_path: Path) -> None:
    write(tmp_path, METRICS)
    measured = ENGINE.read(TASK, ONE, str(tmp_path))
    assert measured.step_times_s == (2.0, 1.0, 4.0, 3.0)
    assert (measured.step_time_s, measured.spread_s) == (2.5, 1.5)
    assert measured.tokens_per_second_per_device == 8 * 128 / 2.5 / 4
    assert (measured.peak_allocated_bytes, measured.peak_reserved_bytes, measured.device_used_bytes) == (150, 200, 300)
    assert (measured.effective, measured.versions) == ({"micro_batch_size": 1}, {"torch": "2.13"})
    assert measured.losses == (7.0,) * 5


def test_exit_0_without_metrics_is_reported(tmp_path: Path) -> None:
    assert "metrics.json" in refusal(tmp_path)


HOSTILE: dict[str, object] = {
    "half-written": json.dumps(METRICS)[:100],
    "empty": "",
    "binary": "\x00\x01\ufffd",
    "deep inside": '{"steps": ' + "[" * 100_000,
    "a list": [],
    "no steps": {**METRICS, "steps": None},
    "steps of text": {**METRICS, "steps": ["a"]},
    "no ranks": {key: value for key, value in METRICS.items() if key != "ranks"},
    "ranks of numbers": {**METRICS, "ranks": [1, 2]},
    "memory that is a list": {**METRICS, "ranks": [{"peak_allocated_bytes": [1]}]},
    "endless memory": '{"steps": [], "ranks": [{"peak_allocated_bytes": 1e999}], "effective": {}, "versions": {}}',
    "effective of a list": {**METRICS, "effective": [1]},
    "versions of text": {**METRICS, "versions": "2"},
    "a step without time": {**METRICS, "steps": [*STEPS, {"loss": 1.0}]},
    "a step without loss": {**METRICS, "steps": [*STEPS, {"step_time_s": 1.0}]},
    "a loss of text": {**METRICS, "steps": [*STEPS, {"step_time_s": 1.0, "loss": "low"}]},
    "a time of text": {**METRICS, "steps": [*STEPS, {"step_time_s": "soon", "loss": 1.0}]},
    "a time of 400 digits": {**METRICS, "steps": [*STEPS, {"step_time_s": 10**400, "loss": 1.0}]},
    "only warm-up": {**METRICS, "steps": STEPS[:1]},
    "no step": {**METRICS, "steps": []},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_malformed_metrics_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    write(tmp_path, HOSTILE[name])
    assert len(refusal(tmp_path)) < 300


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_none(tmp_path: Path, loss: float | None) -> None:
    write(tmp_path, {**METRICS, "steps": [*STEPS, {"step_time_s": 1.0, "loss": loss}]})
    assert ENGINE.read(TASK, ONE, str(tmp_path)).losses[-1] is None


def test_a_folder_in_place_of_the_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").mkdir()
    assert "cannot be read" in refusal(tmp_path)


def test_steps_so_far_are_read_up_to_a_half_written_line(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(step) for step in STEPS[:3])
    (tmp_path / "steps.jsonl").write_text(lines + '\n{"step_time_s": 1.')
    assert program_progress(str(tmp_path)) == (9.0, 2.0, 1.0)
    assert ENGINE.read(TASK, ONE, str(tmp_path), partial=True).step_times_s == (2.0, 1.0)


@pytest.mark.parametrize("line", ["null", "[]", "[" * 100_000, '{"step_time_s": [1]}', "1" + "0" * 400, "\x00"])
def test_invalid_steps_end_the_progress(tmp_path: Path, line: str) -> None:
    (tmp_path / "steps.jsonl").write_text(json.dumps(STEPS[0]) + "\n" + line + "\n" + json.dumps(STEPS[1]))
    assert program_progress(str(tmp_path)) == (9.0,)


def test_without_steps_there_is_no_progress(tmp_path: Path) -> None:
    assert program_progress(str(tmp_path)) == ()
    assert program_progress(str(tmp_path / "missing")) == ()
    assert "0 step times" in refusal(tmp_path, partial=True)


def log(folder: Path, arguments: Mapping[str, str], milliseconds: tuple[float, ...] = (900, 200, 100)) -> None:
    lines = [f"  {name} ................ {value}" for name, value in arguments.items()]
    lines += [
        f" iteration {n + 1:8}/{3:8} | elapsed time per iteration (ms): {each:.1f} | lm loss: 7.0E+00 |"
        for n, each in enumerate(milliseconds)
    ]
    (folder / "stdout.log").write_text("\n".join(lines) + "\n")


def test_a_users_command_is_measured_by_its_log(tmp_path: Path) -> None:
    log(tmp_path, {})
    assert ENGINE.read(COMMAND, ONE, str(tmp_path)).step_times_s == (0.2, 0.1)
    assert MegatronLog(str(tmp_path))() == (0.9, 0.2, 0.1)


def test_the_steady_steps_of_a_warm_up_are_not_measured(tmp_path: Path) -> None:
    task = tasks.task(control=Control(train_iters=12, warmup_iters=10), command=("make", "train"))
    log(tmp_path, {}, (900, 100, 101, 100, 200, 300))
    measured = ENGINE.read(task, ONE, str(tmp_path))
    assert (measured.step_times_s, measured.warmup_steps) == ((0.2, 0.3), 4)


def test_a_users_command_without_step_times_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="no line of the log"):
        ENGINE.read(COMMAND, ONE, str(tmp_path))


@pytest.mark.parametrize("time", ["nan", "inf", "-5.0", "0.0"])
def test_unusable_times_end_a_users_command_and_are_named(tmp_path: Path, time: str) -> None:
    lines = [f" iteration {number}/ 4 | elapsed time per iteration (ms): {time} |\n" for number in (1, 2)]
    (tmp_path / "stdout.log").write_text("".join(lines))
    assert ENGINE.steps(COMMAND, str(tmp_path)).times() == (math.inf, math.inf)
    with pytest.raises(FlagError, match=f"unusable step time: the log states {time} ms"):
        ENGINE.read(COMMAND, ONE, str(tmp_path))


def test_effective_values_are_read_from_the_output_of_megatron(tmp_path: Path) -> None:
    printed = {
        "micro_batch_size": "4",
        "sequence_parallel": "False",
        "use_distributed_optimizer": "True",
        "recompute_method": "None",
        "recompute_granularity": "full",
        "data_parallel_size": "²",
        "bf16": "True",
    }
    log(tmp_path, printed)
    effective: Mapping[str, KnobValue] = ENGINE.read(COMMAND, ONE, str(tmp_path)).effective  # type: ignore[assignment]
    assert effective == {
        "data_parallel_size": "²",
        "micro_batch_size": 4,
        "sequence_parallel": False,
        "use_distributed_optimizer": True,
        "recompute_method": None,
        "recompute_granularity": "full",
    }


@pytest.mark.parametrize("name", ["steps.jsonl", "metrics.json", "stdout.log"])
def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    if name != "steps.jsonl":
        (tmp_path / "steps.jsonl").symlink_to("/dev/zero")  # nor does a device
    assert program_progress(str(tmp_path)) == ()
    assert MegatronLog(str(tmp_path))() == ()
    refusal(tmp_path)


def test_steps_that_the_loss_scale_skipped_do_not_count(tmp_path: Path) -> None:
    line = " iteration {}/ 4 | elapsed time per iteration (ms): {} |{} number of skipped iterations:   {} |\n"
    skipped = [line.format(number, "100.0", "", 1) for number in (1, 2, 3, 4)]
    (tmp_path / "stdout.log").write_text("".join(skipped))
    with pytest.raises(FlagError, match="skipped"):
        ENGINE.read(COMMAND, ONE, str(tmp_path))
    done = [line.format(number, "200.0", " lm loss: 7.0 |", 0) for number in (3, 4)]
    (tmp_path / "stdout.log").write_text("".join([*skipped[:2], *done]))
    assert ENGINE.read(COMMAND, ONE, str(tmp_path)).step_times_s == (0.2, 0.2)


def test_only_a_command_is_stopped_after_its_steps() -> None:
    assert ENGINE.steps(COMMAND, "").limit == 5
    assert ENGINE.steps(TASK, "").limit is None
