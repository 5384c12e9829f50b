"""What must hold of a prefix cache in tiers, whatever their sizes and links."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from flagcore_serving.job import Load
from flagcore_serving.load.traffic import traffic
from flagcore_serving.model.simulated_load import HIT_RATE, prompt_parts
from flagcore_serving.model.simulation import Lane, Price, Simulation
from flagcore_serving.model.tiers import cached_tokens

from engines.serving.tests.engines import tasks
from tests.product import serving_inputs
from tests.product.serving_inputs import OVER, times

CHAT = Load(input_len=2000, output_len=40, turns=6, num_prompts=96, concurrency=8)
SMALL = {"kv-cache-memory-bytes": 2**30}
"""On each of four devices: room for three conversations of eight."""


def figures(engine: str = "vllm", args: Any = SMALL, load: Load = CHAT, **values: Any) -> dict[str, float]:
    task = tasks.planned(engine, loads=(load,), engine_args=args, engine_version=None, model=serving_inputs.DENSE)
    return tasks.figures(task, **values)


def test_a_tier_without_room_is_no_tier() -> None:
    without, empty, small = (figures(kv_offloading_size=size) for size in (None, 0, 1))
    assert empty == pytest.approx(without, nan_ok=True)
    assert "host_hit_rate" not in without
    assert small["host_hit_rate"] == 0.0, "a copy of what the devices have"
    assert small[HIT_RATE] == small["device_hit_rate"] == without[HIT_RATE]


def test_a_tier_with_an_order_of_its_own_loses_first_what_the_devices_have() -> None:
    """The devices keep x, which each second prompt is; so the host has room for a, b and c."""
    prompts = [[(name, 128), (f"end of {name}", 60)] for name in "xaxbxcxa"]
    devices = cached_tokens(prompts, 256, page=128)
    assert devices.tolist() == [0, 0, 128, 0, 128, 0, 128, 0]
    own, shared = (cached_tokens(prompts, 384, page=128, ahead=each) for each in (devices, None))
    assert (own[-1], shared[-1]) == (128, 0)
    assert (own >= devices).all()


def test_a_connector_may_set_the_room_on_the_host() -> None:
    """And on cores, vLLM offloads only with a class of the user's own, because its own one copies from GPUs."""
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 2**33}}

    def room(config: Any, **values: Any) -> float:
        task = tasks.planned("vllm", engine_args={"kv-transfer-config": json.dumps(config)})
        return float(tasks.settings(task, **values).host_cache.item())

    assert (room(config), room(config, kv_offloading_size=4)) == (2**33, 2**32)
    assert room(config | {"kv_connector": "NixlConnector"}) == room([1]) == 0.0
    for own, broken in (({}, ["offload_on_cores"]), ({"spec_module_path": "mine"}, [])):
        text = json.dumps({"kv_connector_extra_config": own})
        task = tasks.planned("vllm", on_cores=True, engine_args={"kv-transfer-config": text})
        assert tasks.broken(tasks.engine_of("vllm"), task, kv_offloading_size=1) == broken


def test_an_endless_host_has_each_prefix_that_repeats_and_more_room_never_has_less() -> None:
    requests = traffic(CHAT)
    repeated = cached_tokens(prompt_parts(requests, 0), np.inf).sum() / requests.input_len.sum()
    found = [figures(kv_offloading_size=size) for size in (2, 8, 16, 1000)]
    rates = [each[HIT_RATE] for each in found]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(repeated, rel=0.01)  # in blocks of 16 tokens
    assert found[-1]["host_hit_rate"] > 0.1
    assert found[-1]["device_hit_rate"] == found[0]["device_hit_rate"]
    assert found[-1]["ttft_s.mean"] < found[0]["ttft_s.mean"]
    assert 0.0 < found[-1]["cache_load_s"] < found[-1]["cache_compute_s"]


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_slower_link_never_helps(by_layer: bool) -> None:
    price = Price(
        times(), 0, Lane(budget=4096.0, running=8.0, cache_tokens=1e9), replace(OVER, loads_by_layer=by_layer)
    )
    lengths, hits = [(4000, 20)] * 24, [0.0, 3000.0] * 12

    def ttft(token_s: float) -> float:
        run = Simulation(price, lengths, None, 8, hits, loads=[token_s * each for each in hits]).run()
        assert all(each.arrival < each.first <= each.end for each in run.requests)
        return float(np.mean([each.first - each.arrival for each in run.requests]))

    found = [ttft(token_s) for token_s in (0.0, 1e-6, 1e-5, 1e-4, 1e-3)]
    assert all(later > 0.99 * sooner for sooner, later in pairwise(found)), found
    assert found[-1] > 3.0


def test_hicache_is_twice_the_cache_of_the_devices_unless_a_size_is_given() -> None:
    args = {"max-total-tokens": 32_768}
    off, on, sized, stored = (
        figures("sglang", {**args, **more}, **values)
        for more, values in (
            ({}, {}),
            ({"enable-hierarchical-cache": True}, {}),
            ({}, {"hicache_size": 64}),
            ({}, {"hicache_storage_backend": "mooncake"}),
        )
    )
    assert off[HIT_RATE] < on[HIT_RATE] < sized[HIT_RATE]
    assert stored[HIT_RATE] == pytest.approx(sized[HIT_RATE])
    assert stored["host_hit_rate"] == on["host_hit_rate"]
    assert stored["store_hit_rate"] > 0.0


def test_a_tier_that_gets_what_is_evicted_adds_to_the_devices() -> None:
    args = {"max-total-tokens": 16_384, "enable-hierarchical-cache": True}
    through, back = (figures("sglang", {**args, **more}) for more in ({}, {"hicache-write-policy": "write_back"}))
    assert through[HIT_RATE] < back[HIT_RATE]
