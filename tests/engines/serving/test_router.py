"""The router of instances that only prefill or only decode, in front of small servers that write down what they get."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from flagcore.engines.serving.router import Place, Router

PARAMS = {"remote_engine_id": "7"}


class Server:
    """Answers with its name, and keeps the requests it gets."""

    def __init__(self, name: str, status: int = 200) -> None:
        self.name, self.status, self.got = name, status, list[tuple[str, dict[str, Any], str]]()
        self.dies_after: int | None = None
        """The number of bytes of an answer before the connection is reset; None: it is not."""
        self.hangs = False
        """Whether the server accepts requests and never answers them."""
        self.closed = asyncio.Event()
        """Set when a client that waits for an answer has closed its connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.got.append((head.split()[1], json.loads(body or "{}"), headers.get("x-request-id", "")))
        if self.hangs:
            await reader.read()
            self.closed.set()
            return writer.close()
        data = json.dumps({"from": self.name, "kv_transfer_params": PARAMS}).encode()
        answer = f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        writer.write(answer[: self.dies_after])
        if self.dies_after:
            await asyncio.sleep(0.05)  # the router has forwarded these bytes
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self.dies_after is not None:
            writer.transport.abort()
        return writer.close()


async def ask(port: int, path: str = "/v1/completions", **body: Any) -> tuple[int, dict[str, Any]]:
    """Return status and JSON of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    method = "POST" if body else "GET"
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        answer = await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
    head, _, text = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(text or b"{}")


async def until(is_true: Callable[[], bool]) -> None:
    """Wait until a condition holds. Raises TimeoutError after 5 seconds."""

    async def poll() -> None:
        while not is_true():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), 5)


def routed(protocol: str, check: Callable[[int, list[Server], Router], Any], status: int = 200) -> None:
    """Run `check` with the port of a router, its servers (two of each kind), and the router."""

    async def run() -> None:
        servers = [Server(name, status if name == "p0" else 200) for name in ("p0", "p1", "d0", "d1")]
        started = [await asyncio.start_server(each.serve, "127.0.0.1", 0) for each in servers]
        ports = [each.sockets[0].getsockname()[1] for each in started]
        places = [Place(f"http://127.0.0.1:{port}", 9000 + number) for number, port in enumerate(ports)]
        router = Router(protocol, places[:2], places[2:])
        front = await asyncio.start_server(router.serve, "127.0.0.1", 0)
        await check(front.sockets[0].getsockname()[1], servers, router)
        for each in (front, *started):
            each.close()

    asyncio.run(run())


def test_the_instance_that_decodes_gets_the_place_of_the_cache() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        found = await ask(port, prompt=[1, 2], max_tokens=8, stream=True, stream_options={"include_usage": True})
        assert found == (200, {"from": "d0", "kv_transfer_params": PARAMS})
        (_, prompt, _), (_, answer, _) = servers[0].got[0], servers[2].got[0]
        assert (prompt["max_tokens"], "stream" in prompt) == (1, False)
        assert prompt["kv_transfer_params"]["do_remote_decode"] is True
        assert (answer["max_tokens"], answer["stream"], answer["kv_transfer_params"]) == (8, True, PARAMS)
        assert [each.busy for each in (*router.prefill, *router.decode)] == [0, 0, 0, 0]

    routed("nixl", check)


def test_both_instances_get_the_same_id_with_both_addresses() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        await ask(port, prompt="a", max_tokens=8)
        ids = {servers[0].got[0][2], servers[2].got[0][2]}
        assert len(ids) == 1
        assert ids.pop().startswith("___prefill_addr_127.0.0.1:9000___decode_addr_127.0.0.1:9002_")

    routed("p2p", check)


def test_both_instances_meet_by_a_number() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        found = await ask(port, path="/generate", input_ids=[1])
        assert found[1]["from"] == "d0"
        bodies = [servers[number].got[0][1] for number in (0, 2)]
        assert bodies[0] == bodies[1]
        assert (bodies[0]["bootstrap_host"], bodies[0]["bootstrap_port"]) == ("127.0.0.1", 9000)

    routed("bootstrap", check)


def test_requests_are_divided_evenly_and_others_go_to_one_instance() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        await asyncio.gather(*(ask(port, prompt="a", max_tokens=8) for _ in range(8)))
        assert min(len(each.got) for each in servers) >= 2
        assert (await ask(port, path="/v1/models"))[1]["from"] == "d0"
        assert (await ask(port, path="/health"))[0] == 200
        assert all(each.got[-1][0] == "/health" for each in servers)

    routed("folder", check)


@pytest.mark.parametrize("status", [400, 503])
def test_a_refusal_of_the_prompt_is_the_answer(status: int) -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        assert (await ask(port, prompt="a", max_tokens=8))[0] == status
        assert servers[2].got == []
        assert (await ask(port, path="/health"))[0] == status
        router.decode[0].url = router.decode[1].url = "http://127.0.0.1:1"
        router.prefill[0].busy = 9
        assert (await ask(port, prompt="a", max_tokens=8))[0] == 503

    routed("nixl", check, status)


def test_an_instance_that_dies_before_its_answer_is_an_error() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        servers[2].dies_after = servers[3].dies_after = 0
        assert (await ask(port, prompt="a", max_tokens=8))[0] == 502

    routed("folder", check)


def test_a_part_of_an_answer_is_not_continued_by_an_error() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        servers[2].dies_after = servers[3].dies_after = 50
        with pytest.raises(json.JSONDecodeError) as caught:
            await ask(port, prompt="a", max_tokens=8)
        assert "HTTP" not in caught.value.doc

    routed("folder", check)


def test_an_answer_is_not_followed_by_the_refusal_of_the_other_instance() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        assert await ask(port, path="/generate", input_ids=[1]) == (200, {"from": "d0", "kv_transfer_params": PARAMS})

    routed("bootstrap", check, 503)


@pytest.mark.parametrize("protocol", ["nixl", "bootstrap"])
def test_a_request_does_not_wait_for_a_lost_instance(protocol: str) -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        for each in servers[:3]:
            each.hangs = True
        asked = asyncio.create_task(ask(port, prompt="a", max_tokens=8))
        await until(lambda: bool(servers[0].got))
        watch = asyncio.create_task(router.watch(interval_s=0.02, timeout_s=0.1))
        assert (await asked)[0] == 503
        assert router.prefill[0].url in (await ask(port, prompt="a", max_tokens=8))[1]["error"]["message"]
        servers[1].hangs = False
        await until(lambda: not router.prefill[1].lost.is_set())
        assert (await ask(port, prompt="a", max_tokens=8))[1]["from"] == "d1"
        assert [each.busy for each in (*router.prefill, *router.decode)] == [0, 0, 0, 0]
        watch.cancel()

    routed(protocol, check)


def test_the_instance_that_decodes_does_not_wait_for_one_that_refuses_the_prompt() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        servers[2].hangs = True
        assert (await ask(port, path="/generate", input_ids=[1]))[0] == 503
        await asyncio.wait_for(servers[2].closed.wait(), 5)

    routed("bootstrap", check, 503)


@pytest.mark.parametrize(("protocol", "hanging"), [("nixl", 0), ("nixl", 2), ("bootstrap", 0), ("bootstrap", 2)])
def test_a_request_is_cancelled_when_its_client_disconnects(protocol: str, hanging: int) -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        servers[0].hangs, servers[2].hangs = hanging == 0 or protocol == "bootstrap", True
        asked = asyncio.create_task(ask(port, prompt="a", max_tokens=8))
        await until(lambda: bool(servers[hanging].got))
        asked.cancel()
        await asyncio.wait_for(servers[hanging].closed.wait(), 5)
        await until(lambda: not any(each.busy for each in (*router.prefill, *router.decode)))

    routed(protocol, check)
