"""What must hold of predictions whatever chip, engine, model and load, and what reuse of prefixes does to them.
Adapters: laws of their memory and time, the queue for their slots, and the flags and requests that use them."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from flagcore_serving.job import Load, ServeSpec
from flagcore_serving.load.figures import TASK_S, TURN_TTFT
from flagcore_serving.load.traces import Traffic
from flagcore_serving.load.traffic import body, traffic
from flagcore_serving.model.adapters import adapter_bytes
from flagcore_serving.model.iteration import iteration_costs
from flagcore_serving.model.memory import serving_memory
from flagcore_serving.model.price import Lane, Price
from flagcore_serving.model.prompts import prompt_parts, turn_order
from flagcore_serving.model.simulated_load import HIT_RATE, cached_tokens
from flagcore_serving.model.simulation import Simulation
from flagcore_serving.model.work import AdaptedRequests, Serving
from flagcore_serving.space.adapters import check_adapters

from engines.serving.tests.engines import tasks
from engines.serving.tests.engines.tasks import broken, engine_of, merged, planned, predict, server
from flagcore.contracts import Costs
from flagcore.domain.chip import Fact
from flagcore.domain.cluster import Cluster, NodeGroup
from flagcore.domain.metrics import LATENCIES, STATISTICS
from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray, KnobValue
from flagcore.domain.spec import ClusterSpec, Spec, Task
from flagcore.errors import SpecError
from flagcore.physics.roofline import Roofline
from tests.product.serving_inputs import CHIP, DENSE, EXPERTS, OVER, SOURCE, costs, settings, times

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
    first = [(float(each["ttft_s.mean"][0]), float(each["tpot_s.mean"][0])) for each in found]
    # a batch that is planned ahead may or may not have the request of a client whose last one just ended
    assert all(later > 0.98 * sooner - 0.5 * iteration for (sooner, iteration), (later, _) in pairwise(first)), first


@pytest.mark.parametrize("context", SCENES)
def test_throughput_saturates_at_rates_that_cannot_be_served(context: Candidates) -> None:
    loads = [
        Load(input_len=context.prompt, output_len=context.output, request_rate=rate, num_prompts=300) for rate in RATES
    ]
    served = np.array([float(each["requests_per_s"][0]) for each in context.figures(*loads)])
    assert (served <= 1.02 * np.array(RATES)).all()
    assert (np.diff(served) > -0.05 * served[:-1]).all(), served


CHAT = Load(input_len=100, output_len=20, turns=4, num_prompts=64, concurrency=4)


def test_turn_has_the_prompt_of_the_turn_before_in_the_cache_until_it_is_evicted() -> None:
    parts = prompt_parts(traffic(Load(input_len=10, output_len=5, turns=3, num_prompts=6, concurrency=1)), 0)
    assert cached_tokens(parts, 1e9).tolist() == [0, 10, 25, 0, 10, 25]
    interleaved = [parts[index] for index in (0, 3, 1, 4, 2, 5)]
    assert cached_tokens(interleaved, 1e9).tolist() == [0, 0, 10, 10, 25, 25]
    assert cached_tokens(interleaved, 30).tolist() == [0, 0, 10, 5, 5, 0]


def test_leading_blocks_of_a_trace_are_shared() -> None:
    requests = Traffic(
        input_len=np.array([1024, 1536, 512]), output_len=np.ones(3, dtype=np.int64), blocks=[(1, 2), (1, 2, 3), (2,)]
    )
    assert cached_tokens(prompt_parts(requests, 0), 1e9).tolist() == [0, 1024, 512]


def test_closed_loop_sends_the_next_turns_of_its_conversations() -> None:
    turn = np.array([0, 1, 0, 1, 0, 1])
    order = turn_order(np.array([0, 0, 1, 1, 2, 2]), turn, 2)
    assert order.tolist() == [0, 2, 1, 3, 4, 5]


def figures(load: Load, *, prefix_aware: bool = False, **values: KnobValue) -> dict[str, float]:
    return tasks.figures(tasks.planned("vllm", loads=(load,), prefix_aware=prefix_aware, devices=4), **values)


def test_predicted_hit_rate_raises_the_rate_and_falls_with_instances() -> None:
    one, without = figures(CHAT), figures(CHAT, enable_prefix_caching=False)
    assert without[HIT_RATE] == 0
    assert one[HIT_RATE] == pytest.approx((96 + 208 + 336) / (100 + 220 + 340 + 460), rel=0.01)  # blocks of 16
    assert one["output_tokens_per_s"] > without["output_tokens_per_s"]
    assert 0 < figures(CHAT, instances=4)[HIT_RATE] < 0.7 * one[HIT_RATE]


@pytest.mark.parametrize("distribution", ["lognormal", "chat"])
@pytest.mark.parametrize("instances", [2, 4])
def test_the_requests_of_an_instance_have_the_lengths_of_all(distribution: str, instances: int) -> None:
    load = Load(input_len=300, output_len=200, num_prompts=400, request_rate=5.0, distribution=distribution)
    one, several = figures(load), figures(load, instances=instances)
    tokens = [each["output_tokens_per_s"] / each["requests_per_s"] for each in (one, several)]
    assert tokens[1] == pytest.approx(tokens[0], rel=0.03)


def test_prefix_aware_router_keeps_the_hit_rate_of_one_instance() -> None:
    one, four = figures(CHAT), figures(CHAT, instances=4, prefix_aware=True)
    assert four[HIT_RATE] == pytest.approx(one[HIT_RATE], rel=0.05)
    assert four["output_tokens_per_s"] > figures(CHAT, instances=4)["output_tokens_per_s"]


def test_think_time_lowers_the_predicted_rate() -> None:
    assert figures(replace(CHAT, think_time_s=30.0))["requests_per_s"] < 4 / 20
    assert HIT_RATE not in figures(replace(CHAT, turns=1))


def test_agents_have_times_of_turns_and_of_tasks() -> None:
    agents = replace(CHAT, input_len=800, sub_agents=2, num_prompts=96, think_time_s=1.0, prefix_len=512)
    found, alone = figures(agents), figures(replace(agents, sub_agents=0))
    assert found[TASK_S] == pytest.approx(12 * found["e2e_s.mean"] + 11 * 1.0)
    assert found[TASK_S] > 2.0 * alone[TASK_S]
    assert found[TURN_TTFT.format(number=10)] > 0.0
    assert TURN_TTFT.format(number=11) not in found
    requests = traffic(agents)
    assert requests.input_len[:6].tolist() == [512 + each for each in (800, 800, 1620, 2440, 3260, 1620)]
    assert requests.continued[:12].tolist() == [-1, -1, 1, 2, 3, 0, -1, 6, 7, 8, 5, 10]


def test_the_beginnings_of_texts_are_shared_up_to_where_they_diverge(tmp_path: Path) -> None:
    texts = ["a" * 400 + "b" * 400 + end * 200 for end in "xyz"] + ["a" * 400 + "c" * 600, "d" * 1000, "d" * 1000]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    load = Load(trace=str(tmp_path / "prompts.jsonl"), output_len=8, concurrency=1)
    assert cached_tokens(prompt_parts(traffic(load), 0), 1e9).tolist() == [0.0, 200.0, 200.0, 100.0, 0.0, 250.0]
    cached, uncached = (figures(load, block_size=16, enable_prefix_caching=on) for on in (True, False))
    assert cached[HIT_RATE] == pytest.approx((192 + 192 + 96 + 240) / 1500)
    assert uncached[HIT_RATE] == 0.0
    assert cached["requests_per_s"] > uncached["requests_per_s"]


ADAPTED_LOAD = Load(concurrency=4, adapters=1)
ADAPTED = AdaptedRequests(share=1.0, shares=(0.5, 0.25, 0.25))


def test_slots_take_memory_of_the_cache_and_their_rank_takes_time() -> None:
    serving = Serving(model=DENSE, precision="bf16", overheads=OVER, adapters=ADAPTED)
    rows = settings(adapter_slots=[0, 1, 4, 4, 4], adapter_rank=[0, 16, 16, 0, 64])
    cache = serving_memory(serving, rows, costs()).cache
    local = iteration_costs(serving, rows, costs()).local
    base = iteration_costs(serving._replace(adapters=AdaptedRequests()), rows, costs()).local
    assert cache[0] == cache[3] > cache[1] > cache[2] > cache[4]
    assert (cache[0] - cache[2]) == pytest.approx(4 * (cache[0] - cache[1])), "memory grows with the slots"
    assert (local[[0, 3]] == base[[0, 3]]).all(), "rank 0 is the base model"
    assert (local[1] > base[1]).all()
    assert (local[4] >= local[2]).all()
    assert (local[2] >= local[1]).all()


def test_the_bytes_of_a_slot_are_those_of_its_matrices() -> None:
    model = replace(DENSE, num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=2)
    model = replace(model, kv_channels=16, vocab_size=1000, gated_linear_unit=True, num_moe_experts=None)
    serving = Serving(model=model, precision="bf16", overheads=replace(OVER, adapts_tables=True))
    layer = 3 * 64 + (64 + 32 + 32) + 64 + 64 + 2 * 64 + 2 * 128 + 128 + 64
    found = adapter_bytes(serving, settings(adapter_rank=[8.0], adapter_slots=[1.0]))
    assert found.tolist() == [2.0 * 8 * (2 * layer + 2 * (1000 + 64))]


def test_the_first_request_of_a_shared_prefix_computes_it() -> None:
    def mean_s(*, cached: bool = True, **arguments: int) -> float:
        load = Load(input_len=16, prefix_len=8000, output_len=2, num_prompts=8, concurrency=1, **arguments)
        return tasks.figures(planned("vllm", loads=(load,)), enable_prefix_caching=cached)["ttft_s.mean"]

    assert mean_s() == pytest.approx((mean_s(cached=False) + 7.0 * mean_s(warmup=1)) / 8.0)


@pytest.mark.parametrize(("slots", "swaps"), [(0.0, False), (1.0, False), (1.0, True), (2.0, False)])
def test_requests_wait_for_a_slot_of_their_adapter(slots: float, swaps: bool) -> None:
    """Three requests with two adapters: with one slot, the third overtakes the second, whose adapter has none."""
    lane = Lane(budget=8192.0, running=8.0, cache_tokens=1e6, adapters=slots, swap_s=5.0 * swaps)
    run = Simulation(Price(times(), 0, lane, OVER), [(100, 20)] * 3, [0.0] * 3, 3, adapters=[0, 1, 0]).run()
    first, second, third = run.requests
    assert third.first < first.end
    assert (second.first > max(first.end, third.end)) is (slots == 1.0)
    assert (second.end > 5.0) is swaps


@pytest.mark.parametrize(
    ("engine", "flag", "slots"),
    [("vllm", "--lora-modules", "--max-loras"), ("sglang", "--lora-paths", "--max-loras-per-batch")],
)
def test_servers_load_the_adapters_of_the_spec(engine: str, flag: str, slots: str, tmp_path: Path) -> None:
    folder = tmp_path / "law"
    folder.mkdir()
    with pytest.raises(SpecError, match="adapter_config"):
        check_adapters(ServeSpec(engine=engine, loads=(ADAPTED_LOAD,), adapters=(str(folder),)))
    with pytest.raises(SpecError, match="is missing"):
        check_adapters(ServeSpec(engine=engine, loads=(ADAPTED_LOAD,)))
    (folder / "adapter_config.json").write_text('{"r": 24}', "utf-8")
    task = planned(engine, adapters=(str(folder),), loads=(ADAPTED_LOAD,))
    argv = " ".join(server(task, max_loras=2).argv)
    assert f"--enable-lora {flag} adapter-0={folder} --max-lora-rank 32" in argv
    assert f"{slots} 2" in argv
    found = tasks.settings(task, max_loras=2)
    assert (found.adapter_slots.item(), found.adapter_rank.item()) == (2.0, 32.0)
    assert broken(engine_of(engine), task, max_lora_rank=16) == ["adapter_rank"]
    assert broken(engine_of(engine), task, max_lora_rank=48) == (["adapter_ranks"] if engine == "vllm" else [])
    off = planned(engine, engine_args={"enable-lora": False}, loads=(ADAPTED_LOAD,))
    with pytest.raises(SpecError, match="requests use"):
        engine_of(engine).merges(off)
    plain = tasks.settings(planned(engine), max_loras=2)
    assert plain.adapter_slots.item() == plain.adapter_rank.item() == 0.0
    assert merged(engine_of(engine), planned(engine), max_loras=2, max_lora_rank=64)["max_loras"] == 0


def test_requests_draw_adapters_by_share_and_skew() -> None:
    load = Load(num_prompts=4000, concurrency=4, adapters=3, adapter_share=0.5, adapter_skew=1.0)
    found = traffic(load).adapters
    assert found is not None
    assert np.bincount(found + 1) / found.size == pytest.approx([0.5, 3 / 11, 1.5 / 11, 1 / 11], abs=0.03)
    assert json.loads(body("m", "text", 1, adapter="adapter-0"))["model"] == "adapter-0"
    plain = traffic(replace(load, adapters=0))
    assert plain.adapters is None
    assert (plain.input_len == traffic(load).input_len).all()
