"""Pods that join a tune. A process on this machine stands for each pod; hub, agents and guards are real."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flagcore_hosts.hub import Hub
from flagcore_kubernetes.join import TOKEN, proof
from flagcore_kubernetes.launcher import HOSTS, HUB, LAUNCHER, PORT_VARIABLE

from flagcore.api.commands.doctor import host_check
from flagcore.contracts import device_use
from flagcore.domain.launch import Launch
from flagcore.domain.spec import ClusterSpec
from flagcore.errors import NoDevice
from flagcore.launchers import guard
from flagcore.launchers.network import free_port
from tests.launchers.processes import MARK, ended, marked, within

pytestmark = [pytest.mark.slow, pytest.mark.spread]

PODS = ("localhost", "pod-1.tune", "pod-2.tune")
TUNER = """
import sys
from flagcore.domain.launch import Launch
from flagcore_kubernetes.launcher import LAUNCHER
argv = ("sh", "-c", "(setsid sleep 100 &); trap '' TERM; sleep 100")
running = LAUNCHER.start(Launch(argv=argv, folder=sys.argv[1], hosts=LAUNCHER.hold(LAUNCHER.find_hosts(1))))
print("started", flush=True)
running.wait(60)
"""
Join = Callable[[str], "subprocess.Popen[bytes]"]
TMP = "tmp" + 100 * "p"
"""With this TMPDIR, paths are longer than that of a socket may be."""


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Join]:
    """Start a pod that joins. At the end no process of the test is left, nor a folder of an agent."""
    mark, pods = secrets.token_hex(8), list["subprocess.Popen[bytes]"]()
    (tmp_path / TMP).mkdir()
    values = {MARK: mark, "TMPDIR": str(tmp_path / TMP), TOKEN: secrets.token_hex(16)}
    for name, value in {**values, HOSTS: " ".join(PODS), PORT_VARIABLE: str(free_port())}.items():
        monkeypatch.setenv(name, value)

    def start(name: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "flagcore_kubernetes.join", f"localhost:{os.environ[PORT_VARIABLE]}", name]
        pods.append(subprocess.Popen(argv, stderr=subprocess.DEVNULL))
        return pods[-1]

    yield start
    HUB.close()
    for pod in pods:
        pod.kill()
        pod.wait()
    assert within(20, lambda: not processes())
    assert list((tmp_path / TMP).iterdir()) == []


def processes() -> set[int]:
    return marked(os.environ[MARK]) - {os.getpid()}


def launch(script: str, folder: Path, hosts: tuple[str, ...] = PODS) -> Launch:
    return Launch(argv=("sh", "-c", script), folder=str(folder), hosts=hosts)


def test_trials_run_one_after_the_other_in_all_pods(join: Join, tmp_path: Path) -> None:
    pods = [join("pod-1"), join("pod-2")]
    assert LAUNCHER.hold(LAUNCHER.find_hosts(1)) == PODS
    script = 'echo "{node_rank} of {nnodes} at {master_addr}, token ${FLAGCORE_TOKEN:-hidden}"'
    for number in range(2):
        exit_record = ended(LAUNCHER.start(launch(script, tmp_path / str(number))))
        assert (exit_record.code, exit_record.ended_by) == (0, None)
        lines = (tmp_path / str(number) / "stdout.log").read_text().splitlines()
        assert sorted(lines) == [f"{rank} of 3 at localhost, token hidden" for rank in range(3)]
    assert all(pod.poll() is None for pod in pods)
    assert not any(os.environ[TOKEN].encode() in guard.read_proc(pid, "cmdline") for pid in processes())


def test_trials_run_beside_each_other_in_a_pod(join: Join, tmp_path: Path) -> None:
    join("pod-1"), join("pod-2")
    pod = LAUNCHER.hold(PODS)[1:2]
    with LAUNCHER.keep_agents():
        running = [LAUNCHER.start(launch("sleep 1", tmp_path / str(number), pod)) for number in range(3)]
        assert [(found.code, found.ended_by) for found in map(ended, running)] == [(0, None)] * 3


def test_the_devices_of_pods_are_read_beside_trials(join: Join, tmp_path: Path) -> None:
    join("pod-1"), join("pod-2")
    check = host_check((), None, compare=False)
    with LAUNCHER.use_hosts(ClusterSpec(hosts=PODS, nodes=len(PODS)), check) as hosts:
        reader = hosts.telemetry(hosts.devices[-1])
        assert ended(LAUNCHER.start(launch("true", tmp_path / "trial", hosts.names))).code == 0
        assert reader
        assert within(30, lambda: device_use(reader).free_bytes)


def test_a_pod_that_is_killed_is_lost_and_joins_again(join: Join, tmp_path: Path) -> None:
    _, second = join("pod-1"), join("pod-2")
    trial = LAUNCHER.start(launch("sleep 60", tmp_path / "one", LAUNCHER.hold(PODS)))
    for pid in [pid for pid in processes() if (guard.read_ids(pid) or (0,))[0] == second.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    second.kill()
    exit_record = ended(trial)
    assert (exit_record.ended_by, exit_record.detail.partition(":")[0]) == ("host", PODS[2])
    join("pod-2")
    assert ended(LAUNCHER.start(launch("true", tmp_path / "two"))).code == 0
    for disk in set((tmp_path / TMP).glob("flagcore-*")) - set((tmp_path / TMP).glob("flagcore-hub-*")):
        shutil.rmtree(disk)  # a pod's disk is gone with it


def test_nothing_is_left_when_the_controller_is_killed(join: Join, tmp_path: Path) -> None:
    pods = {join("pod-1").pid, join("pod-2").pid}
    with subprocess.Popen([sys.executable, "-c", TUNER, str(tmp_path / "trial")], stdout=subprocess.PIPE) as tuner:
        assert tuner.stdout
        assert tuner.stdout.readline() == b"started\n"
        assert len(processes()) > 12
        tuner.kill()
    assert within(20, lambda: processes() == pods)
    assert LAUNCHER.hold(PODS) == PODS


@pytest.mark.parametrize("key", [b"another secret, as long", None])
def test_a_pod_without_the_secret_is_refused(join: Join, key: bytes | None) -> None:
    hub = Hub("kubernetes", "flagcore_kubernetes.hub")
    port = int(os.environ[PORT_VARIABLE])
    hub.ask(10, names=[], port=port, seconds=5.0)
    with socket.create_connection(("localhost", port)) as stranger, stranger.makefile("rwb") as stream:
        their_nonce = stream.readline().decode().strip()
        answer = {"host": "pod-1", "nonce": "", "proof": proof(key, "host", their_nonce, "", "pod-1")} if key else [1]
        stream.write(json.dumps(answer).encode() + b"\n")
        stream.flush()
        assert stream.read() == b""
    hub.close()


def test_a_job_without_a_secret_is_refused(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(NoDevice, match=TOKEN):
        LAUNCHER.hold(PODS)
    assert join("pod-1").wait(20) == 1
    join_at = [sys.executable, "-m", "flagcore_kubernetes.join"]
    assert subprocess.run([*join_at, "localhost:port"], env={**os.environ, TOKEN: "x" * 20}).returncode == 1
    assert subprocess.run(join_at).returncode == 1


def test_pods_that_do_not_join_are_named(join: Join) -> None:
    hub = Hub("kubernetes", "flagcore_kubernetes.hub")
    with pytest.raises(NoDevice, match="pod-2"):
        hub.ask(10, names=["pod-2"], port=int(os.environ[PORT_VARIABLE]), seconds=0.2)
