"""Adapters: laws of their memory and time, the queue for their slots, and the flags and requests that use them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flagcore_serving.job import Load, ServeSpec
from flagcore_serving.load.traffic import body, traffic
from flagcore_serving.model.adapters import adapter_bytes
from flagcore_serving.model.iteration import iteration_costs
from flagcore_serving.model.memory import serving_memory
from flagcore_serving.model.simulation import Lane, Price, Simulation
from flagcore_serving.model.work import AdaptedRequests, Serving
from flagcore_serving.space.adapters import check_adapters

from engines.serving.tests.engines import tasks
from engines.serving.tests.engines.tasks import broken, engine_of, merged, planned, server
from flagcore.errors import SpecError
from tests.product.serving_inputs import DENSE, OVER, costs, settings, times

ADAPTED_LOAD = Load(concurrency=4, adapters=1)
ADAPTED = AdaptedRequests(share=1.0, shares=(0.5, 0.25, 0.25))


def test_slots_take_memory_of_the_cache_and_their_rank_takes_time() -> None:
    serving = Serving(model=DENSE, precision="bf16", overheads=OVER, adapters=ADAPTED)
    rows = settings(adapter_slots=[0, 1, 4, 4, 4], adapter_rank=[0, 16, 16, 0, 64])
    cache = serving_memory(serving, rows, costs()).cache
    local = iteration_costs(serving, rows, costs()).local
    base = iteration_costs(replace(serving, adapters=AdaptedRequests()), rows, costs()).local
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
