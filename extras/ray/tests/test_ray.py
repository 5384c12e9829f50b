"""The ray launcher on a real Ray cluster: a head and four nodes, each with a loopback address of its own."""

import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flagcore_hosts.hub import Hub
from flagcore_hosts.launcher import HostsLauncher
from flagcore_ray.launcher import LAUNCHER

from extras.hosts.tests.cluster.conftest import SPEC
from flagcore import api
from flagcore.contracts import Event
from flagcore.domain.launch import Launch
from flagcore.errors import NoDevice, UsageError
from tests.checks import ended, marked, within
from tests.product.cli.conftest import TRAIN

pytest.importorskip("ray")
pytestmark = pytest.mark.long

NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
ESCAPES = "(setsid sleep 100 &); trap '' TERM; sleep 100"
TUNER = """
import sys
from flagcore.domain.launch import Launch
from flagcore_ray.launcher import LAUNCHER
argv = ("sh", "-c", sys.argv[2])
mark = {"TEST_MARK": sys.argv[3]}
hosts = LAUNCHER.hold(LAUNCHER.find_hosts(2))
running = LAUNCHER.start(Launch(argv=argv, folder=sys.argv[1], hosts=hosts, environment=mark))
print("started", flush=True)
running.wait(60)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The nodes of a cluster by address. Its agents have their folders in `TMPDIR`."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("agents")))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray_cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        patch.setenv("RAY_ADDRESS", ray_cluster.address)
        size = 80_000_000
        yield {
            "cluster": ray_cluster,
            **{
                each: ray_cluster.add_node(num_cpus=1, node_ip_address=each, object_store_memory=size) for each in NODES
            },
        }
        ray_cluster.shutdown()


@pytest.fixture
def mark(cluster: dict[str, Any]) -> Iterator[str]:
    """A word in the environment of a trial's processes; none may be left, nor an agent's folder."""
    word = secrets.token_hex(8)
    yield word
    assert within(20, lambda: not marked(word) and not folders())


def folders() -> list[Path]:
    hubs = "flagcore-hub-*"
    return sorted(set(Path(os.environ["TMPDIR"]).glob("flagcore-*")) - set(Path(os.environ["TMPDIR"]).glob(hubs)))


def other(hub: Hub) -> HostsLauncher:
    """Return the launcher of another tune."""
    return HostsLauncher(name="ray", channel=hub.channel)


def test_two_tunes_share_the_cluster(cluster: dict[str, Any], mark: str, tmp_path: Path) -> None:
    second_hub = Hub("ray", "flagcore_ray.hub")
    host_launcher = LAUNCHER.hold(LAUNCHER.find_hosts(2))
    other_hosts = tuple(second_hub.ask(60, nodes=2, names=[])["hosts"])
    assert sorted((*host_launcher, *other_hosts)) == list(NODES)
    script = ("sh", "-c", "echo {node_rank} of {nnodes} at {master_addr}")
    runs = [
        launcher.start(Launch(argv=script, folder=str(tmp_path / name), hosts=hosts, environment={"TEST_MARK": mark}))
        for launcher, hosts, name in ((LAUNCHER, host_launcher, "one"), (other(second_hub), other_hosts, "two"))
    ]
    assert [found.code for found in map(ended, runs)] == [0, 0]
    for name, hosts in (("one", host_launcher), ("two", other_hosts)):
        lines = (tmp_path / name / "stdout.log").read_text().splitlines()
        assert sorted(lines) == [f"{rank} of 2 at {hosts[0]}" for rank in range(2)]
    second_hub.close()


def test_trials_run_beside_each_other_on_a_node(cluster: dict[str, Any], mark: str, tmp_path: Path) -> None:
    hosts, environment = LAUNCHER.hold(LAUNCHER.find_hosts(2))[:1], {"TEST_MARK": mark}
    with LAUNCHER.keep_agents():
        planned = [
            Launch(argv=("sleep", "1"), folder=str(tmp_path / name), hosts=hosts, environment=environment)
            for name in "ab"
        ]
        running = [LAUNCHER.start(each) for each in planned]
        assert [(found.code, found.ended_by) for found in map(ended, running)] == [(0, None)] * 2


def test_named_hosts_are_reserved_and_unknown_hosts_rejected(cluster: dict[str, Any]) -> None:
    assert LAUNCHER.hold(NODES[1:3]) == NODES[1:3]
    with pytest.raises(NoDevice, match=r"10\.0\.0\.1"):
        LAUNCHER.hold(("10.0.0.1",))
    with pytest.raises(NoDevice, match="= 5"):
        LAUNCHER.hold(LAUNCHER.find_hosts(5))


def test_nothing_is_left_when_flagcore_is_killed(cluster: dict[str, Any], mark: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", TUNER, str(tmp_path / "trial"), ESCAPES, mark]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as tuner:
        assert tuner.stdout
        assert tuner.stdout.readline() == b"started\n"
        assert marked(mark)
        tuner.send_signal(signal.SIGKILL)
    assert len(LAUNCHER.hold(LAUNCHER.find_hosts(4))) == 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("spares", [1, 0])
def test_another_node_replaces_one_that_dies(cluster: dict[str, Any], tmp_path: Path, spares: int) -> None:
    """A spare does. If there is none, Ray moves the reservation to a node that is free."""
    if not spares:
        cluster["127.0.0.6"] = cluster["cluster"].add_node(num_cpus=1, node_ip_address="127.0.0.6")
    (tmp_path / "train.py").write_text(TRAIN)
    control = {"max_trials": 3, "train_iters": 3, "repeats": 0, "compare_hosts": False}
    spec = {
        **SPEC,
        "cluster": {"chip": "cpu", "nodes": 2, "devices_per_node": 1, "memory_per_device": "512MiB", "spares": spares},
        "train": {**SPEC["train"], "command": [sys.executable, "-S", "-E", str(tmp_path / "train.py")]},
        "auto_tuner": {**SPEC["auto_tuner"], "launcher": "ray", "control": control},
        "envs": {"TRAIN_SLEEPS": "0.3"},
    }
    lost: list[str] = []

    def on_event(event: Event) -> None:
        if event.kind == "trial_started" and event.trial.number == 1:
            lost.append(json.loads((tmp_path / "run/trials/0/launch.json").read_text())["hosts"][0])
            cluster["cluster"].remove_node(cluster[lost[0]], allow_graceful=False)

    api.tune(spec, run_dir=tmp_path / "run", on_event=on_event)
    hosts = [json.loads(path.read_text())["hosts"] for path in sorted(tmp_path.glob("run/trials/*/launch.json"))]
    trials = json.loads((tmp_path / "run/result.json").read_text())["trials"]
    assert {trial["state"] for trial in trials} == {"measured"}
    assert lost[0] not in hosts[-1]
    assert len(hosts[-1]) == 2


STEPS = """\
step=$(cat saved 2> /dev/null || echo 0)
while [ $step -lt 20 ]; do
  step=$((step + 1)); echo "iteration $step of $NODE_RANK"
  [ $NODE_RANK = 0 ] && echo $step > new && mv new saved
  sleep 0.5
done || :
"""


@pytest.mark.timeout(300)
def test_a_job_goes_on_after_its_node_is_lost(
    cluster: dict[str, Any], mark: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    argv = ("sh", "-c", STEPS)
    job = Launch(argv=argv, folder=str(tmp_path / "job"), directory=str(tmp_path), hosts=("any-1", "any-2"))
    job = dataclasses.replace(job, environment={"TEST_MARK": mark})
    with pytest.raises(UsageError, match="replaces lost hosts itself"):
        LAUNCHER.run_job(job, {}, 2, ["127.0.0.5"], None)
    lost = list[str]()

    def lose() -> None:
        assert within(60, (tmp_path / "saved").exists)
        time.sleep(2.0)
        lost.append(json.loads((tmp_path / "job" / "launch.json").read_text())["hosts"][1])
        cluster["cluster"].remove_node(cluster.pop(lost[0]), allow_graceful=False)

    losing = threading.Thread(target=lose)
    losing.start()
    assert LAUNCHER.run_job(job, {}, 2, [], None) == 0
    losing.join()
    hosts = json.loads((tmp_path / "job" / "launch.json").read_text())["hosts"]
    assert (len(hosts), lost[0] in hosts) == (2, False)
    assert "training continues at step" in caplog.text
    cluster[lost[0]] = cluster["cluster"].add_node(num_cpus=1, node_ip_address=lost[0], object_store_memory=80_000_000)


@pytest.mark.parametrize("gracefully", [True, False])
def test_a_node_that_dies_is_a_lost_host(cluster: dict[str, Any], mark: str, tmp_path: Path, gracefully: bool) -> None:
    hosts, environment = LAUNCHER.hold(LAUNCHER.find_hosts(2)), {"TEST_MARK": mark}
    launch = Launch(argv=("sh", "-c", ESCAPES), folder=str(tmp_path), hosts=hosts, environment=environment)
    running, lost = LAUNCHER.start(launch), hosts[1]
    cluster["cluster"].remove_node(cluster[lost], allow_graceful=gracefully)
    exit_record = ended(running)
    assert exit_record.ended_by == "host"
    assert exit_record.detail.startswith(lost)


def test_without_a_cluster_the_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    hub = Hub("ray", "flagcore_ray.hub")
    with pytest.raises(NoDevice, match=r"127\.0\.0\.1:1"):
        hub.ask(60, nodes=1, names=[])
