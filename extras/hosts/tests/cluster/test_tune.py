"""`flag tune` over hosts, by ssh and by Slurm: faults, secrets and ports."""

import os
import stat
import time
from pathlib import Path

import pytest

from extras.hosts.tests.cluster.bed import SLURM, Bed, missing
from extras.hosts.tests.cluster.conftest import SECRET, Project, Tune
from extras.hosts.tests.cluster.test_faults import HOSTS_LOST, all_clean
from flagcore.launchers import guard
from tests.checks import books_balance, check_kept_once
from tests.product.cli.conftest import BEST

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_without_a_spare_the_search_continues_on_the_hosts_that_are_left(project: Project) -> None:
    bed = project.bed
    project.write_spec(
        sleeps=0.5, trials=3, repeats=1, batch=12, min_nodes=2, wait_for_hosts=5, nic_bytes_per_second=1e9
    )
    tune = Tune(project)
    assert tune.wait_for_a_trial(1) == [*bed.names]
    bed.poweroff("h3")
    result = tune.finish()
    assert tune.resumed == 0, tune.output()
    nodes = [(trial["shortened"] or {"nodes": 3})["nodes"] for trial in result["trials"]]
    assert (nodes[0], set(nodes[1:])) == (3, {2})
    assert result["best"]["shortened"]["nodes"] == 2
    assert result["best"]["measured"]["step_time_s"]["scaled_from"]
    assert books_balance(result)
    check_kept_once(project.run_dir, result)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["node", "tune"])
def test_a_tune_goes_on_in_another_allocation_of_slurm(loss: str, project: Project) -> None:
    if reason := missing(*SLURM):
        pytest.skip(reason)
    bed = project.bed
    if not bed.slurm:
        bed.start_slurm()
    project.write_spec(sleeps=3.0, launcher="slurm", trials=4, spares=1, wait_for_hosts=5)
    tune = Tune(project, "salloc", "--quiet", "--nodes=3", "--exclusive")
    hosts = tune.wait_for_a_trial(1)
    if loss == "node":  # Slurm ends the job, and the node registers again
        bed.run("h0", "scontrol", "update", f"nodename={hosts[1]}", "state=down", "reason=test")
        assert tune.process.wait() == HOSTS_LOST, tune.output()
    else:
        tune.kill()
    assert all_clean(bed, everything=True) == []
    tune.resume()
    result = tune.finish()
    assert tune.resumed == 1, tune.output()
    assert all_clean(bed, everything=True) == []
    assert result["best"]["candidate"].items() >= BEST.items()
    assert books_balance(result)
    check_kept_once(project.run_dir, result)


def test_secrets_stay_secret_and_agents_listen_on_no_port(project: Project) -> None:
    bed = project.bed
    before = {host: bed.listening(host) for host in bed.names}
    project.write_spec(sleeps=2.0, trials=1)
    tune = Tune(project)
    hosts = tune.wait_for_a_trial(0)
    while not all((project.run_dir / "trials/0/stdout.log").exists() and programs(bed, host) for host in hosts):
        time.sleep(0.1)
    for host in ("h0", *hosts):
        assert not [pid for pid in bed.processes(host) if SECRET.encode() in guard.read_proc(pid, "cmdline")]
    for host in hosts:
        assert [*(bed.root(host) / "tmp").glob("flagcore-*")]
        assert not [file for folder in ("tmp", "run") for file in shows_secret(bed.root(host) / folder)]
        assert bed.listening(host) == before[host]
    tune.finish()
    assert not shows_secret(project.run_dir)


def programs(bed: Bed, host: str) -> list[int]:
    return [pid for pid in bed.processes(host) if b"train.py" in guard.read_proc(pid, "cmdline")]


def shows_secret(folder: Path) -> list[Path]:
    """Return the files below a folder that every user can read, and that contain the secret.

    Mounted folders are those of this machine, such as the checkout.
    """
    found = []
    for where, names, files in os.walk(folder):
        status = os.stat(where)
        if status.st_dev != os.stat(folder).st_dev or not status.st_mode & stat.S_IXOTH:
            names.clear()
            continue
        for file in (Path(where, name) for name in files):
            if file.is_file() and file.stat().st_mode & stat.S_IROTH and SECRET in file.read_text(errors="ignore"):
                found.append(file)
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_search_without_its_host_for_longer_than_it_waits_ends_with_an_error_and_is_resumed(project: Project) -> None:
    (project.folder / "hosts.txt").write_text("h1 slots=1\nh2 slots=1\n")
    project.write_spec(sleeps=0.5, trials=5, spares=0, wait_for_hosts=10)
    tune = Tune(project)
    tune.wait_for_a_trial(1)
    project.bed.cut("h2")
    assert tune.process.wait() == 6, tune.output()
    assert "host h2: " in (output := tune.output())
    assert "resume with `flag tune" in output
    measured = project.result()["counts"]["measured"]
    assert measured >= 1
    assert all_clean(project.bed) == []
    project.bed.restore("h2")
    tune.resume()
    result = tune.finish()
    assert result["counts"]["measured"] == 5 > measured
    assert all_clean(project.bed, everything=True) == []
    assert books_balance(result)
    check_kept_once(project.run_dir, result)
