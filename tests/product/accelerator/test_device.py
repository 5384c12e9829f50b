"""The simulated device itself: it behaves as torch's other devices do."""

import re

import pytest

from tests.product.accelerator.machine import Machine

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.together("training")]


def test_operators_have_the_results_of_the_cpu_on_the_same_memory(built: Machine) -> None:
    built.python(
        """
import torch, torch_simu

def gradient(device):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 8, 16).to(device), torch.randn(32, 16).to(device).requires_grad_()
    heads = torch.nn.functional.linear(x, weight).relu().softmax(-1).view(2, 8, 4, 8).transpose(1, 2)
    outputs = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    torch.nn.functional.rms_norm(outputs, (8,), weight[:8, 0], 1e-5).pow(3).mean().backward()
    return weight.grad.cpu()

torch.testing.assert_close(gradient("cpu"), gradient("simu"))
matrix = torch.zeros(4, 6, device="simu:1")
first, second = matrix.t().split(3)
second.add_(1)
assert first.device == torch.device("simu", 1)
assert matrix.cpu().sum(0).tolist() == [0, 0, 0, 4, 4, 4]
result = torch.empty(0, device="simu:1")
torch.mul(matrix, 2, out=result)
assert result.sum().item() == 24
assert torch.simu.memory_allocated(1) > 0 == torch.simu.memory_allocated(0)
for other in (torch.ones(4, 6), torch.ones(4, 6, device="simu:0")):
    try:
        matrix + other
    except RuntimeError as error:
        assert "same device" in str(error)
    else:
        raise AssertionError(other.device)
state = torch.simu.get_rng_state()
numbers = torch.rand(3, device="simu")
torch.simu.set_rng_state(state)
assert torch.equal(numbers, torch.rand(3, device="simu"))
"""
    )


def test_memory_is_counted_reserved_and_limited(built: Machine) -> None:
    built.python(
        """
import gc, torch, torch_simu

tensor = torch.zeros(3 << 20, dtype=torch.uint8, device="simu")
assert torch.simu.memory_allocated() == 3 << 20
assert torch.simu.memory_reserved() == 4 << 20
tensor.float()
assert torch.simu.memory_allocated() == 3 << 20
assert torch.simu.max_memory_allocated() == 15 << 20
torch.simu.reset_peak_memory_stats()
assert torch.simu.max_memory_allocated() == 3 << 20
assert torch.simu.max_memory_reserved() == 16 << 20
torch.simu.empty_cache()
free, total = torch.simu.mem_get_info()
assert total - free == (64 + 4) << 20
try:
    torch.empty(2 << 30, dtype=torch.uint8, device="simu")
except torch.OutOfMemoryError as error:
    assert "out of memory" in str(error)
else:
    raise AssertionError
del tensor
assert torch.simu.memory_allocated() == 0
"""
    )


def test_the_driver_does_not_survive_a_fork(built: Machine) -> None:
    built.python(
        """
import os, torch, torch_simu

assert torch.simu.device_count() == 4
assert not torch.simu.is_initialized()
if os.fork() == 0:
    os._exit(int(torch.ones(1, device="simu").item()))
assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
torch.simu.set_device(0)
if os.fork() == 0:
    try:
        torch.ones(1, device="simu")
    except RuntimeError as error:
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
    )


def test_the_tool_lists_processes_until_they_end(built: Machine) -> None:
    printed = built.python(
        """
import os, subprocess, torch, torch_simu
tensor = torch.zeros(10 << 20, device="simu:2")
print(os.getpid(), subprocess.run(["simu-smi"], capture_output=True, text=True).stdout)
"""
    )
    pid, _, table = printed.partition(" ")
    assert re.search(rf"\| 2 {pid} python[\d.]* 104 MiB \|", table)
    assert f" {pid} " not in built.run("simu-smi").stdout
