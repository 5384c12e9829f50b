"""The router of instances that only prefill or only decode, in front of small servers that write down what they get."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from flagcore.engines.serving import router
from flagcore.engines.serving.router import MAX_MORE, PREFIX, Place, Prefixes, Router, pieces_of, prompt_of

PARAMS = {"remote_engine_id": "7"}


class Server:
    """Answers with its name, and keeps the requests it gets."""

    def __init__(self, name: str, status: int = 200) -> None:
        self.name, self.status, self.got = name, status, list[tuple[str, dict[str, Any], str]]()
        self.data = json.dumps({"from": self.name, "kv_transfer_params": PARAMS}).encode()
        self.head = f"HTTP/1.1 {status} X"
        self.dies_after: int | None = None
        """The number of bytes of an answer before the connection is reset; None: it is not."""
        self.answers, self.left = asyncio.Event(), asyncio.Event()
        """`answers` is set when it may answer, `left` once the client has closed the connection before that."""
        self.answers.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.got.append((head.split()[1], json.loads(body or "{}"), headers.get("x-request-id", "")))
        if not self.answers.is_set():
            client = asyncio.ensure_future(reader.read(1))
            permitted = asyncio.ensure_future(self.answers.wait())
            await asyncio.wait((client, permitted), return_when=asyncio.FIRST_COMPLETED)
            permitted.cancel()
            if client.done():
                self.left.set()
                return
        answer = f"{self.head}\r\nContent-Length: {len(self.data)}\r\n\r\n".encode() + self.data
        writer.write(answer[: self.dies_after])
        if self.dies_after:
            await asyncio.sleep(0.05)  # the router has forwarded these bytes
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self.dies_after is not None:
            writer.transport.abort()
        writer.close()


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


async def idle(router: Router) -> None:
    while any(each.busy for each in (*router.prefill, *router.decode)):
        await asyncio.sleep(0.001)


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
        servers[0].answers.clear()
        answer = asyncio.ensure_future(ask(port, path="/generate", input_ids=[1]))
        while not servers[2].got or not router.decode[0].busy:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # the answer has been forwarded
        servers[0].answers.set()
        assert await answer == (200, {"from": "d0", "kv_transfer_params": PARAMS})

    routed("bootstrap", check, 503)


@pytest.mark.parametrize("dies_after", [0, 60])
def test_an_instance_that_prefills_and_dies_ends_the_request(dies_after: int) -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        servers[0].dies_after = dies_after
        servers[2].answers.clear()  # it waits for the cache
        assert (await ask(port, path="/generate", input_ids=[1]))[0] == 502
        await asyncio.wait_for(servers[2].left.wait(), 5)

    routed("bootstrap", check)


def test_a_part_of_the_place_of_the_cache_is_an_error() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        servers[0].dies_after = 60
        assert (await ask(port, prompt="a", max_tokens=8))[0] == 502

    routed("nixl", check)


@pytest.mark.parametrize("waiting", [0, 2])
def test_a_client_that_leaves_ends_its_request(waiting: int) -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        servers[waiting].answers.clear()
        client = asyncio.ensure_future(ask(port, prompt="a", max_tokens=8))
        while not servers[waiting].got:
            await asyncio.sleep(0.001)
        client.cancel()
        await asyncio.wait_for(servers[waiting].left.wait(), 5)
        await asyncio.wait_for(idle(router), 10)

    routed("folder", check)


def test_an_instance_that_failed_is_avoided() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        router.prefill[0].url = "http://127.0.0.1:1"
        found = [(await ask(port, prompt="a", max_tokens=8))[0] for _ in range(3)]
        assert found == [503, 200, 200]
        assert len(servers[1].got) == 2

    routed("folder", check)


@pytest.mark.parametrize(
    ("head", "data"),
    [
        ("HTTP/1.1 200 X", b"{}"),
        ("HTTP/1.1 200 X", b"[1]"),
        ("HTTP/1.1 200 X", b"no JSON"),
        ("HTTP/1.1 two X", b"{}"),
        ("SSH-2.0-server", b"{}"),
        ("HTTP/1.1 200 " + "x" * (1 << 17), b"{}"),
    ],
    ids=["no place", "list", "text", "no status", "other protocol", "long head"],
)
def test_an_answer_without_the_place_of_the_cache_is_an_error(head: str, data: bytes) -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        servers[0].head, servers[0].data = head, data
        status, answer = await ask(port, prompt="a", max_tokens=8)
        assert status == 502
        assert router.prefill[0].url in answer["error"]["message"]
        assert not any(each.busy for each in (*router.prefill, *router.decode))

    routed("nixl", check)


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 3\r\n\r\n[1]",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 18) + b"\r\n\r\n",
    ],
    ids=["list", "huge", "negative", "no number", "chunked", "empty", "long head"],
)
def test_an_invalid_request_has_an_answer(request_: bytes) -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_)
        assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] == b"400"
        writer.close()
        assert not any(each.got for each in servers)

    routed("folder", check)


def test_a_client_that_does_not_send_its_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "CLIENT_SECONDS", 0.05)

    async def check(port: int, servers: list[Server], router: Router) -> None:
        for part in (b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(part)
            assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] == b"400"
            writer.close()

    routed("folder", check)


def test_a_client_that_reads_nothing_leaves_its_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "CLIENT_SECONDS", 0.05)

    async def check(port: int, servers: list[Server], router: Router) -> None:
        for each in servers:
            each.data = b"x" * (32 << 20)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "a"}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        while not any(each.got for each in servers):
            await asyncio.sleep(0.001)
        await asyncio.wait_for(idle(router), 10)
        assert router.decode[0].failed_at < 0  # the instance is not to blame
        writer.close()

    routed(PREFIX, check)


@pytest.mark.parametrize(("limit", "path", "status"), [("HEALTH_SECONDS", "/health", 504), ("REQUEST_SECONDS", "", 0)])
def test_an_instance_that_does_not_answer_ends_the_request(
    limit: str, path: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, limit, 0.05)

    async def check(port: int, servers: list[Server], router: Router) -> None:
        for each in servers:
            each.answers.clear()
        if path:
            assert (await ask(port, path=path))[0] == status
        else:
            with pytest.raises((ConnectionError, IndexError)):  # the connection is closed without an answer
                await ask(port, prompt="a")
        assert not any(each.busy for each in (*router.prefill, *router.decode))

    routed("folder", check)


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


def test_a_short_prefix_does_not_decide() -> None:
    prefixes = Prefixes(2)
    prefixes.choose(["system", *range(9)], [0, 0])
    assert prefixes.choose(["system", *range(100, 109)], [1, 0]) == 1


def test_pieces_of_a_prompt_include_what_is_before_them() -> None:
    first, second = pieces_of(list(range(40))), pieces_of([99, *range(1, 40)])
    assert len(first) == 2
    assert not set(first) & set(second)
    assert pieces_of("a" * 200)[:3] == pieces_of("a" * 192 + "b" * 64)[:3]
    assert pieces_of("short") == ()


def test_the_prompt_of_a_chat_is_its_messages() -> None:
    chat = [{"role": "user", "content": "Hello"}]
    longer = [*chat, {"role": "assistant", "content": "Hi"}]
    assert prompt_of({"messages": longer}).startswith(prompt_of({"messages": chat})[:-1])  # type: ignore[union-attr, arg-type]
    assert prompt_of({"prompt": [1, 2]}) == [1, 2]
    assert prompt_of({"text": "a"}) == "a"
    assert prompt_of({}) == ""


def test_requests_with_the_same_prefix_go_to_one_instance() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        for prompt in ("a" * 200, "b" * 200, "a" * 300, "b" * 300, "a" * 400):
            assert (await ask(port, prompt=prompt))[0] == 200
        prompts = [[body["prompt"][0] for _, body, _ in each.got] for each in servers]
        assert prompts == [[], [], ["a", "a", "a"], ["b", "b"]]

    routed(PREFIX, check)


def test_an_instance_that_cannot_be_reached_loses_its_prefixes() -> None:
    async def check(port: int, servers: list[Server], router: Router) -> None:
        await ask(port, prompt="a" * 200)
        router.decode[0].url = "http://127.0.0.1:9"
        assert (await ask(port, prompt="a" * 200))[0] == 503
        assert (await ask(port, prompt="a" * 200))[1]["from"] == "d1"

    routed(PREFIX, check)
