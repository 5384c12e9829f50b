"""Decides which of several servers gets a request, as a production router would. Trials therefore need no router.

`Prefixes` chooses by the prefixes of prompts, so that prefix caches are used. `Pairs` sends a request to a server that
only prefills and to one that only decodes.

Sources of the protocols: vllm 0.32 `distributed/kv_transfer/kv_connector/v1/nixl`, vllm 0.23
`v1/p2p/p2p_nccl_connector.py` (addresses in the request's id), sglang 0.5.23 `srt/disaggregation` (bootstrap room).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flagcore.engines.serving.load.result import ProblemKind, RequestFailed, Target
from flagcore.engines.serving.load.stream import Stream

if TYPE_CHECKING:
    import aiohttp

PREFILL, DECODE = "prefill", "decode"
"""Kinds of servers that only prefill or only decode."""
NIXL, P2P, BOOTSTRAP = "nixl", "p2p", "bootstrap"
"""How the decode server finds the cache of a prompt. NIXL: the answer of the prefill server says where it is. P2P: the
request's id contains the addresses of both servers. BOOTSTRAP: both servers get the request at the same time, with a
common number."""
_REMOTE_KEYS = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(_REMOTE_KEYS)}
PIECE_TOKENS, PIECE_CHARACTERS = 16, 64
"""Size of a piece of a prompt, in tokens or, for texts, in characters. Only whole pieces are stored."""
MIN_MATCH = 0.3
"""Minimum share of a prompt that matches the earlier prompts of an instance if the instance is chosen by prefix, as in
vllm-router 0.1.17 and sglang-router 0.3.2.
"""
MAX_RATIO, MAX_MORE = 1.5, 4
"""An instance is not chosen by prefix if it has more than `MAX_RATIO` x the requests of the least busy instance +
`MAX_MORE`. A choice: the routers' own limit of 64 more requests would leave small instances idle."""
MAX_PIECES = 1 << 18
"""Maximum number of stored pieces per instance. The least recently used pieces are removed."""


class Prefixes:
    """Chooses one of `count` instances for each prompt, by the prefixes of the prompts that each instance got before.

    A prompt is a sequence of pieces; the identity of a piece includes all pieces before it.
    """

    def __init__(self, count: int) -> None:
        self._seen: list[dict[Hashable, None]] = [{} for _ in range(count)]

    def choose(self, pieces: Sequence[Hashable], busy: Sequence[float]) -> int:
        """Return the index of the instance for a prompt: the one with the longest prefix, or else the least busy one.

        `busy`: the number of requests that each instance has.
        """
        most = MAX_RATIO * min(busy) + MAX_MORE
        matches = [0] * len(busy)  # the number of pieces at the start of the prompt that each instance got before
        for index, seen_pieces in enumerate(self._seen):
            if busy[index] <= most:
                matches[index] = next(
                    (place for place, each in enumerate(pieces) if each not in seen_pieces), len(pieces)
                )
        min_matches = max(matches) if max(matches) >= MIN_MATCH * len(pieces) else 0
        suitable = [index for index, match in enumerate(matches) if match >= min_matches]
        chosen = min(suitable, key=lambda index: (busy[index], len(self._seen[index])))
        seen_pieces = self._seen[chosen]
        for piece in pieces:
            seen_pieces.pop(piece, None)
            seen_pieces[piece] = None
        while len(seen_pieces) > MAX_PIECES:
            del seen_pieces[next(iter(seen_pieces))]
        return chosen


def pieces_of(prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Return the identities of the pieces of a prompt, without an incomplete last piece."""
    size = PIECE_CHARACTERS if isinstance(prompt, str) else PIECE_TOKENS
    pieces, last = list[int](), 0
    for end in range(size, len(prompt) + 1, size):
        piece = prompt[end - size : end]
        last = hash((last, piece if isinstance(piece, str) else tuple(piece)))
        pieces.append(last)
    return tuple(pieces)


class Pairs:
    """Sends each request to the least busy of the servers `prefill`, and to the server that decodes its answer."""

    def __init__(self, protocol: str, prefill: Sequence[Target]) -> None:
        self._protocol, self._prefill = protocol, prefill
        self._busy, self._sent = [0] * len(prefill), [0] * len(prefill)

    async def send(self, http: aiohttp.ClientSession, decode: Target, body: bytes, stream: Stream) -> float:
        """Send one request to both servers and feed the answer of the server `decode` to `stream`.

        Returns the `time.perf_counter()` of the first send. Raises RequestFailed.
        """
        from flagcore.engines.serving.load.client import post, send_request

        place = min(range(len(self._busy)), key=lambda index: (self._busy[index], self._sent[index]))
        prefill, request, headers = self._prefill[place], json.loads(body), dict[str, str]()
        self._busy[place] += 1
        self._sent[place] += 1
        try:
            if self._protocol == BOOTSTRAP:
                host = urlsplit(prefill.url).hostname
                room = {"bootstrap_host": host, "bootstrap_port": prefill.transfer_port}
                body_for_both = _encoded({**request, **room, "bootstrap_room": random.getrandbits(62)})
                first = asyncio.ensure_future(post(http, prefill.address, body_for_both))
                second = asyncio.ensure_future(send_request(http, decode.address, body_for_both, stream))
                try:  # cancel both if one fails, because the other one would wait for it
                    return (await asyncio.gather(first, second))[1]
                finally:
                    first.cancel()
                    second.cancel()
            if self._protocol == P2P:
                places = [f"{urlsplit(each.url).hostname}:{each.transfer_port}" for each in (prefill, decode)]
                addresses = "___prefill_addr_{}___decode_addr_{}".format(*places)
                headers["X-Request-Id"] = f"{addresses}_{uuid.uuid4().hex}"
            sent = time.perf_counter()
            answer = await post(http, prefill.address, _encoded(self._prompt_only(request)), headers)
        finally:
            self._busy[place] -= 1
        if self._protocol == NIXL:
            request["kv_transfer_params"] = _transfer_params(answer, prefill.url)
        await send_request(http, decode.address, _encoded(request), stream, headers)
        return sent

    def _prompt_only(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the request for the prefill server. Its answer has one token, which is not used."""
        dropped = ("stream", "stream_options")
        prompt = {key: value for key, value in request.items() if key not in dropped} | {"max_tokens": 1}
        return prompt | ({"kv_transfer_params": _REMOTE_DECODE} if self._protocol == NIXL else {})


def _transfer_params(answer: bytes, url: str) -> Any:
    """Return the location of a prompt's cache from the answer of the prefill server at `url`. Raises RequestFailed."""
    try:
        params = json.loads(answer)["kv_transfer_params"]
    except (ValueError, LookupError, TypeError):
        params = None
    if params is None:
        raise RequestFailed(ProblemKind.BROKEN, f"{url} answered without kv_transfer_params")
    return params


def _encoded(request: dict[str, Any]) -> bytes:
    return json.dumps(request, separators=(",", ":")).encode()
