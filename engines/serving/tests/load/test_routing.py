"""Which server gets a request: by prefixes, or two servers, of which one only prefills and one only decodes."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from flagcore_serving.load.result import LoadResult, Target
from flagcore_serving.load.routing import BOOTSTRAP, MAX_MORE, NIXL, P2P, Prefixes, pieces_of
from flagcore_serving.load.sending import measure

from engines.serving.tests.load.servers import Behaviour, Body, RequestTimes, Wire, serving, well
from flagcore.domain.serving import Load

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
        addresses = "___prefill_addr_127.0.0.1:9000___decode_addr_127.0.0.1:9002_"
        assert servers[0].ids[0].startswith(addresses)


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
