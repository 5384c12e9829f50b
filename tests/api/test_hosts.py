"""What is checked on the hosts of a cluster before the first trial."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flagcore import __version__, api
from flagcore.api.hardware.hosts import HostReport, host_problems, host_warnings, inspect_hosts, require_hosts
from flagcore.domain.chip import Device
from flagcore.errors import NoDevice, UsageError
from flagcore.launchers.connection import agent_command
from flagcore.launchers.hosts import HostsLauncher

FOUR = tuple(Device(index=index, chip="Chip-A") for index in range(4))
GOOD = HostReport(host="a", devices=FOUR, versions={"torch": "2.9"}, python="3.11", free_disk_bytes=1 << 40)


def report(host: str, **how: object) -> HostReport:
    return HostReport(**{**vars(GOOD), "host": host, **how})  # type: ignore[arg-type]


def broken(host: str) -> list[str]:
    return ["sh", "-c", "echo no route >&2; exit 255" if host == "b" else agent_command()]


@pytest.mark.slow
def test_hosts_answer_with_devices_and_versions(tmp_path: Path) -> None:
    first, second = inspect_hosts(HostsLauncher(name="shell", channel=broken), ("a", "b"))
    assert (first.problem, first.python) == ("", sys.version.split()[0])
    assert (first.versions or {})["flagcore"] == __version__
    assert first.devices
    assert abs(first.clock_s) < 5
    assert (second.problem, second.devices) == ("no route", None)
    with pytest.raises(NoDevice, match="b: no route"):
        require_hosts(HostsLauncher(name="shell", channel=broken), ("a", "b"))


@pytest.mark.parametrize(
    ("different", "count"),
    [
        (report("b"), 0),
        (report("b", problem="gone"), 1),
        (report("b", devices=FOUR[:3]), 1),
        (report("b", devices=tuple(Device(index=index, chip="Chip-B") for index in range(4))), 1),
        (report("b", versions={"torch": "2.8", "other": "1"}), 1),
        (report("b", free_disk_bytes=0), 1),
        (report("b", devices=None, versions=None), 0),
        (report("b", clock_s=60.0), 0),
    ],
)
def test_hosts_must_be_equal(different: HostReport, count: int) -> None:
    reports = [GOOD, different]
    assert len(list(host_problems(different, reports))) == count
    assert list(host_problems(GOOD, reports)) == []


def test_what_is_unusual_is_a_warning() -> None:
    unusual = [GOOD, report("b", clock_s=-60.0), report("c", devices=None)]
    assert [line[0] for line in host_warnings(unusual)] == ["b", "c"]


def test_only_launchers_of_hosts_check_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("a slots=4\n")
    with pytest.raises(UsageError, match="local"):
        api.check_hosts(tmp_path / "hosts.txt", "local")
