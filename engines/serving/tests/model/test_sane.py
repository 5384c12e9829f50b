"""What must hold of predictions whatever chip, engine, model and load: drawn at random, the same each time."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from engines.serving.tests.engines.tasks import predict
from flagcore.contracts import Costs
from flagcore.domain.chip import Fact
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.model import Model
from flagcore.domain.serving import LATENCIES, STATISTICS, Load, ServeSpec
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import ClusterSpec, Spec, Task
from flagcore.physics.roofline import Roofline
from tests.product.serving_inputs import CHIP, DENSE, EXPERTS, SOURCE, costs, settings

CLIENTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (64, 256, 512, 1024, 2048, 4096, 8192)
RATES = (0.5, 2.0, 8.0, 32.0, 128.0, 512.0)


class Candidates:
    """One chip, engine, release, model, precision, limit of sequences and lengths."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.engine, self.version = draw.choice([("vllm", "0.19.0"), ("vllm", "0.20.2"), ("sglang", None)])
        self.model: Model = draw.choice([DENSE, EXPERTS])
        self.precision = draw.choice(["bf16", "fp8"])
        self.running = draw.choice([16, 64, 256])
        self.prompt, self.output = draw.choice([128, 512, 2048]), draw.choice([32, 128, 512])
        self.clients = draw.choice([1, 8, 64])
        facts = {"memory_bandwidth_bytes_per_second": draw.choice([1e12, 3e12, 8e12]), "memory_bytes": 180e9}
        self.chip = replace(CHIP, **{name: Fact(value=value, source=SOURCE) for name, value in facts.items()})

    @property
    def costs(self) -> Costs:
        return replace(costs(), kernels=Roofline(chip=self.chip))

    def figures(self, *loads: Load, **arguments: object) -> list[dict[str, FloatArray]]:
        return [self._figures(load, arguments) for load in loads]

    def _figures(self, load: Load, given: dict[str, object]) -> dict[str, FloatArray]:
        work = ServeSpec(engine=self.engine, engine_version=self.version, precision=self.precision, loads=(load,))
        spec = Spec(model=self.model, cluster=ClusterSpec(), work=work, objective="output_tokens_per_s")
        group = NodeGroup(chip=self.chip, nodes=1, devices_per_node=8)
        task = Task(spec=spec, cluster=Cluster(groups=(group,)))
        rows = settings(**{"max_running": self.running, "context_len": 16384, **given})
        return dict(predict(task, rows, self.costs).figures)

    def loop(self, clients: int, prompt: int = 0) -> Load:
        return Load(input_len=prompt or self.prompt, output_len=self.output, concurrency=clients, num_prompts=None)


SCENES = [
    pytest.param(Candidates(seed), id=str(seed), marks=() if seed < 4 else pytest.mark.long) for seed in range(12)
]


@pytest.mark.parametrize("context", SCENES)
def test_more_clients_never_lower_throughput_or_break_littles_law(context: Candidates) -> None:
    """Up to the limit of sequences. Beyond it each that ends is followed by one that waits, so prompts come one by one,
    and where no graph has such an iteration they cost more than in the groups in which they came before.
    """
    best = 0.0
    for clients, found in zip(CLIENTS, context.figures(*map(context.loop, CLIENTS)), strict=True):
        rate = float(found["output_tokens_per_s"][0])
        assert rate > (0.98 if clients <= context.running else 0.5) * best, clients
        best = max(best, rate)
        assert found["requests_per_s"][0] * found["e2e_s.mean"][0] == pytest.approx(clients, rel=0.03)
        for name in LATENCIES:
            p50, p90, p95, p99 = (float(found[f"{name}.{each}"][0]) for each in STATISTICS[1:])
            assert 0.0 <= p50 <= p90 <= p95 <= p99


@pytest.mark.parametrize("context", SCENES)
def test_longer_prompts_never_shorten_the_time_to_first_token(context: Candidates) -> None:
    found = context.figures(*(context.loop(context.clients, prompt) for prompt in PROMPTS))
    first = [float(each["ttft_s.mean"][0]) for each in found]
    assert all(later > 0.98 * sooner for sooner, later in pairwise(first)), first


@pytest.mark.parametrize("context", SCENES)
def test_throughput_saturates_at_rates_that_cannot_be_served(context: Candidates) -> None:
    loads = [
        Load(input_len=context.prompt, output_len=context.output, request_rate=rate, num_prompts=300) for rate in RATES
    ]
    served = np.array([float(each["requests_per_s"][0]) for each in context.figures(*loads)])
    assert (served <= 1.02 * np.array(RATES)).all()
    assert (np.diff(served) > -0.05 * served[:-1]).all(), served
