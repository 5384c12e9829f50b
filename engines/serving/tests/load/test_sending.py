"""What servers see of a load: how many requests at once, when, which instance, and their contents."""

import asyncio
import json
import math
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from flagcore_serving.job import Load
from flagcore_serving.load.result import LoadResult, Target
from flagcore_serving.load.routing import BOOTSTRAP, MAX_MORE, NIXL, P2P, Prefixes, pieces_of
from flagcore_serving.load.sending import LATE_S, measure

from engines.serving.tests.load.servers import (
    Behaviour,
    Body,
    RequestTimes,
    Wire,
    after_each_answer,
    finish,
    pieces,
    send,
    serving,
    well,
)
from tests.checks import refuses


def sent_to(*urls: str, seed: int = 0, prefix_aware: bool = False, **changes: Any) -> LoadResult:
    load = Load(**{"input_len": 8, "output_len": 5, "num_prompts": 12, "concurrency": 4} | changes)
    result = send(*urls, load=load, seed=seed, prefix_aware=prefix_aware)
    assert result.problems == ()
    return result


async def in_turn(body: Body, wire: Wire) -> None:
    """Give up the loop between pieces, so that requests overlap."""
    await wire.head()
    for _ in range(body["max_tokens"]):
        await pieces(1, wire)
        await asyncio.sleep(0.002)
    await finish(body, wire)


def test_request_asks_for_exactly_its_tokens_streamed_and_counted_from_token_ids() -> None:
    with serving(well) as served:
        sent_to(served.url + "/", num_prompts=1, concurrency=1)
    (request,) = served.bodies
    assert len(request.pop("prompt")) == 8
    assert request == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("arrivals", "in_flight"), [({"concurrency": 4}, 4), ({"request_rate": math.inf, "concurrency": 3}, 3)]
)
def test_a_load_keeps_its_concurrency_and_never_exceeds_it(arrivals: dict[str, Any], in_flight: int) -> None:
    with serving(in_turn) as served:
        result = sent_to(served.url, **arrivals)
    assert served.max_in_flight == in_flight
    assert len(served.bodies) == result.completed == len(result.requests) == 12


def test_burst_sends_all_at_once() -> None:
    waiting: list[asyncio.Event] = []

    async def waits_for_all(body: Body, wire: Wire) -> None:
        waiting.append(asyncio.Event())
        if len(waiting) == 12:
            for event in waiting:
                event.set()
        await waiting[-1].wait()
        await well(body, wire)

    with serving(waits_for_all) as served:
        sent_to(served.url, concurrency=None, request_rate=math.inf)
    assert served.max_in_flight == 12


def test_request_goes_to_the_instance_with_the_fewest_in_flight() -> None:
    released = threading.Event()

    async def holds_until_the_other_had_nine(body: Body, wire: Wire) -> None:
        while not released.is_set():
            await asyncio.sleep(0.001)
        await well(body, wire)

    async def counts(body: Body, wire: Wire) -> None:
        await well(body, wire)
        if len(quick.bodies) == 9:
            released.set()

    with serving(holds_until_the_other_had_nine) as slow, serving(counts) as quick:
        result = sent_to(slow.url, quick.url, concurrency=2, num_prompts=10)
    assert len(slow.bodies) == 1
    assert sorted(answer.target for answer in result.requests) == [0] + [1] * 9
    assert result.figures["requests_per_s"] == pytest.approx(10 / result.duration_s)
    assert result.figures["client_cpu_s"] > 0
    assert result.figures["others_cores"] >= 0


def test_warm_up_comes_first_and_does_not_count() -> None:
    with serving(well) as served:
        result = sent_to(served.url, warmup=3, prefix_len=4)
    assert len(served.bodies) == 15
    assert result.completed == 12
    prompts = [tuple(request["prompt"]) for request in served.bodies]
    assert len(set(prompts)) == 15
    assert len({prompt[:4] for prompt in prompts}) == 1


@pytest.mark.parametrize(
    ("load", "key"),
    [
        (Load(num_prompts=None, concurrency=1), "num_prompts"),
        (Load(num_prompts=0, concurrency=1), "num_prompts"),
        (Load(num_prompts=1), "concurrency"),
    ],
)
def test_load_that_cannot_be_sent_reports_which_key_is_missing(load: Load, key: str) -> None:
    with refuses(key):
        send("http://127.0.0.1:1", load=load)


def test_the_limit_of_open_files_is_raised_for_more_connections() -> None:
    arrived = 0

    async def waits_for_all(body: Body, wire: Wire) -> None:
        nonlocal arrived
        arrived += 1
        while arrived < 80:
            await asyncio.sleep(0.001)
        await well(body, wire)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        with serving(waits_for_all) as served:
            sent_to(served.url, num_prompts=80, concurrency=None, request_rate=math.inf)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert served.max_in_flight == 80


def test_request_that_is_sent_late_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def block_the_client(done: int) -> None:
        if done == 1:
            time.sleep(2 * LATE_S + 0.1)

    after_each_answer(monkeypatch, block_the_client)
    with serving(well) as served:
        result = sent_to(served.url, num_prompts=6, concurrency=None, request_rate=50.0)
    assert [note for note in result.notes if " s late" in note]


def test_texts_are_sent_as_texts_and_their_tokens_are_counted_by_the_server(tmp_path: Path) -> None:
    trace = tmp_path / "a.jsonl"
    trace.write_text('{"prompt": "one two", "max_tokens": 3}\n{"prompt": "one three", "max_tokens": 3}')
    with serving(well) as served:
        results = [sent_to(served.url, seed=seed, trace=str(trace), num_prompts=2, concurrency=1) for seed in (1, 2)]
    prompts = [request["prompt"] for request in served.bodies]
    assert [prompt.split("\n")[1] for prompt in prompts] == ["one two", "one three"] * 2
    first, second = ({prompt.split("\n")[0] for prompt in prompts[at : at + 2]} for at in (0, 2))
    assert len(first) == len(second) == 1
    assert first != second
    assert [answer.input_tokens for answer in results[0].requests] == [len(prompt) for prompt in prompts[:2]]


@pytest.mark.parametrize("arrivals", [{"concurrency": 2}, {"concurrency": None, "request_rate": 200.0}])
def test_turn_is_sent_after_the_answer_to_the_turn_before(arrivals: dict[str, Any]) -> None:
    with serving(in_turn) as served:
        result = sent_to(served.url, turns=3, num_prompts=12, think_time_s=0.05, **arrivals)
    assert result.completed == 12
    by_length = sorted(result.requests, key=lambda answer: (answer.input_tokens, answer.start_s))
    first, second = by_length[:4], by_length[4:8]
    assert {answer.input_tokens for answer in first} == {8}
    assert {answer.input_tokens for answer in second} == {21}
    assert min(answer.start_s for answer in second) >= min(answer.end_s for answer in first) + 0.05


@pytest.mark.parametrize("prefix_aware", [True, False])
def test_turns_of_a_conversation_go_to_one_instance_if_the_router_is_prefix_aware(prefix_aware: bool) -> None:
    load = {"input_len": 40, "num_prompts": 48, "turns": 6, "think_time_s": 0.01}
    with serving(in_turn) as first, serving(in_turn) as second:
        sent_to(first.url, second.url, prefix_aware=prefix_aware, **load)
    starts = [{tuple(body["prompt"][:40]) for body in each.bodies} for each in (first, second)]
    assert bool(starts[0] & starts[1]) != prefix_aware
    assert min(len(each.bodies) for each in (first, second)) >= 12


DELAY_S = 0.3


def sent(url: str, requests: int) -> LoadResult:
    result = send(url, load=Load(input_len=8, output_len=5, num_prompts=requests, concurrency=requests))
    assert result.problems == ()
    return result


def test_time_to_open_a_connection_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = aiohttp.TCPConnector.connect

    async def slow(self: aiohttp.TCPConnector, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(DELAY_S)
        return await connect(self, *arguments, **options)

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", slow)
    with serving(well) as served:
        result = sent(served.url, 1)
    assert result.requests[0].e2e_s < DELAY_S


def test_answers_that_arrive_together_are_read_before_one_of_them_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    close = aiohttp.ClientResponse.release
    received, blocked = [], threading.Event()

    def slow(self: aiohttp.ClientResponse) -> Any:
        time.sleep(DELAY_S)
        return close(self)

    async def both(body: Body, wire: Wire) -> None:
        received.append(body)
        while len(received) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)  # the client is blocked while both answers arrive
        await well(body, wire)

    async def block() -> None:
        while len(received) < 2:
            await asyncio.sleep(0.001)
        if not blocked.is_set():
            blocked.set()
            time.sleep(DELAY_S)

    start = asyncio.wait

    async def wait(tasks: Any, **options: Any) -> Any:
        blocking = asyncio.create_task(block())
        done = await start(tasks, **options)
        await blocking
        return done

    monkeypatch.setattr(aiohttp.ClientResponse, "release", slow)
    monkeypatch.setattr("flagcore_serving.load.sending.asyncio.wait", wait)
    with serving(both) as served:
        result = sent(served.url, 2)
    assert max(answer.e2e_s for answer in result.requests) < 2 * DELAY_S


PARAMS = {"remote_engine_id": "7"}
LOAD = Load(input_len=16, output_len=8, num_prompts=4, concurrency=2)


def answering(data: Any = None, status: str = "200 OK") -> Behaviour:
    """A server that prefills: it answers at once."""

    async def behaviour(body: Body, wire: Wire) -> None:
        await wire.head(status, "application/json", chunked=False)
        await wire.send(json.dumps({"kv_transfer_params": PARAMS} if data is None else data).encode())

    return behaviour


@contextmanager
def pair(
    protocol: str, prefill: Behaviour, decode: Behaviour = well
) -> Iterator[tuple[LoadResult, list[RequestTimes]]]:
    """The result of LOAD, and what two servers that prefill and one that decodes got."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(each)) for each in (prefill, prefill, decode)]
        targets = [Target(url=each.url, transfer_port=9000 + number) for number, each in enumerate(servers)]
        yield (
            measure(
                targets[2:],
                LOAD,
                model="m",
                vocab_size=1000,
                seed=1,
                timeout_s=20.0,
                prefill=targets[:2],
                protocol=protocol,
            ),
            servers,
        )


@pytest.mark.parametrize("protocol", [NIXL, P2P])
def test_the_server_that_prefills_computes_the_prompt_only(protocol: str) -> None:
    with pair(protocol, answering()) as (result, servers):
        assert (result.completed, result.problems) == (4, ())
    assert len(servers[2].bodies) == len(servers[0].bodies) + len(servers[1].bodies) == 4
    assert servers[1].bodies
    prompt = servers[0].bodies[0]
    (place,) = (place for place, each in enumerate(servers[2].bodies) if each["prompt"] == prompt["prompt"])
    answer = servers[2].bodies[place]
    assert (prompt["max_tokens"], "stream" in prompt, "stream_options" in prompt) == (1, False, False)
    assert (answer["max_tokens"], answer["stream"]) == (8, True)
    assert answer.get("kv_transfer_params") == (PARAMS if protocol == NIXL else None)
    if protocol == NIXL:
        assert prompt["kv_transfer_params"]["do_remote_decode"] is True
    if protocol == P2P:
        assert servers[0].ids[0] == servers[2].ids[place]
        assert servers[0].ids[0].startswith("___prefill_addr_127.0.0.1:9000___decode_addr_127.0.0.1:9002_")


def test_both_servers_meet_by_a_number() -> None:
    with pair(BOOTSTRAP, well) as (result, servers):
        assert (result.completed, result.problems) == (4, ())
    first = [*servers[0].bodies, *servers[1].bodies]
    assert sorted(map(json.dumps, first)) == sorted(map(json.dumps, servers[2].bodies))
    assert {each["bootstrap_port"] for each in first} == {9000, 9001}
    assert {each["bootstrap_host"] for each in first} == {"127.0.0.1"}
    assert len({each["bootstrap_room"] for each in first}) == 4


@pytest.mark.parametrize(
    ("protocol", "prefill", "says"),
    [
        (NIXL, answering({"message": "too long"}, "400 Bad"), "refused: HTTP 400 Bad: too long"),
        (NIXL, answering({}), "answered without kv_transfer_params"),
        (NIXL, answering([]), "answered without kv_transfer_params"),
        (P2P, answering({"message": "no"}, "500 X"), "refused: HTTP 500 X: no"),
        (BOOTSTRAP, answering({"message": "no"}, "500 X"), "refused: HTTP 500 X: no"),
    ],
)
def test_a_failure_of_the_server_that_prefills_ends_the_load(protocol: str, prefill: Behaviour, says: str) -> None:
    async def waits(body: Body, wire: Wire) -> None:
        await wire.head()
        if protocol == BOOTSTRAP:  # for a cache that never comes
            await wire.writer.wait_closed()

    with pair(protocol, prefill, waits) as (result, servers):
        assert not result.figures
        assert says in result.problems[0]
    assert protocol == BOOTSTRAP or not servers[2].bodies


def test_a_conversation_stays_on_its_instance_and_others_go_to_the_least_busy_one() -> None:
    prefixes, turns = Prefixes(2), {name: [f"{name}{turn}" for turn in range(4)] for name in "abc"}
    assert prefixes.choose(turns["a"][:1], [0, 1]) == 0
    assert prefixes.choose(turns["b"][:1], [1, 0]) == 1
    for turn in range(2, 5):
        assert [prefixes.choose(turns[name][:turn], [3, 3]) for name in "ab"] == [0, 1]
    assert prefixes.choose(turns["c"][:1], [2, 1]) == 1


def test_a_prefix_does_not_overload_its_instance() -> None:
    prefixes = Prefixes(2)
    assert prefixes.choose(["system", "x"], [0, 0]) == 0
    assert prefixes.choose(["system", "y"], [MAX_MORE, 0]) == 0
    assert prefixes.choose(["system", "z"], [MAX_MORE + 1, 0]) == 1
    assert prefixes.choose(["system", "z"], [1, 0]) == 1


def test_pieces_of_a_prompt_include_what_is_before_them() -> None:
    first, second = pieces_of(list(range(40))), pieces_of([99, *range(1, 40)])
    assert len(first) == 2
    assert not set(first) & set(second)
    assert pieces_of("a" * 200)[:3] == pieces_of("a" * 192 + "b" * 64)[:3]
    assert pieces_of("short") == ()
