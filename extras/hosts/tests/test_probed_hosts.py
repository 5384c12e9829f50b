"""Probes of ranks on several hosts."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from flagcore_hosts.connection import agent_command
from flagcore_hosts.launcher import HostsLauncher

from flagcore.domain.launch import Launch
from flagcore.domain.trial import Probe, TrialState
from flagcore.errors import HostLost
from flagcore.tuner.probe import probe
from tests import tasks
from tests.tuner.test_probe import CANDIDATE, LIMIT, METRICS, TASK, Rehearsal


@pytest.mark.slow
def test_ranks_run_on_separate_hosts_and_a_lost_host_proves_nothing(tmp_path: Path) -> None:
    def channel(host: str) -> list[str]:
        return ["sh", "-c", agent_command() if host != "lost" else "cat > /dev/null & sleep 1; exit 1"]

    def on(*hosts: str) -> Probe:
        cluster = replace(TASK.spec.cluster, hosts=hosts, nodes=2)
        task = replace(TASK, spec=replace(TASK.spec, cluster=cluster, launcher="shell"))
        launcher = HostsLauncher(name="shell", channel=channel)
        program = f"open({str(tmp_path / 'metrics')!r}); open('metrics.json', 'w').write({METRICS!r})"
        (tmp_path / "metrics").touch()
        engine = Rehearsal(lambda rank: program)
        engine.probe_launch = lambda platform, candidate, rank, folder, device=0: Launch(  # type: ignore[method-assign]
            argv=(sys.executable, "-c", program), folder=folder
        )
        folder = str(tmp_path / hosts[-1])
        return probe(
            tasks.platform(task, engine=engine), launcher, CANDIDATE, folder, LIMIT, (0, 1, 2), finish=False, devices=1
        )

    found = on("a", "b")
    assert [(rank.state, rank.inconclusive) for rank in found.ranks] == [(TrialState.MEASURED, False)] * 3
    assert {rank.device for rank in found.ranks} == {0, 1}
    with pytest.raises(HostLost):  # the search waits for the host, and probes the candidate again
        on("a", "lost")
