"""The closed form of a closed loop tends to what its simulation does."""

import random
from dataclasses import replace

import numpy as np
import pytest

from flagcore.engines.serving.model.candidates import ClosedLoop, steady_state
from flagcore.engines.serving.model.iteration import IterationCosts
from flagcore.engines.serving.model.simulation import Lane, Price, Simulation
from flagcore.engines.serving.model.work import UNFITTED
from tests.served import OVER, times


def loop(costs: IterationCosts, flight: float, prompt: float, output: float, cache: float) -> ClosedLoop:
    sizes = {"flight": flight, "prompt": prompt, "output": output, "cache_tokens": cache}
    limits = {"budget": 8192.0, "running": 512.0, "ranks": 1.0, "stages": 1.0}
    columns = {name: np.array([value]) for name, value in {**sizes, **limits}.items()}
    return ClosedLoop(costs=costs, overheads=OVER, **columns)


@pytest.mark.parametrize(
    ("flight", "prompt", "output", "cache"),
    [(1, 512, 128, 1e9), (16, 1024, 512, 1e9), (64, 1024, 256, 1e9), (64, 4096, 256, 1e9), (64, 1024, 512, 40e3)],
)
def test_closed_form_is_near_the_simulation(flight: int, prompt: int, output: int, cache: float) -> None:
    costs, draw = times(), random.Random(0)
    lane = Lane(budget=8192.0, running=512.0, cache_tokens=cache)
    lengths = [
        (round(prompt * draw.uniform(0.9, 1.1)), round(output * draw.uniform(0.9, 1.1))) for _ in range(12 * flight)
    ]
    price = Price(costs, 0, lane, replace(UNFITTED, request=OVER.request))
    requests = Simulation(price, lengths, None, flight).run().requests[2 * flight :]
    tpot = np.mean([(each.end - each.first) / (each.output - 1) for each in requests])
    rate = flight * output / np.mean([each.end - each.arrival for each in requests])
    found = steady_state(loop(costs, flight, prompt, output, cache))
    assert found.tpot[0] == pytest.approx(tpot, rel=0.12)
    assert found.rate[0] == pytest.approx(rate, rel=0.12)


def test_more_concurrency_raises_throughput_and_latency() -> None:
    costs = times()
    found = [steady_state(loop(costs, flight, 1024.0, 256.0, 1e9)) for flight in (1.0, 8.0, 64.0)]
    assert np.diff([float(each.rate[0]) for each in found]).min() > 0
    assert np.diff([float(each.tpot[0]) for each in found]).min() > 0
