"""Chooses the server for each request as a production router would, so that trials need no router."""

from collections.abc import Hashable, Sequence

ENCODE, PREFILL, DECODE = "encode", "prefill", "decode"
"""Kinds of servers that only encode images, only prefill or only decode."""
NIXL, P2P, BOOTSTRAP = "nixl", "p2p", "bootstrap"
"""How the decode server finds the cache of a prompt. NIXL: the answer of the prefill server says where it is. P2P: the
request's id contains the addresses of both servers. BOOTSTRAP: both servers get the request at the same time, with a
common number."""
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


class LeastBusy:
    """Chooses the instance with the fewest requests in flight.

    Ties go to the instance that got the fewest requests so far. `busy`: the requests in flight on each of `count`
    instances.
    """

    def __init__(self, count: int) -> None:
        self.busy, self._sent = [0] * count, [0] * count

    def choose(self) -> int:
        """Return the index of an instance."""
        return min(range(len(self.busy)), key=lambda index: (self.busy[index], self._sent[index]))

    def begin(self, index: int) -> None:
        """Record that the instance `index` got a request."""
        self.busy[index] += 1
        self._sent[index] += 1

    def end(self, index: int) -> None:
        """Record that a request to the instance `index` was answered or failed."""
        self.busy[index] -= 1


class Prefixes:
    """Chooses one of `count` instances for each prompt, by the prefixes of the prompts that each instance got before.

    A prompt is given as a sequence of pieces, each identified by a hash of itself and all pieces before it.
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
