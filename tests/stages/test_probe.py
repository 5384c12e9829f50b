"""Ranks side by side: processes of their own, one a device, all of which end when one fails or the user interrupts."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flagcore.contracts import Platform
from flagcore.domain.candidate import Candidate
from flagcore.domain.chip import Device
from flagcore.domain.engine import EngineSupport
from flagcore.domain.launch import Launch
from flagcore.domain.probe import Probe
from flagcore.domain.trial import TimeLimit, TrialState
from flagcore.engines.megatron.adapter import Megatron
from flagcore.launchers.connection import agent_command
from flagcore.launchers.hosts import HostsLauncher
from flagcore.launchers.local import LAUNCHER
from flagcore.stages.discover import parallel_probe_ranks
from flagcore.stages.probe import probe
from tests import small
from tests.engines.megatron.test_probing import METRICS

TASK = small.task(devices=4)
CANDIDATE = small.candidate(pipeline_model_parallel_size=4, data_parallel_size=1)
RANKS = (0, 1, 2, 3)
PROGRAM = """
import json, os, sys, time
folder, rank, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
open(os.path.join(folder, "..", f"started-{rank}"), "w").write(str(os.getpid()))
def started():
    return sum(name.startswith("started-") for name in os.listdir(os.path.join(folder, "..")))
if what == "fail":
    while started() < 2: time.sleep(0.01)
    sys.exit("no such luck")
if what == "stay": time.sleep(600)
while started() < int(what): time.sleep(0.01)
open(os.path.join(folder, "metrics.json"), "w").write(sys.argv[4])
"""


class Rehearsal(Megatron):
    """Starts a small program in place of each rank, as `part` says: how many must have started, stay, or fail."""

    def __init__(self, part: Callable[[int], str]) -> None:
        self.part = part
        self.devices: dict[int, int] = {}

    def probe_launch(self, platform: Platform, candidate: Candidate, rank: int, folder: str, device: int = 0) -> Launch:
        self.devices[rank] = device
        argv = (sys.executable, "-c", PROGRAM, folder, str(rank), self.part(rank), json.dumps(METRICS))
        return Launch(argv=argv, folder=folder)


LIMIT = TimeLimit(seconds=60.0, because="a test")


def play(
    folder: Path, part: Callable[[int], str], devices: int, on_rank: Callable[[int], object] = lambda rank: None
) -> tuple[Probe, Rehearsal]:
    workload = Rehearsal(part)
    found = probe(
        small.platform(TASK), workload, LAUNCHER, CANDIDATE, str(folder), LIMIT, RANKS, on_rank,
        finish=False, devices=devices,
    )  # fmt: skip
    return found, workload


def have_ended(folder: Path, ranks: tuple[int, ...]) -> bool:
    """Whether the processes of some ranks end within seconds."""
    ends = time.monotonic() + 10
    pids = [int((folder / f"started-{rank}").read_text()) for rank in ranks if (folder / f"started-{rank}").exists()]
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < ends:
        time.sleep(0.02)
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_ranks_are_probed_in_parallel_on_separate_devices(tmp_path: Path) -> None:
    found, workload = play(tmp_path, lambda rank: "4", devices=4)
    assert [rank.rank for rank in found.ranks] == list(RANKS)
    assert {rank.state for rank in found.ranks} == {TrialState.MEASURED}
    assert sorted(workload.devices.values()) == [0, 1, 2, 3]
    assert found.duration_s == max(rank.duration_s for rank in found.ranks)


def test_with_fewer_devices_than_ranks_a_rank_uses_the_first_free_device(tmp_path: Path) -> None:
    found, workload = play(tmp_path, lambda rank: "4" if rank == 0 else "1", devices=2)
    assert [rank.state for rank in found.ranks] == [TrialState.MEASURED] * 4
    assert workload.devices == {0: 0, 1: 1, 2: 1, 3: 1}
    first, *others = (rank.duration_s for rank in found.ranks)
    assert found.duration_s == pytest.approx(max(first, sum(others)))


def test_a_failing_rank_ends_the_others_and_is_reported(tmp_path: Path) -> None:
    found, _ = play(tmp_path, lambda rank: "fail" if rank == 1 else "stay", devices=2)
    assert [(rank.rank, rank.state) for rank in found.ranks] == [(1, TrialState.FAILED)]
    assert "no such luck" in (found.ranks[0].reason or "")
    assert have_ended(tmp_path, (0, 1))
    assert not (tmp_path / "started-2").exists()


def test_the_reason_of_a_failed_probe_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUB_TOKEN", "no such luck")
    found, _ = play(tmp_path, lambda rank: "fail" if rank == 1 else "stay", devices=2)
    assert found.ranks[0].state is TrialState.FAILED
    assert "no such luck" not in (found.ranks[0].reason or "")


@pytest.mark.slow
def test_an_interrupt_ends_all_probes_and_keeps_the_finished_ones(tmp_path: Path) -> None:
    def interrupt(rank: int) -> None:
        if rank == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(tmp_path / "first", lambda rank: "3" if rank == 0 else "stay", devices=3, on_rank=interrupt)
    assert have_ended(tmp_path / "first", RANKS)
    started: list[int] = []
    workload = Rehearsal(lambda rank: "1")
    found = probe(
        small.platform(TASK), workload, LAUNCHER, CANDIDATE, str(tmp_path / "second"), LIMIT, RANKS, started.append,
        earlier=[str(tmp_path / "first")], devices=3,
    )  # fmt: skip
    assert started == [1, 2, 3]
    assert [rank.state for rank in found.ranks] == [TrialState.MEASURED] * 4


def test_probes_run_in_parallel_unless_devices_are_shared_or_selected() -> None:
    first = tuple(Device(index=at, chip="test-chip", memory_bytes=1) for at in range(3))
    other = Device(index=3, chip="another", memory_bytes=1)
    plain = small.platform(TASK)
    assert parallel_probe_ranks(plain, (*first, other)) == 3
    shared = EngineSupport(support=plain.support.support, shared_devices=True)
    assert parallel_probe_ranks(small.platform(TASK, support=shared), first) == 1
    assert parallel_probe_ranks(small.platform(TASK, environment={"ANY_VISIBLE_DEVICES": "1"}), first) == 1
    assert parallel_probe_ranks(plain, ()) == 1


@pytest.mark.slow
def test_ranks_run_on_separate_hosts_and_a_lost_host_proves_nothing(tmp_path: Path) -> None:
    def channel(host: str) -> list[str]:
        return ["sh", "-c", agent_command() if host != "lost" else "cat > /dev/null & sleep 1; exit 1"]

    def on(*hosts: str) -> Probe:
        cluster = replace(TASK.spec.cluster, hosts=hosts, nodes=2)
        task = replace(TASK, spec=replace(TASK.spec, cluster=cluster, launcher="shell"))
        launcher = HostsLauncher(name="shell", channel=channel, reached=set(hosts))
        program = f"open({str(tmp_path / 'metrics')!r}); open('metrics.json', 'w').write({json.dumps(METRICS)!r})"
        (tmp_path / "metrics").touch()
        workload = Rehearsal(lambda rank: program)
        workload.probe_launch = lambda platform, candidate, rank, folder, device=0: Launch(  # type: ignore[method-assign]
            argv=(sys.executable, "-c", program), folder=folder
        )
        folder = str(tmp_path / hosts[-1])
        return probe(
            small.platform(task), workload, launcher, CANDIDATE, folder, LIMIT, (0, 1, 2), finish=False, devices=1
        )

    found = on("a", "b")
    assert [(rank.state, rank.inconclusive) for rank in found.ranks] == [(TrialState.MEASURED, False)] * 3
    assert {rank.device for rank in found.ranks} == {0, 1}
    lost = [rank for rank in on("a", "lost").ranks if rank.state is TrialState.FAILED]
    assert [(rank.inconclusive, "lost" in (rank.reason or "")) for rank in lost] == [(True, True)]
