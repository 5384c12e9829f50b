"""The clock of the micro-benchmark, in a separate process: torch stays out of this one."""

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"), pytest.mark.slow]

ACCELERATOR = """
import json, time
from types import SimpleNamespace
import torch
from flagcore_training.microbench.kernels import Bench, MAX_QUEUED_CALLS

class Device:
    '''Stands for torch.cuda and its like: works off what was launched, in order, in its own time.'''
    def __init__(self):
        self.now, self.launched = 0.0, 0
    def run(self, seconds):
        self.now = max(self.now, time.perf_counter()) + seconds
        self.launched += 1
    def synchronize(self):
        time.sleep(max(0.0, self.now - time.perf_counter()))
    def Event(self, enable_timing):
        device = self
        class Event:
            def record(self):
                self.at = max(device.now, time.perf_counter())
            def elapsed_time(self, later):
                return (later.at - self.at) * 1e3
        return Event()

device = Device()
bench = Bench("cpu", 0, False)
bench.cpu, bench._module = False, device
bench._filler = SimpleNamespace(bitwise_not_=lambda: device.run(1e-4))

def kernel():
    time.sleep(2e-4)  # the host is slower than the device
    device.run(5e-5)

print(json.dumps(bench.time(kernel, 0.2).seconds))
"""

PLAN = """
import json
import torch
from importlib.util import find_spec
from pathlib import Path
from flagcore_training.microbench import kernels
from flagcore_training.microbench.kernels import Bench
from flagcore_training.microbench import BenchmarkJob
torch.set_num_threads(1)
bench = Bench("cpu", 0, False)
job = BenchmarkJob("cpu", "gloo", (), 1, True, 1, ("fp32",), 1 << 28, 1.0, Path("x"))
items = kernels.gemms(bench, job, "fp32")
rows = list(kernels.measured(bench, items, 2.0))
print(json.dumps({"planned": len(items), "rows": rows,
                  "unmultiplied": len(kernels.gemms(bench, job, "int3"))}))
"""


def run(program: str) -> Any:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_kernel_that_is_shorter_than_its_launch_is_timed_by_the_device() -> None:
    assert run(ACCELERATOR) == pytest.approx(5e-5, rel=0.3)


def test_with_too_little_time_small_and_large_kernels_are_measured_first() -> None:
    found = run(PLAN)
    work = [row["m"] * row["n"] * row["k"] for row in found["rows"]]
    assert 5 < len(work) < found["planned"]
    assert max(work) > 100 * min(work)
    assert found["unmultiplied"] == 0
    assert all(row["repeats"] >= 3 and row["us"] > 0 for row in found["rows"])
