"""Costs of several sources."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from flagcore.contracts import AttentionShape
from flagcore.domain.space import FloatArray
from flagcore.physics.roofline import KernelCostStack, with_slowdown

SIZE = np.array([1.0, 10.0, 100.0])
NONE = np.zeros(3)


@dataclass(frozen=True)
class LimitedCosts:
    """Knows sizes up to a limit: a size takes `rate` seconds a unit."""

    limit: float
    rate: float
    launch: float = math.nan

    def gemm_seconds(self, m: FloatArray, n: FloatArray, k: FloatArray, precision: str) -> FloatArray:
        return self.memory_seconds(m)

    def attention_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        return self.memory_seconds(shape.queries)

    def attention_backward_seconds(self, shape: AttentionShape, precision: str) -> FloatArray:
        return self.memory_seconds(shape.queries)

    def memory_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return np.where(bytes_moved <= self.limit, self.rate * bytes_moved, np.nan)

    def host_copy_seconds(self, bytes_moved: FloatArray) -> FloatArray:
        return self.memory_seconds(bytes_moved)

    def launch_seconds(self) -> float:
        return self.launch

    def run_slowdown(self) -> float:
        return 1.2


STACK = KernelCostStack((LimitedCosts(1.0, 1.0), LimitedCosts(10.0, 2.0, launch=5.0), LimitedCosts(1e9, 3.0)))


def test_each_element_comes_from_the_first_source_that_knows_it() -> None:
    assert STACK.memory_seconds(SIZE).tolist() == [1.0, 20.0, 300.0]
    assert STACK.gemm_seconds(SIZE, SIZE, SIZE, "bf16").tolist() == [1.0, 20.0, 300.0]
    assert STACK.launch_seconds() == 5.0


def test_a_slowdown_applies_only_to_kernels_of_the_device() -> None:
    slow = with_slowdown(STACK, 2.0)
    assert slow.memory_seconds(SIZE).tolist() == [2.0, 40.0, 600.0]
    assert slow.host_copy_seconds(SIZE).tolist() == STACK.host_copy_seconds(SIZE).tolist()
    assert (slow.launch_seconds(), slow.run_slowdown(), STACK.run_slowdown()) == (5.0, 1.0, 1.2)
    assert with_slowdown(LimitedCosts(1e9, 3.0), 2.0).memory_seconds(SIZE).tolist() == pytest.approx([6.0, 60.0, 600.0])
