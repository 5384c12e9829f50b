import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flagcore_serving.load.traces import Traffic
from flagcore_serving.load.traffic import traffic
from flagcore_serving.model.simulated_load import HIT_RATE, cached_tokens, prompt_parts, turn_order

from engines.serving.tests.engines import tasks
from flagcore.domain.serving import Load
from flagcore.domain.space import KnobValue

CHAT = Load(input_len=100, output_len=20, turns=4, num_prompts=64, concurrency=4)


def test_turn_has_the_prompt_of_the_turn_before_in_the_cache_until_it_is_evicted() -> None:
    parts = prompt_parts(traffic(Load(input_len=10, output_len=5, turns=3, num_prompts=6, concurrency=1)), 0)
    assert cached_tokens(parts, 1e9).tolist() == [0, 10, 25, 0, 10, 25]
    interleaved = [parts[index] for index in (0, 3, 1, 4, 2, 5)]
    assert cached_tokens(interleaved, 1e9).tolist() == [0, 0, 10, 10, 25, 25]
    assert cached_tokens(interleaved, 30).tolist() == [0, 0, 10, 0, 0, 0]


def test_leading_blocks_of_a_trace_are_shared() -> None:
    requests = Traffic(
        input_len=np.array([1024, 1536, 512]), output_len=np.ones(3, dtype=np.int64), blocks=[(1, 2), (1, 2, 3), (2,)]
    )
    assert cached_tokens(prompt_parts(requests, 0), 1e9).tolist() == [0, 1024, 512]


def test_closed_loop_sends_the_next_turns_of_its_conversations() -> None:
    follows = np.array([-1, 0, -1, 2, -1, 4])
    order, turn = turn_order(follows, 2, seed=0)
    assert turn[order].tolist() == [0, 0, 1, 1, 0, 1]
    assert set(order[:4].tolist()) == {0, 1, 2, 3}


def figures(load: Load, *, prefix_aware: bool = False, **values: KnobValue) -> dict[str, float]:
    return tasks.figures(tasks.planned("vllm", loads=(load,), prefix_aware=prefix_aware, devices=4), **values)


def test_predicted_hit_rate_raises_the_rate_and_falls_with_instances() -> None:
    one, without = figures(CHAT), figures(CHAT, enable_prefix_caching=False)
    assert without[HIT_RATE] == 0
    assert one[HIT_RATE] == pytest.approx((96 + 208 + 336) / (100 + 220 + 340 + 460), rel=0.01)  # blocks of 16
    assert one["output_tokens_per_s"] > without["output_tokens_per_s"]
    assert 0 < figures(CHAT, instances=4)[HIT_RATE] < 0.7 * one[HIT_RATE]


def test_prefix_aware_router_keeps_the_hit_rate_of_one_instance() -> None:
    one, four = figures(CHAT), figures(CHAT, instances=4, prefix_aware=True)
    assert four[HIT_RATE] == pytest.approx(one[HIT_RATE], rel=0.05)
    assert four["output_tokens_per_s"] > figures(CHAT, instances=4)["output_tokens_per_s"]


def test_think_time_lowers_the_predicted_rate() -> None:
    assert figures(replace(CHAT, think_time_s=30.0))["requests_per_s"] < 4 / 20
    assert HIT_RATE not in figures(replace(CHAT, turns=1))


def test_the_beginnings_of_texts_are_shared_up_to_where_they_diverge(tmp_path: Path) -> None:
    texts = ["a" * 400 + "b" * 400 + end * 200 for end in "xyz"] + ["a" * 400 + "c" * 600, "d" * 1000, "d" * 1000]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    load = Load(trace=str(tmp_path / "prompts.jsonl"), output_len=8, concurrency=1)
    requests = traffic(load)
    assert cached_tokens(prompt_parts(requests, 0), 1e9).tolist() == [0.0, 200.0, 200.0, 100.0, 0.0, 250.0]
    cached, uncached = (figures(load, block_size=16, enable_prefix_caching=on) for on in (True, False))
    assert cached[HIT_RATE] == pytest.approx((192 + 192 + 96 + 240) / 1500)
    assert uncached[HIT_RATE] == 0.0
    assert cached["requests_per_s"] > uncached["requests_per_s"]
