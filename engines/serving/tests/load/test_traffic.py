"""Lengths, arrivals and prompts: what a load point means."""

import math
from dataclasses import replace

import numpy as np
import pytest
from flagcore_serving.job import Load
from flagcore_serving.load.traffic import Traffic, prompts, traffic, warm_up
from flagcore_serving.records import read_record

from tests.checks import given


def arrivals(**changes: float) -> np.ndarray:
    sampled = traffic(Load(num_prompts=4000, **changes))  # type: ignore[arg-type]
    return given(sampled.arrive_s)


@pytest.mark.parametrize(
    ("changes", "inputs", "outputs", "mean"),
    [
        ({"range_ratio": 0.25, "prefix_len": 5}, (30, 105), (2, 10), 5 + 62.5),
        ({"range_ratio": 0.0}, (1, 100), (1, 10), 50.5),
        ({"range_spread": 0.25}, (75, 125), (7, 13), 100.0),
    ],
)
def test_lengths_are_drawn_from_a_range(
    changes: dict[str, float], inputs: tuple[int, int], outputs: tuple[int, int], mean: float
) -> None:
    sampled = traffic(Load(input_len=100, output_len=10, num_prompts=4000, concurrency=1, **changes))  # type: ignore[arg-type]
    assert (sampled.input_len.min(), sampled.input_len.max()) == inputs
    assert (sampled.output_len.min(), sampled.output_len.max()) == outputs
    assert sampled.input_len.mean() == pytest.approx(mean, rel=0.02)


def test_lognormal_lengths_have_the_given_means() -> None:
    load = Load(input_len=200, output_len=50, num_prompts=1000, concurrency=1, distribution="lognormal")
    sampled = traffic(load)
    assert sampled.input_len.mean() == pytest.approx(200, rel=0.01)
    assert sampled.output_len.mean() == pytest.approx(50, rel=0.01)
    assert (sampled.input_len.min() >= 1, sampled.input_len.max()) == (True, 1000)
    assert np.median(sampled.input_len) < 120
    assert traffic(replace(load, output_len=281, longest=4096)).output_len.max() > 5 * 281
    assert np.unique(traffic(replace(load, input_len=1, num_prompts=3)).input_len).tolist() == [1]


@pytest.mark.parametrize(("answer", "longest"), [(200, None), (281, 4096)])
def test_chats_are_whole_if_their_answers_are_longer_than_filtered_ones(answer: int, longest: int | None) -> None:
    serve = {"engine": "toy", "precision": "bf16", "input_len": 300, "output_len": answer, "concurrency": 8}
    cluster = {"chip": "H200", "devices": 1, "devices_per_node": 1}
    record = {"id": "1", "kind": "serve", "model": "Qwen/Qwen3-8B", "cluster": cluster, "dataset": "ShareGPT"}
    record |= {"serve": serve, "candidate": {}}
    _, fields = read_record(record, {**record}, serve, ())
    assert [(load.distribution, load.longest) for load in fields["work"].loads] == [("lognormal", longest)]


def test_lengths_of_prompts_and_answers_are_independent() -> None:
    sampled = traffic(Load(input_len=1000, output_len=1000, num_prompts=100, concurrency=1, range_ratio=0.0))
    assert abs(np.corrcoef(sampled.input_len, sampled.output_len)[0, 1]) < 0.5


def test_load_of_another_seed_has_other_lengths() -> None:
    one, other = (
        traffic(Load(input_len=1000, num_prompts=10, concurrency=1, range_ratio=0.0, seed=seed)) for seed in (0, 1)
    )
    assert one.input_len.tolist() != other.input_len.tolist()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, 100.0])
def test_the_mean_rate_is_exact_and_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    at = arrivals(request_rate=20.0, burstiness=burstiness)
    gaps = np.diff(at)
    assert at[0] == 0
    assert gaps.mean() == pytest.approx(1 / 20)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def prompts_of(requests: Traffic, seed: int = 0, prefix_len: int = 0, vocab_size: int = 10_000) -> list[list[int]]:
    return [ids.tolist() for ids in prompts(requests, prefix_len=prefix_len, vocab_size=vocab_size, seed=(3, seed))]


def test_prompts_have_their_lengths_and_no_id_from_the_ends_of_the_vocabulary() -> None:
    sampled = traffic(Load(input_len=500, num_prompts=20, concurrency=1, range_ratio=0.1))
    found = prompts_of(sampled)
    assert [len(ids) for ids in found] == sampled.input_len.tolist()
    everything = {one for ids in found for one in ids}
    assert min(everything) >= 1000
    assert max(everything) < 9000


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    found = prompts_of(traffic(Load(input_len=50, prefix_len=30, num_prompts=20, concurrency=1)), prefix_len=30)
    assert len({tuple(ids[:30]) for ids in found}) == 1
    assert len({tuple(ids[30:40]) for ids in found}) == 20


def test_prompts_of_another_seed_share_no_prefix() -> None:
    sampled = traffic(Load(input_len=50, prefix_len=30, num_prompts=20, concurrency=1))
    starts = [{tuple(ids[:8]) for ids in prompts_of(sampled, seed, prefix_len=30)} for seed in (0, 1)]
    assert not starts[0] & starts[1]


def test_warm_up_has_the_prefix_of_the_load_and_different_prompts() -> None:
    sampled = traffic(Load(input_len=50, prefix_len=30, num_prompts=2, concurrency=1))
    found = prompts_of(sampled, prefix_len=30)
    drawn_first = prompts(warm_up(sampled, 5), prefix_len=30, vocab_size=10_000, seed=(3, 0), warm_up=True)
    warm = [ids.tolist() for ids in drawn_first]
    assert [len(ids) for ids in warm] == [80] * 5
    assert {tuple(ids[:30]) for ids in warm} == {tuple(found[0][:30])}
    assert not {tuple(ids) for ids in warm} & {tuple(ids) for ids in found}
    assert len({tuple(ids) for ids in warm}) == 5


def test_equal_blocks_of_a_trace_are_equal_ids_and_others_are_not() -> None:
    sampled = Traffic(
        input_len=np.array([1000, 600, 512]),
        output_len=np.array([1, 1, 1]),
        arrive_s=None,
        blocks=((1, 2), (1, 3), (2,)),
    )
    one, two, three = prompts_of(sampled)
    assert one[:512] == two[:512]
    assert one[512:600] != two[512:600]
    assert three[:488] == one[512:1000]
    assert [len(one), len(two), len(three)] == [1000, 600, 512]


def test_turns_continue_the_prompt_and_the_answer_before() -> None:
    sampled = traffic(Load(input_len=10, output_len=4, prefix_len=3, turns=3, num_prompts=5, concurrency=2))
    assert given(sampled.follows).tolist() == [-1, 0, 1, -1, 3]
    assert sampled.input_len.tolist() == [13, 27, 41, 13, 27]
    ids = prompts(sampled, prefix_len=3, vocab_size=1000, seed=(0, 1))
    assert [each.size for each in ids] == sampled.input_len.tolist()
    assert ids[2][:27].tolist() == ids[1].tolist()
    assert ids[3][3:].tolist() != ids[0][3:].tolist()


def test_request_rate_of_conversations_counts_all_their_requests() -> None:
    sampled = traffic(Load(turns=4, num_prompts=4000, request_rate=8.0))
    assert sampled.arrive_s is not None
    assert np.unique(sampled.arrive_s).size == 1000
    assert sampled.arrive_s[-1] == pytest.approx(4000 / 8.0, rel=0.01)


def test_fewer_conversations_than_clients_are_noted() -> None:
    assert traffic(Load(turns=4, num_prompts=16, concurrency=8)).notes
    assert not traffic(Load(turns=4, num_prompts=32, concurrency=8)).notes
