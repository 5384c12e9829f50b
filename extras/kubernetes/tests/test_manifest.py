"""Kubernetes manifests, checked against the schemas of their kinds as a strict API server does. Pods that join a tune.
A process on this machine stands for each pod; hub, agents and guards are real."""

import contextlib
import gzip
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flagcore_hosts.hub import Hub
from flagcore_kubernetes.command import manifest_of_spec
from flagcore_kubernetes.job import KINDS
from flagcore_kubernetes.join import TOKEN, proof
from flagcore_kubernetes.launcher import HOSTS, HUB, LAUNCHER, PORT_VARIABLE

from extras.hosts.tests.cluster.bed import HOST, need
from flagcore.api.commands.doctor import host_check
from flagcore.contracts import device_use
from flagcore.contracts.exchange import DEVICES_OF_HOST, shell_quoted
from flagcore.domain.launch import Launch
from flagcore.domain.spec import ClusterSpec
from flagcore.errors import NoDevice, SpecError, UsageError
from flagcore.launchers import guard
from flagcore.launchers.network import free_port
from flagcore.plugins import launcher
from tests.checks import TEST_MARK, ended, marked, within
from tests.product.tasks import SHAPE

pytestmark = pytest.mark.spread

CRDS = json.loads(gzip.decompress((Path(__file__).parent / "crds.json.gz").read_bytes()))
"""The `openAPIV3Schema` of custom resource definitions, without descriptions (all Apache-2.0): JobSet (kubernetes-sigs/
jobset `config/components/crd/bases` @08dfbdfd), Job (volcano-sh/volcano `config/crd/volcano/bases` @ed72c7c8),
LeaderWorkerSet (kubernetes-sigs/lws `config/crd/bases` @060ab4da), and PyTorchJob (kubeflow/training-operator
`manifests/base/crds` at v1.9.0)."""
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}
SPEC: dict[str, Any] = {
    "model": SHAPE,
    "cluster": {"chip": "cpu", "nodes": 3, "devices_per_node": 2},
    "train": {"engine": "megatron", "seq_length": 128, "global_batch_size": 12, "precision": "fp32"},
    "auto_tuner": {"launcher": "kubernetes"},
}


def problems(schema: dict[str, Any], value: Any, at: str = "") -> Iterator[str]:
    """Yield what a strict API server refuses: wrong types, values and missing or unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        yield from [] if isinstance(value, (int, str)) else [f"{at}: neither number nor text"]
        return
    kind = TYPES[schema["type"]] if "type" in schema else object
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        yield f"{at}: not {schema['type']}"
    elif isinstance(value, dict):
        known, extra = schema.get("properties", {}), schema.get("additionalProperties")
        yield from (f"{at}: lacks {name}" for name in schema.get("required", ()) if name not in value)
        for name, each in value.items():
            if name in known or extra:
                yield from problems(known.get(name, extra), each, f"{at}.{name}")
            elif not schema.get("x-kubernetes-preserve-unknown-fields") and at != ".metadata":
                yield f"{at}: has no {name}"
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from problems(schema["items"], each, f"{at}[{number}]")
    elif value not in schema.get("enum", [value]) or not re.search(schema.get("pattern", ""), str(value)):
        yield f"{at}: {value!r}"


def checked(made: dict[str, Any]) -> dict[str, Any]:
    assert list(problems(CRDS[f"{made['apiVersion']} {made['kind']}"], made)) == []
    return made


ALLOWED_VOLUMES = {"name", "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
ALLOWED_VOLUMES |= {"projected", "secret"}


def require_restricted(manifest: Any) -> None:
    """Check the pods of a manifest as the Pod Security Standard `restricted` does (Kubernetes 1.33)."""
    for pod in (each for each in found(manifest, "spec") if "containers" in each):
        context = pod["securityContext"]
        assert context["runAsNonRoot"]
        assert context["runAsUser"] != 0
        assert context["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert all(set(volume) <= ALLOWED_VOLUMES for volume in pod.get("volumes", ()))
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert all("hostPort" not in port for port in container.get("ports", ()))


def found(made: Any, key: str) -> list[Any]:
    """Return all values of a key, at any depth."""
    if isinstance(made, list):
        return [each for part in made for each in found(part, key)]
    if not isinstance(made, dict):
        return []
    return [each for name, part in made.items() for each in ([part] if name == key else found(part, key))]


def written(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "My Job.yaml"
    file.write_text(json.dumps({**SPEC, **changes}))
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_a_tune_has_one_pod_that_tunes_and_others_that_join(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {"settings": ["train.global_batch_size=24"], "chip": "cpu"}
    manifest, notes = manifest_of_spec(
        written(tmp_path), kind=kind, image="image:1", volume=f"data:{tmp_path}", **changes
    )
    tunes, joins = found(checked(manifest), "containers")
    (host, *_) = tunes[0]["env"][0]["value"].split()
    assert tunes[0]["command"][-1] == (
        f"exec flag tune '{tmp_path}/My Job.yaml' --set train.global_batch_size=24 --chip cpu"
    )
    assert joins[0]["command"][-1].endswith(f"join {host}")
    assert tunes[0]["env"] == joins[0]["env"]
    assert tunes[0]["resources"]["limits"] == {"cpu": 2}
    assert found(manifest, "claimName") == ["data", "data"]
    assert manifest["metadata"]["name"] == "my-job"
    assert found(manifest, "secretKeyRef")[0]["name"] in notes[0]
    assert len(notes) == 1


def codes_without_a_restart(kind: str, first: dict[str, Any]) -> list[int]:
    if kind == "jobset":
        return list(found(first, "podFailurePolicy")[0]["rules"][0]["onExitCodes"]["values"])
    if kind == "volcano":
        return [policy["exitCode"] for policy in first["policies"] if policy.get("action") == "AbortJob"]
    return list(range(1, 128)) if first["restartPolicy"] == "ExitCode" else []


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_obeys_the_rules_of_its_cluster(tmp_path: Path, kind: str) -> None:
    pods = {"tolerations": [{"key": "x", "operator": "Exists"}]}
    pods |= {"containers": [{"resources": {"limits": {"memory": "64Gi"}, "requests": {"memory": "8Gi", "cpu": 4}}}]}
    pods["volumes"] = [{"name": "shm", "emptyDir": {"sizeLimit": "9Gi"}}]
    (tmp_path / "pods.yaml").write_text(json.dumps(pods))
    options = {"queue": "q1", "user": "1000", "pods": str(tmp_path / "pods.yaml")}
    manifest, _notes = manifest_of_spec(written(tmp_path), kind=kind, image="image:1", **options)
    require_restricted(checked(manifest))
    (first, *_others) = (found(manifest, "replicatedJobs") + found(manifest, "tasks") or [None])[0] or [
        found(manifest, "Master")[0]
    ]
    assert {2, 3, 4, 5} <= set(codes_without_a_restart(kind, first))
    assert "q1" in (manifest["spec"].get("queue"), *manifest["metadata"].get("labels", {}).values())
    assert found(manifest, "tolerations") == [pods["tolerations"]] * 2
    assert found(manifest, "limits") == [{"cpu": 2, "memory": "64Gi"}] * 2
    assert found(manifest, "sizeLimit") == ["9Gi"] * 2
    assert found(manifest, "automountServiceAccountToken") == [False, False]
    assert found(manifest, "ttlSecondsAfterFinished")


@pytest.mark.parametrize("kind", KINDS)
def test_one_node_is_one_pod_without_a_secret(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path, cluster={"chip": "cpu", "nodes": 1, "devices_per_node": 2})
    manifest, notes = manifest_of_spec(file, kind=kind, image="image:1", name="one")
    assert len(found(checked(manifest), "containers")) == 1
    assert (len(notes), found(manifest, "secretKeyRef")) == (1, [])  # the run is lost with the pod


@pytest.mark.parametrize(
    ("chip", "devices", "limits"),
    [
        ("H100-SXM", 8, {"nvidia.com/gpu": 8}),
        ("C550", 8, {"metax-tech.com/gpu": 8}),
        ("BI-V150", 16, {"iluvatar.com/gpu": 8}),
        ("MLU590-M9", 8, {"cambricon.com/mlu": 8}),
        ("MI300X", 8, {"amd.com/gpu": 8}),
        ("910B3", 8, {"huawei.com/Ascend910": 8}),
        ("MTT-S5000", 8, {"mthreads.com/gpu": 8}),
        ("BW1000", 8, {"hygon.com/dcu": 8}),
        ("P800", 8, {"kunlunxin.com/xpu": 8}),
        ("S60", 8, {"enflame.com/gcu": 8}),
        ("PPU-ZW810E", 16, {"alibabacloud.com/ppu": 16}),
    ],
)
def test_pods_ask_for_the_devices_of_their_vendor(
    tmp_path: Path, chip: str, devices: int, limits: dict[str, int]
) -> None:
    file = written(tmp_path, cluster={"chip": chip, "nodes": 3, "devices_per_node": devices})
    manifest, notes = manifest_of_spec(file, kind="jobset", image="image:1")
    assert found(checked(manifest), "limits") == [limits] * 2
    assert any("--rdma" in note for note in notes) == (chip == "H100-SXM")  # its plugin has a resource
    if chip == "H100-SXM":
        manifest, notes = manifest_of_spec(file, kind="jobset", image="image:1", rdma="rdma/x")
        assert found(checked(manifest), "limits") == [{**limits, "rdma/x": 1}] * 2
        assert found(manifest, "capabilities") == [{"add": ["IPC_LOCK"]}] * 2
        assert not any("--rdma" in note for note in notes)


def test_a_bad_option_or_launcher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--name"):
        manifest_of_spec(written(tmp_path), kind="jobset", image="image:1", name="Not A Name")
    with pytest.raises(UsageError, match="--volume"):
        manifest_of_spec(written(tmp_path), kind="jobset", image="image:1", volume="data")
    with pytest.raises(UsageError, match="--volume"):  # the run would not be on it
        manifest_of_spec(written(tmp_path), kind="jobset", image="image:1", volume="data:/no/such/folder")
    with pytest.raises(UsageError, match="--user"):
        manifest_of_spec(written(tmp_path), kind="jobset", image="image:1", user="0")
    (tmp_path / "list.yaml").write_text("- nodeSelector")
    with pytest.raises(UsageError, match=r"list\.yaml"):
        manifest_of_spec(written(tmp_path), kind="jobset", image="image:1", pods=str(tmp_path / "list.yaml"))
    with pytest.raises(SpecError, match="kubernetes"):
        manifest_of_spec(written(tmp_path, auto_tuner={}), kind="jobset", image="image:1")


@pytest.mark.parametrize("name", ["kubernetes", "ray"])
def test_an_extra_that_is_not_installed_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore.plugins.entry_points.installed", lambda group: {})
    with pytest.raises(SpecError, match=rf'pip install "flagcore\[{name}\]"'):
        launcher(name)


def test_the_best_of_a_run_is_exported_instead(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="flag export"):
        manifest_of_spec(tmp_path, kind="jobset", image="image:1")


@pytest.mark.slow
def test_scripts_find_the_network_devices_of_their_host() -> None:
    need()
    devices = ("ib7", "10.9.0.1", "mlx5_10:ACTIVE mlx5_3:DOWN")
    other = "ip link add eth0 type veth peer name far; ip addr add 10.8.0.1/24 dev eth0; ip link set eth0 up"
    shown = shell_quoted("={interface} {address} {adapters}", DEVICES_OF_HOST)
    shows = f"{other}; ip route add default dev eth0; echo {shown}; export MASTER_ADDR=10.9.0.2; echo {shown}"
    argv = ["unshare", "--net", "--mount", "sh", "-c", HOST, "sh", *devices, "sh", "-c", shows]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines == ["=eth0 10.8.0.1 mlx5_10", "=ib7 10.9.0.1 mlx5_10"]


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
    values = {TEST_MARK: mark, "TMPDIR": str(tmp_path / TMP), TOKEN: secrets.token_hex(16)}
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
    return marked(os.environ[TEST_MARK]) - {os.getpid()}


def launch(script: str, folder: Path, hosts: tuple[str, ...] = PODS) -> Launch:
    return Launch(argv=("sh", "-c", script), folder=str(folder), hosts=hosts)


@pytest.mark.slow
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


@pytest.mark.slow
def test_trials_run_beside_each_other_in_a_pod(join: Join, tmp_path: Path) -> None:
    join("pod-1"), join("pod-2")
    pod = LAUNCHER.hold(PODS)[1:2]
    with LAUNCHER.keep_agents():
        running = [LAUNCHER.start(launch("sleep 1", tmp_path / str(number), pod)) for number in range(3)]
        assert [(found.code, found.ended_by) for found in map(ended, running)] == [(0, None)] * 3


@pytest.mark.costly
def test_the_devices_of_pods_are_read_beside_trials(join: Join, tmp_path: Path) -> None:
    join("pod-1"), join("pod-2")
    check = host_check((), None, compare=False)
    with LAUNCHER.use_hosts(ClusterSpec(hosts=PODS, nodes=len(PODS)), check) as hosts:
        reader = hosts.telemetry(hosts.devices[-1])
        assert ended(LAUNCHER.start(launch("true", tmp_path / "trial", hosts.names))).code == 0
        assert reader
        assert within(30, lambda: device_use(reader).free_bytes)


@pytest.mark.slow
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
        shutil.rmtree(disk, ignore_errors=True)  # its agents may end meanwhile; a pod's disk is gone with it


@pytest.mark.slow
def test_nothing_is_left_when_the_controller_is_killed(join: Join, tmp_path: Path) -> None:
    pods = {join("pod-1").pid, join("pod-2").pid}
    with subprocess.Popen([sys.executable, "-c", TUNER, str(tmp_path / "trial")], stdout=subprocess.PIPE) as tuner:
        assert tuner.stdout
        assert tuner.stdout.readline() == b"started\n"
        assert len(processes()) > 12
        tuner.kill()
    assert within(20, lambda: processes() == pods)
    assert LAUNCHER.hold(PODS) == PODS


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_job_without_a_secret_is_refused(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(NoDevice, match=TOKEN):
        LAUNCHER.hold(PODS)
    assert join("pod-1").wait(20) == 1
    join_at = [sys.executable, "-m", "flagcore_kubernetes.join"]
    assert subprocess.run([*join_at, "localhost:port"], env={**os.environ, TOKEN: "x" * 20}).returncode == 1
    assert subprocess.run(join_at).returncode == 1


@pytest.mark.slow
def test_pods_that_do_not_join_are_named(join: Join) -> None:
    hub = Hub("kubernetes", "flagcore_kubernetes.hub")
    with pytest.raises(NoDevice, match="pod-2"):
        hub.ask(10, names=["pod-2"], port=int(os.environ[PORT_VARIABLE]), seconds=0.2)
