"""Lengths, arrivals and prompts: what a load point means. Traces in the formats in which they are published, and files
that are none."""

import json
import math
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flagcore_serving.job import Load
from flagcore_serving.load import traces
from flagcore_serving.load.traces import read_trace
from flagcore_serving.load.traffic import Traffic, prompts, traffic, warm_up
from flagcore_serving.model.prompts import prompt_parts
from flagcore_serving.records import read_record

from tests.checks import given, refuses


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
    load = Load(input_len=100, output_len=10, num_prompts=4000, concurrency=1, **changes)  # type: ignore[arg-type]
    sampled = traffic(load)
    assert load.means == pytest.approx((sampled.input_len.mean(), sampled.output_len.mean()), rel=0.1)
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


@pytest.mark.parametrize(("answer", "expected"), [(200, ("chat", 2048)), (281, ("lognormal", 4096))])
def test_answers_longer_than_those_of_chats_are_the_servers_own(answer: int, expected: tuple[str, int]) -> None:
    serve = {"engine": "toy", "precision": "bf16", "input_len": 300, "output_len": answer, "concurrency": 8}
    cluster = {"chip": "H200", "devices": 1, "devices_per_node": 1}
    record = {"id": "1", "kind": "serve", "model": "Qwen/Qwen3-8B", "cluster": cluster, "dataset": "ShareGPT"}
    record |= {"serve": serve, "candidate": {}}
    _, fields = read_record(record, {**record}, serve, ())
    assert [(load.distribution, load.longest) for load in fields["work"].loads] == [expected]


def test_chats_have_the_lengths_of_sharegpt_scaled_to_the_means() -> None:
    sampled = traffic(
        Load(input_len=219, output_len=197, num_prompts=1000, concurrency=1, distribution="chat", longest=2048)
    )
    assert (sampled.input_len.mean(), sampled.output_len.mean()) == pytest.approx((219, 197), rel=0.01)
    assert np.percentile(sampled.output_len, (10, 50, 90)) == pytest.approx((11, 126, 485), rel=0.1)
    assert np.corrcoef(np.log(sampled.input_len), np.log(sampled.output_len))[0, 1] == pytest.approx(-0.45, abs=0.05)


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


MOONCAKE = [
    {"timestamp": 27000, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 27500, "input_length": 700, "output_length": 3, "hash_ids": [46, 49]},
    {"timestamp": 30000, "input_length": 512, "output_length": 9, "hash_ids": [46]},
]
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 400}]},
    {"id": "b", "conversations": [{"from": "human", "value": "left out: nobody answers"}]},
    {
        "id": "c",
        "conversations": [{"from": "human", "value": "z" * 7}, {"from": "gpt", "value": "w"}, {"from": "human"}],
    },
]


def written(folder: Path, rows: Iterable[Any] | str, name: str = "trace.jsonl") -> str:
    file = folder / name
    file.write_text(rows if isinstance(rows, str) else "\n".join(json.dumps(row) for row in rows) + "\n")
    return str(file)


def columns(trace: Traffic) -> tuple[list[int], list[int], list[float] | None]:
    times = None if trace.arrive_s is None else trace.arrive_s.tolist()
    return trace.input_len.tolist(), trace.output_len.tolist(), times


@pytest.mark.parametrize("rows", [MOONCAKE, MOONCAKE[::-1]])
def test_mooncake_gives_lengths_seconds_and_blocks_by_time(rows: list[Any], tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, rows))
    assert columns(trace) == ([1100, 700, 512], [52, 3, 9], [0.0, 0.5, 3.0])
    assert list(trace.blocks) == [(46, 47, 48), (46, 49), (46,)]
    assert trace.notes == ()


def test_sharegpt_lengths_are_estimated_from_characters_and_reported_as(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, SHAREGPT))
    assert columns(trace) == ([10, 2], [100, 1], None)
    assert trace.is_estimated
    assert len(trace.notes) == 1


def test_load_takes_lengths_and_times_of_the_requests_that_it_sends(tmp_path: Path) -> None:
    sampled = traffic(Load(trace=written(tmp_path, MOONCAKE), num_prompts=2, prefix_len=10))
    assert sampled.input_len.tolist() == [1110, 710]
    assert given(sampled.arrive_s).tolist() == [0.0, 0.5]
    assert list(sampled.blocks) == [(46, 47, 48), (46, 49)]


def test_without_a_number_the_whole_trace_is_sent_and_a_number_too_large_is_reported(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    assert traffic(Load(trace=path, num_prompts=None)).input_len.size == 3
    assert traffic(Load(trace=path, num_prompts=9)).notes == ("the trace has only 3 of 9 requests",)


def test_trace_without_times_needs_a_rate_or_a_concurrency(tmp_path: Path) -> None:
    with refuses("concurrency"):
        traffic(Load(trace=written(tmp_path, SHAREGPT)))


@pytest.mark.parametrize(
    ("content", "name", "problem"),
    [
        ("", "a.jsonl", "it is empty"),
        ('{"input_length": 5, "output_length": 5}\n{"inp', "a.jsonl", "neither JSON nor JSON lines (line 2)"),
        ('{"question": "a"}', "a.jsonl", "row 1 has none of prompt, text, conversations, messages, input_len"),
        ('{"input_length": 5}', "a.jsonl", "row 1 lacks output_len"),
        ('{"input_length": 0, "output_length": 5}', "a.jsonl", "row 1: input_length is 0, not a count of tokens"),
        ('{"input_length": 9, "output_length": 5, "timestamp": NaN}', "a.jsonl", "timestamp is nan, not a number"),
        (
            '{"input_length": 600, "output_length": 5, "hash_ids": [1]}',
            "a.jsonl",
            "1 hash_ids of 512 tokens do not cover",
        ),
        ('{"input_length": 6, "output_length": 5, "hash_ids": "1"}', "a.jsonl", "hash_ids is not a list of counts"),
        (
            '{"input_length": 6, "output_length": 5, "timestamp": 0}\n{"input_length": 6, "output_length": 5}',
            "a.jsonl",
            "row 2: timestamp is None, not a number",
        ),
        (
            '{"input_length": 6, "output_length": 5, "hash_ids": [1]}\n{"input_length": 6, "output_length": 5}',
            "a.jsonl",
            "row 2: hash_ids is not a list of counts",
        ),
        (
            '{"input_length": 6, "output_length": 5, "timestamp": 0}\n'
            '{"input_length": 6, "output_length": 5, "timestamp": 1e18}',
            "a.jsonl",
            "span more than a year",
        ),
        ('{"prompt": ["a"], "max_tokens": 5}', "a.jsonl", "row 1: prompt is ['a'], not a string"),
        ('{"requests": [{"in": 5, "out": 1}]}', "a.jsonl", "row 1 lacks block_size"),
        ('{"block_size": 8, "requests": [{"in": 5, "out": 1, "hash_ids": 5}]}', "a.jsonl", "hash_ids is 5, not a list"),
        (f'{{"input_length": {"9" * 400}, "output_length": 5}}', "a.jsonl", "row 1: input_length is 999"),
        ('{"messages": [{"role": "user", "content": [{"text": "a"}]}]}', "a.jsonl", "row 1 has a turn whose"),
        ('{"conversations": "a"}', "a.jsonl", "row 1 has no list of turns"),
        ('{"conversations": [{"value": "a"}]}', "a.jsonl", "has no request with both lengths"),
    ],
)
def test_an_invalid_trace_file_is_reported_with_row_and_reason(
    content: str, name: str, problem: str, tmp_path: Path
) -> None:
    with refuses("serve.profile.trace") as error:
        read_trace(written(tmp_path, content, name))
    assert problem in str(error.value)


def test_texts_may_contain_unicode_line_separators(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "one\u2028two\x85"}, {"from": "gpt", "value": "abcd\u2029efg"}]
    row = json.dumps({"conversations": turns}, ensure_ascii=False)
    assert columns(read_trace(written(tmp_path, f"{row}\n{row}\n"))) == ([3, 3], [2, 2], None)


def test_half_a_character_becomes_a_replacement_that_utf8_can_have(tmp_path: Path) -> None:
    (text,) = read_trace(written(tmp_path, '{"prompt": "a\\ud83d", "max_tokens": 2}')).texts
    assert text == "a\ufffd"


def test_prompts_and_conversations_are_texts(tmp_path: Path) -> None:
    later = {"prompt": "a" * 8, "max_tokens": 5, "timestamp": 2000}
    first = {"prompt": "b", "output_len": 6, "input_len": 3, "timestamp": 1500}
    trace = read_trace(written(tmp_path, [later, first]))
    assert columns(trace) == ([3, 2], [6, 5], [0.0, 0.5])
    assert list(trace.texts) == ["b", "a" * 8]
    turns = [("system", "rules"), ("user", "question"), ("assistant", "answers"), ("user", "more")]
    chat = {"messages": [{"role": role, "content": content} for role, content in turns]}
    trace = read_trace(written(tmp_path, [chat]))
    assert (list(trace.texts), columns(trace)) == (["rules\nquestion"], ([4], [2], None))


def test_a_prefix_of_token_ids_cannot_precede_texts(tmp_path: Path) -> None:
    file = written(tmp_path, [{"prompt": "a", "max_tokens": 5}])
    with refuses("serve.profile.prefix_len"):
        traffic(Load(trace=file, concurrency=1, prefix_len=8))


def test_turns_of_conversations_contain_all_turns_before(tmp_path: Path) -> None:
    messages = [("human", "a b"), ("gpt", "c"), ("human", "d"), ("gpt", "e f g h"), ("human", "unanswered")]
    row = {"conversations": [{"from": role, "value": text} for role, text in messages]}
    other = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    path = written(tmp_path, json.dumps([row, other]), "a.json")
    trace = read_trace(path, turns=8)
    assert trace.texts == ["a b", "a b\nc\nd", "x"]
    assert given(trace.follows).tolist() == [-1, 0, -1]
    assert trace.output_len.tolist() == [1, 2, 1]
    assert read_trace(path).texts == ["a b", "x"]
    assert read_trace(path).follows is None


def test_prompts_without_the_length_of_an_answer_have_that_of_the_load(tmp_path: Path) -> None:
    rows = [{"prompt": "a b"}, {"prompt": "", "max_tokens": 9}, {"prompt": "c", "max_tokens": 7}]
    trace = read_trace(written(tmp_path, "\n".join(map(json.dumps, rows))), output_len=30)
    assert trace.output_len.tolist() == [30, 7]
    assert any("output_len = 30" in note for note in trace.notes)


SESSIONS = [
    {"session_id": "a", "timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
    {"session_id": "b", "timestamp": 500, "input_length": 512, "output_length": 6, "hash_ids": [1]},
    {"session_id": "a", "delay": 250, "input_length": 1200, "output_length": 7, "hash_ids": [1, 2, 3]},
]
CALLS = [
    {"type": "s", "t": t, "in": size, "out": 4, "hash_ids": [*range(size // 64)], "think_time": 2}
    for t, size in ((0, 130), (9, 260))
]
AGENT = {
    "block_size": 64,
    "requests": [CALLS[0], {"type": "subagent", "t": 3, "requests": [{**CALLS[0], "hash_ids": [7]}]}, CALLS[1]],
}


def test_sessions_and_agents_are_conversations_with_waits_and_shared_blocks(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, SESSIONS), turns=9)
    assert columns(trace) == ([512, 600, 1200], [6, 5, 7], [0.0, 0.5, 0.5])
    assert (given(trace.follows).tolist(), given(trace.wait_s).tolist()) == ([-1, -1, 1], [0.0, 0.0, 0.25])
    trace = read_trace(written(tmp_path, [AGENT, AGENT]), turns=9)
    assert given(trace.follows).tolist() == [-1, 0, 1, -1, 3, 4]
    assert given(trace.wait_s).tolist() == [0.0, 2.0, 2.0] * 2
    first, sub_agent, last, other, *_ = prompts(trace, prefix_len=0, vocab_size=1000, seed=(1,))
    assert (first[:128] == last[:128]).all()
    assert not (first[:64] == sub_agent[:64]).all()
    assert not (first[:64] == other[:64]).all(), "blocks of another agent"
    assert [part[1] for part in prompt_parts(trace, 0)[2]] == [64, 64, 64, 64, 4]


def test_a_long_conversation_is_read_up_to_its_turns(tmp_path: Path) -> None:
    """Each prompt contains all before it, so all prompts of this file together have 200 MB."""
    row = {"conversations": [{"from": ("human", "gpt")[place % 2], "value": "x" * 100} for place in range(2_800)]}
    file = written(tmp_path, [row])
    tracemalloc.start()
    try:
        trace = read_trace(file, turns=3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert given(trace.follows).tolist() == [-1, 0, 1]
    assert peak < 20e6


def test_a_turn_has_at_least_the_tokens_of_the_turn_before(tmp_path: Path) -> None:
    row = {"input_len": 5000, "conversations": [{"from": who, "value": "a" * 40} for who in ("human", "gpt") * 2]}
    assert read_trace(written(tmp_path, [row]), turns=2).input_len.tolist() == [5000, 5000]


@pytest.mark.parametrize("join", ["\n".join, lambda rows: f"[{', '.join(rows)}]"])
def test_a_trace_larger_than_memory_is_read_a_row_at_a_time(
    join: Callable[[list[str]], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "x" * 50_000}]
    file = written(tmp_path, join([json.dumps({"conversations": turns})] * 200))
    tracemalloc.start()
    try:
        assert set(read_trace(file).output_len.tolist()) == {12_500}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 7e6, "the file has 10 MB"
    assert read_trace(file, most=3).input_len.size == 3
    monkeypatch.setattr(traces, "MOST_PART", 1 << 14)
    with refuses("serve.profile.trace", match="more than 16,384 characters"):
        read_trace(written(tmp_path, '{"prompt": "' + "x" * (1 << 21)))


@pytest.mark.parametrize(
    ("limit", "row"),
    [
        ("MOST_REQUESTS", {"input_len": 1, "output_len": 1}),
        ("MOST_BLOCKS", {"input_length": 512, "output_length": 1, "hash_ids": [1]}),
        ("MOST_TEXT", {"prompt": "a", "max_tokens": 1}),
    ],
)
def test_a_trace_has_no_more_requests_than_memory_allows(
    limit: str, row: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, limit, 2)
    assert read_trace(written(tmp_path, [row] * 2)).input_len.size == 2
    with refuses("serve.profile.trace"):
        read_trace(written(tmp_path, [row] * 3))
