"""What is checked on the hosts of a cluster before the first trial, and the telemetry of their devices."""

import json
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from flagcore_hosts import checks
from flagcore_hosts.checks import (
    HostReport,
    HostSpeed,
    host_problems,
    host_warnings,
    inspect_hosts,
    measure_speed,
    measured_network,
    port_problems,
    slow_hosts,
)
from flagcore_hosts.connection import agent_command
from flagcore_hosts.launcher import SSH, HostsLauncher
from flagcore_hosts.report import busy

from extras.hosts.tests.cluster.bed import need
from flagcore import __version__, api
from flagcore.api.commands.doctor import host_check
from flagcore.contracts import Network, Telemetry, device_use
from flagcore.domain.chip import MEMORY_IN_USE, Device
from flagcore.domain.spec import ClusterSpec
from flagcore.errors import LaunchError, NoDevice, UsageError
from tests.product.cli.conftest import Flag
from tests.product.cli.conftest import flag as flag
from tests.product.tasks import SHAPE, Readings

FOUR = tuple(Device(index=index, chip="Chip-A") for index in range(4))
GOOD = HostReport(
    host="a", devices=FOUR, versions={"torch": "2.9"}, python="3.11", free_disk_bytes=1 << 40, files={"/model": "2f"}
)


def use(launcher: HostsLauncher, *hosts: str, variables: dict[str, str] | None = None) -> Any:
    cluster = ClusterSpec(hosts=hosts, nodes=len(hosts))
    return launcher.use_hosts(cluster, host_check((), variables, compare=False))


def report(host: str, **how: object) -> HostReport:
    return HostReport(**{**vars(GOOD), "host": host, **how})  # type: ignore[arg-type]


def broken(host: str) -> list[str]:
    return ["sh", "-c", "echo no route >&2; exit 255" if host == "b" else agent_command()]


@pytest.fixture(scope="session")
def kept_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a host, which loads all plugins for it, answers about three paths and about none."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    argv = (*checks.REPORT, *(str(folder / name) for name in ("model", "model/config.json", "none")))
    found = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
    for name, files in (("of-paths", found["files"]), ("alone", {})):
        (folder / name).write_text(json.dumps({**found, "files": files}))
    return folder


@pytest.fixture
def reported(kept_report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let hosts answer at once, and return the file with the paths that one of them was asked for."""
    script = f'echo "$@" > {tmp_path}/asked; cd {kept_report}; [ "$1" = "$PWD/model" ] && cat of-paths || cat alone'
    monkeypatch.setattr(checks, "REPORT", ("sh", "-c", script, "sh"))
    return tmp_path / "asked"


REPORTED = pytest.mark.together("hosts that answer at once")


@REPORTED
def test_hosts_answer_with_devices_and_versions(kept_report: Path, reported: Path) -> None:
    paths = [*json.loads((kept_report / "of-paths").read_text())["files"]]
    first, second = inspect_hosts(HostsLauncher(name="shell", channel=broken), ("a", "b"), host_check(paths, None))
    assert reported.read_text().split() == paths
    assert [len(first.files[path]) for path in paths] == [64, 64, 0]
    assert (first.problem, first.python) == ("", sys.version.split()[0])
    assert (first.versions or {})["flagcore"] == __version__
    assert first.devices
    assert abs(first.clock_s) < 5
    assert (second.problem, second.devices) == ("no route", None)


@REPORTED
@pytest.mark.usefixtures("reported")
def test_hosts_that_fail_or_are_one_machine_under_two_names_are_refused() -> None:
    def namespaced(host: str) -> list[str]:
        return [*(["unshare", "--net"] if host == "c" else []), "sh", "-c", agent_command()]

    with pytest.raises(NoDevice, match="b: no route"), use(HostsLauncher(name="shell", channel=broken), "a", "b"):
        pass
    launcher = HostsLauncher(name="shell", channel=namespaced, logs_in=True)
    for _attempt in range(2):
        with pytest.raises(NoDevice, match=r"^b: .* a$"), use(launcher, "a", "b"):
            pass
    need()
    reports = inspect_hosts(launcher, ("a", "c"), host_check((), None))
    assert [report.problem for report in reports] == ["", ""]
    assert len({report.machine for report in reports}) == 2


@REPORTED
@pytest.mark.usefixtures("reported")
def test_a_host_that_cannot_be_used_makes_doctor_fail(
    tmp_path: Path, flag: Flag, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SSH, "channel", broken)
    speeds = [HostSpeed(host="ann@a", products_s=(1.0,), link_s=None)]
    monkeypatch.setattr(checks, "measure_speed", lambda *_: speeds)
    (tmp_path / "hosts.txt").write_text("ann@a\n")
    assert flag("doctor", "--hosts", "hosts.txt", "--json").code == 0
    (tmp_path / "hosts.txt").write_text("a\nb\n")
    ran = flag("doctor", "--hosts", "hosts.txt", "--json")
    assert ran.code == NoDevice.exit_code
    first, second = json.loads(ran.out)
    assert (first["ok"], first["free_disk_gib"] > 0) == (True, True)
    assert second["ok"] is False
    assert second["clock_s"] is second["free_disk_gib"] is None


@pytest.mark.parametrize("name", ["ssh", "slurm", "kubernetes"])
def test_a_launcher_without_hosts_is_refused_before_the_first_trial(tmp_path: Path, name: str) -> None:
    spec = {
        "model": SHAPE,
        "cluster": {"chip": "cpu", "nodes": 2, "devices_per_node": 1},
        "train": {"engine": "megatron", "seq_length": 128, "global_batch_size": 8, "precision": "fp32"},
        "auto_tuner": {"launcher": name},
    }
    with pytest.raises(NoDevice, match=name):
        api.tune(spec, run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("different", "count"),
    [
        (report("b"), 0),
        (report("b", problem="gone"), 1),
        (report("b", devices=FOUR[:3]), 1),
        (report("b", devices=tuple(Device(index=index, chip="Chip-B") for index in range(4))), 1),
        (report("b", versions={"torch": "2.8", "other": "1"}), 1),
        (report("b", devices=None, versions=None), 0),
        (report("b", clock_s=60.0), 0),
        (report("b", files={"/model": "2f"}), 0),
        (report("b", files={"/model": "30"}), 1),
        (report("b", files={"/model": ""}), 1),
    ],
)
def test_hosts_must_be_equal(different: HostReport, count: int) -> None:
    reports = [GOOD, different]
    assert len(list(host_problems(different, reports))) == count
    assert list(host_problems(GOOD, reports)) == []


def test_an_unusual_host_is_a_warning() -> None:
    unusual = [GOOD, report("b", clock_s=-60.0), report("c", devices=None), report("d", busy=("device 3 is used",))]
    assert [line[0] for line in host_warnings(unusual)] == ["b", "c", "d"]


def in_use(gib: float, free_bytes: int | None = None) -> Readings:
    return Readings({MEMORY_IN_USE: gib * 2**30}, processes=("4711 python",), free_bytes=free_bytes)


@pytest.mark.parametrize(
    ("reader", "reason"),
    [
        (in_use(0.0), ""),
        (in_use(32.0), "has 32.0 of 64.0 GiB in use by 4711 python"),
        (in_use(32.0, free_bytes=2**30), ""),
        (Readings(LookupError()), "does not respond"),
        (None, ""),
    ],
)
def test_devices_that_others_use_are_reported(reader: Readings | None, reason: str) -> None:
    assert busy(Device(index=3, chip="Chip-A", memory_bytes=2**36), reader) == reason


def test_only_launchers_of_hosts_check_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("a slots=4\n")
    with pytest.raises(UsageError, match="local"):
        api.check_hosts(tmp_path / "hosts.txt", "local")


@pytest.mark.costly
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_hosts_are_compared_by_a_product_and_an_all_reduce() -> None:
    launcher = HostsLauncher(name="shell", channel=lambda host: ["sh", "-c", agent_command()])
    job = {"kind": "cpu", "backend": "gloo", "preload": [], "devices": 1}
    speeds = measure_speed(launcher, host_check((), None).speed, ("127.0.0.1", "127.0.0.2"), job)
    assert [each.host for each in speeds] == ["127.0.0.1", "127.0.0.2"]
    for each in speeds:
        assert [seconds > 0 for seconds in each.products_s] == [True]
        assert (each.link_s or 0.0) > 0.0
        assert each.network
        assert each.network.nic_latency_seconds < 10.0
    with pytest.raises(LaunchError, match="no_such_module"):
        measure_speed(launcher, (sys.executable, "-S", "-c", "import no_such_module"), ("127.0.0.1",), job)


def test_slow_devices_and_networks_of_hosts_are_named() -> None:
    equal = [HostSpeed(host=host, products_s=(1.0, 1.0), link_s=0.01) for host in "abcd"]
    assert list(slow_hosts(equal, cores=False)) == []
    odd_speeds = [*equal[:2], HostSpeed(host="c", products_s=(1.0, 1.4), link_s=0.03), equal[3]]
    device, network = slow_hosts(odd_speeds, cores=False)
    assert device.startswith("device 1 of c ")
    assert network.startswith("c: ")
    assert len(list(slow_hosts(odd_speeds, cores=True))) == 1


def test_the_network_of_a_run_is_that_of_its_slowest_host_and_cores_share_it() -> None:
    def speed(rate: float, latency_s: float, *, cores: bool) -> HostSpeed:
        network = Network(nic_bytes_per_second=rate, nic_latency_seconds=latency_s)
        return HostSpeed(host="a", products_s=(1.0,) * 8, link_s=0.01, network=network, cores=cores)

    fast, slow = ((4e9, 1e-5), (1e9, 3e-5))
    networks = [
        (False, None, Network(nic_bytes_per_second=1e9, nic_latency_seconds=3e-5)),
        (True, None, Network(nic_bytes_per_second=1e9 / 8, nic_latency_seconds=3e-5)),
        (True, 2, Network(nic_bytes_per_second=5e8, nic_latency_seconds=3e-5)),
    ]
    for cores, devices, expected in networks:
        assert measured_network([speed(*fast, cores=cores), speed(*slow, cores=cores)], devices) == expected
    assert measured_network([HostSpeed(host="a", products_s=(1.0,), link_s=None)]) is None


@pytest.mark.costly
@REPORTED
@pytest.mark.usefixtures("reported")
def test_hosts_must_be_able_to_connect_to_the_first_one() -> None:
    def apart(host: str) -> list[str]:
        prefix = ["unshare", "--net"] if host in cut_off else []
        return [*prefix, "sh", "-c", agent_command()]

    hosts, launcher = ("127.0.0.1", "127.0.0.2", "127.0.0.3"), HostsLauncher(name="shell", channel=apart)
    cut_off: tuple[str, ...] = ()
    with socket.create_server(("", 0)) as other:
        used = str(other.getsockname()[1])
        assert port_problems(launcher, hosts, {"MASTER_PORT": used}).keys() == {hosts[0]}
    assert port_problems(launcher, hosts, {"MASTER_PORT": used}) == {}
    assert port_problems(launcher, hosts, {"MASTER_PORT": "many"}).keys() == {hosts[0]}
    need()
    cut_off = hosts[2:]
    with pytest.raises(NoDevice, match=f"{hosts[2]}: .*{hosts[0]}"), use(launcher, *hosts, variables={}):
        pass
    cut_off = hosts[:1]
    assert port_problems(launcher, hosts, {}).keys() == {hosts[0]}


pytestmark = [pytest.mark.slow, pytest.mark.spread]


def free_bytes(reader: Telemetry) -> int:
    deadline = time.monotonic() + 200.0
    while not (free := device_use(reader).free_bytes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return free or 0


@REPORTED
@pytest.mark.costly
@pytest.mark.usefixtures("reported")
def test_devices_of_hosts_are_read_over_the_channel_of_the_agent() -> None:
    started: list[str] = []

    def shell(host: str) -> list[str]:
        started.append(host)
        return ["sh", "-c", agent_command()]

    launcher = HostsLauncher(name="shell", channel=shell)
    with use(launcher, "a", "b") as hosts:
        assert {device.host for device in hosts.devices} == {"a", "b"}
        readers = [reader for device in (hosts.devices[0], hosts.devices[-1]) if (reader := hosts.telemetry(device))]
        assert min(map(free_bytes, readers)) > 0
        assert sorted(started) == ["a", "b"]
        assert launcher.agents is not None
        launcher.agents.of_hosts["a"].problem = "lost"
        assert [device_use(reader).free_bytes is None for reader in readers] == [True, False]
    assert device_use(readers[1]).free_bytes is None
