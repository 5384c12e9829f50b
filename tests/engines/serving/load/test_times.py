"""The times of an answer are those of the server, without the work of the client."""

import asyncio
import threading
import time
from typing import Any

import aiohttp
import pytest

from flagcore.domain.serving import Load
from flagcore.engines.serving.load.result import LoadResult
from tests.engines.serving.load.servers import Body, Wire, send, serving, well

DELAY_S = 0.3


def sent(url: str, requests: int) -> LoadResult:
    load = Load(input_len=8, output_len=5, num_prompts=requests, concurrency=requests)
    result = send(url, load=load)
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
    monkeypatch.setattr("flagcore.engines.serving.load.sending.asyncio.wait", wait)
    with serving(both) as served:
        result = sent(served.url, 2)
    assert max(answer.e2e_s for answer in result.requests) < 2 * DELAY_S
