"""What the machine does beside trials."""

import os
from types import SimpleNamespace

import psutil
import pytest
from flagcore_cpu import load

GIB = 2**30


def test_the_load_of_other_programs_excludes_this_process_and_those_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times, own, now = {"user": 10.0, "idle": 90.0, "iowait": 0.0}, {1: 2.0, 2: 3.0}, [0.0]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [Times(**times), Times(user=now[0], idle=0.0, iowait=0.0)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(sin=now[0] * 1e6, sout=0))
    monkeypatch.setattr(load, "_own_seconds", lambda: dict(own))
    monkeypatch.setattr(load.time, "monotonic", lambda: 100.0 + now[0])
    machine = load.MachineLoad()
    assert "cores" not in machine.read()
    now[0], times["user"], times["idle"], times["iowait"] = 10.0, 40.0, 96.0, 4.0
    own.update({1: 6.0, 3: 6.0})
    del own[2]
    reading = machine.read()
    assert reading["cores"] == 1.0
    assert reading["cores_used_by_others"] == pytest.approx((30.0 - 10.0) / 10.0)
    assert reading["disk_wait"] == pytest.approx(4.0 / 10.0)
    assert reading["swapped_bytes_per_second"] == pytest.approx(1e6)
    assert machine.read() is reading
    now[0], times["user"], times["idle"] = 20.0, 50.0, 116.0
    assert machine.read()["cores_used_by_others"] == 0.0


class Times(SimpleNamespace):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(vars(self).values())
