"""Jobs that go on after failures. A shell here stands for the channel to each host; agents and guards are real."""

import base64
import json
import os
import time
from pathlib import Path

import pytest
from flagcore_hosts import agent
from flagcore_hosts import job as jobs
from flagcore_hosts.job import SILENCES, STALL_SECONDS, Progress, Silence, no_checkpoints, run_job
from flagcore_hosts.launcher import HERE, HostsLauncher

from extras.hosts.tests.test_trials import launcher, mark, processes
from flagcore.domain.launch import Launch
from flagcore.errors import HostLost, UsageError

__all__ = ["mark"]

TRAINING = """\
step=$(cat saved 2> /dev/null || echo 0)
while [ $step -lt 9 ]; do
  step=$((step + 1)); echo "iteration $step/9 on $NODE_RANK"
  [ $((step % 3)) = 0 ] && [ $NODE_RANK = 0 ] && echo $step > saved
  FAILURE
done
"""
KILLS_ITSELF = "[ $step = 5 ] && mkdir once 2> /dev/null && kill -9 $$"
LOSES_ITS_HOST = """\
[ $NODE_RANK = 1 ] && mkdir once 2> /dev/null && kill $(awk '{print $4}' /proc/$PPID/stat)
  sleep 0.1"""
"""The parent of the first process is its guard, and the guard's parent is the agent of the host, which Slurm ends."""


def training(folder: Path, failure: str, hosts: tuple[str, ...]) -> Launch:
    (folder / "job").mkdir()
    script = TRAINING.replace("FAILURE", failure)
    return Launch(argv=("sh", "-c", script), folder=str(folder / "job"), directory=str(folder), hosts=hosts)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages for the user."""
    lines = list[str]()
    monkeypatch.setattr(jobs, "warn", lines.extend)
    return lines


@pytest.mark.slow
def test_a_job_starts_again_from_its_checkpoint_and_the_lost_steps_are_counted(
    tmp_path: Path, mark: str, messages: list[str], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run_job(launcher(), training(tmp_path, KILLS_ITSELF, ("a",)), {}, restarts=2) == 0
    steps = [int(line.split(b"/")[0].split()[1]) for line in capfdbinary.readouterr().out.splitlines()]
    assert steps == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9]
    assert [line for line in messages if "steps lost: 2" in line]
    assert not processes(mark)


@pytest.mark.slow
def test_a_job_that_hangs_is_ended_and_goes_on(tmp_path: Path, mark: str, messages: list[str]) -> None:
    hangs = "[ $step = 5 ] && mkdir once 2> /dev/null && while :; do sleep 1; done || :"
    assert run_job(launcher(), training(tmp_path, hangs, ("a",)), {}, restarts=1, stall_s=2.0) == 0
    assert [line for line in messages if "--stall" in line], messages
    assert [line for line in messages if "steps lost: 2" in line], messages


@pytest.mark.slow
def test_a_job_that_hangs_without_restarts_left_has_failed(tmp_path: Path, mark: str, messages: list[str]) -> None:
    job = training(tmp_path, "sleep 1000 & wait", ("a",))
    assert run_job(launcher(), job, {}, restarts=1, stall_s=0.7) == 128 + 15


def test_the_limit_of_a_silence_grows_with_silences_and_after_starts_without_a_step() -> None:
    silence = Silence()
    assert silence.limit_s == STALL_SECONDS
    silence.heard_at = time.monotonic() - 600.0
    assert silence.lasts(heard=False) >= 600.0
    assert silence.lasts(heard=True) == 0.0
    assert silence.limit_s == pytest.approx(SILENCES * 600.0, rel=0.01)
    silence = Silence(5.0, factor=2.0)
    assert silence.limit_s == 10.0


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_lost_host(tmp_path: Path, mark: str, messages: list[str]) -> None:
    assert run_job(launcher(), training(tmp_path, LOSES_ITS_HOST, ("a", "b")), {}, 1, ["me@c"]) == 0
    assert list(json.loads((tmp_path / "job" / "launch.json").read_text())["hosts"]) == ["a", "c"]
    assert [line for line in messages if "b -> c" in line]


@pytest.mark.slow
def test_a_job_without_restarts_left_ends_with_its_failure(tmp_path: Path, mark: str, messages: list[str]) -> None:
    assert run_job(launcher(), training(tmp_path, "kill -9 $$", ("a",)), {}, restarts=1) == 128 + 9
    assert messages[-1].startswith("flag: no restart is left of 1")
    (tmp_path / "lost").mkdir()
    with pytest.raises(HostLost, match="host b"):
        run_job(launcher(), training(tmp_path / "lost", LOSES_ITS_HOST, ("a", "b")), {}, restarts=0)


def test_a_line_that_is_written_while_a_log_is_read_is_copied_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "stderr.log"
    log.write_text("one")
    before = os.lstat(log)
    log.write_text("one, two")
    mirror = agent.Mirror(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lambda path: before)
        pieces = mirror.pieces(agent.PIECE_BYTES)
    pieces += mirror.pieces(agent.PIECE_BYTES)
    assert [(each["at"], base64.b64decode(each["data"])) for each in pieces] == [(0, b"one"), (3, b", two")]


def test_restarts_by_torchrun_are_seen_in_its_log_on_one_host_only() -> None:
    failed = b"E1129 torch/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: /usr/bin/python\n"
    alone, several = Progress(), Progress(is_alone=False)
    for progress in (alone, several):
        assert [
            *progress.read(0, b" [a] iteration       47/     160 | elapsed time per iteration (ms): 3\nsaved iter")
        ] == []
        lines = [*progress.read(1, failed)]
        assert len(lines) == (progress is alone)
        assert [*progress.read(0, b"ation 40\n")] == []
    assert (alone.last, alone.in_place, several.in_place) == (47, 1, 0)
    assert alone.failed_at is not None
    alone.failed_at -= 20
    (line,) = alone.read(0, b"step: 41  loss: 3.5\n")
    assert (alone.last, alone.repeated, alone.failed_at) == (41, 7, None), line
    assert len([*alone.read(1, failed)]) == 1
    alone.end(1)
    assert alone.in_place == 1, "torchrun started nothing again after its last failure"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("train.py --lr 1e-3 --save-interval 5 --gradient-checkpointing", "--save, --load"),
        ("pretrain_gpt.py --save runs --save-interval 5", "--load"),
        ("pretrain_gpt.py --save runs --load runs", ""),
        ("train.py --output_dir out", ""),
        ("train.py --checkpoint.enable", ""),
        ("train.py --ckpt-dir=x", ""),
        ("bash plain.sh --async-save --save-interval 5", "--save, --load"),
        ("bash saves.sh", ""),
        ("llamafactory-cli train job.yaml", ""),
    ],
)
def test_a_command_that_saves_nothing_gets_advice(command: str, options: str, tmp_path: Path) -> None:
    (tmp_path / "plain.sh").write_text("torchrun train.py\n")
    (tmp_path / "saves.sh").write_text("torchrun train.py --save out --load out\n")
    (tmp_path / "job.yaml").write_text("output_dir: out\n")
    advice = no_checkpoints(Launch(argv=tuple(command.split()), folder="", directory=str(tmp_path)))
    assert advice.endswith(f"add {options}") if options else advice == ""


@pytest.mark.parametrize(
    ("spares", "restarts", "started_by", "problem"),
    [
        (["c"], 0, launcher(), "--restarts N"),
        (["b"], 1, launcher(), "another one"),
        (["c", "c"], 1, launcher(), "another one"),
        (["c"], 1, HERE, "this machine alone"),
    ],
)
def test_spares_that_cannot_be_used_are_refused(
    spares: list[str], restarts: int, started_by: HostsLauncher, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        run_job(started_by, Launch(argv=("true",), folder=os.devnull, hosts=("a", "b")), {}, restarts, spares)
