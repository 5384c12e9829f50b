"""Predicts which tokens of prompts a prefix cache has: those of earlier turns, and of blocks or texts that requests
share.

The cache keeps the most recently used parts of prompts up to its size, as vLLM (0.32: `v1/core/kv_cache_manager.py`)
and SGLang (0.5: `mem_cache/radix_cache.py`) do. Answers do not count: the next turn has the answer of the trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.serving.load.routing import Prefixes
from flagcore.engines.serving.load.traces import BLOCK, Traffic

Part = tuple[Hashable, int]
"""A part of a prompt: its identity, which includes everything before it, and its tokens."""


def prompt_parts(requests: Traffic, prefix_len: int) -> list[list[Part]]:
    """Return the parts of each prompt after the common prefix; empty if nothing else is known to be shared."""
    if requests.blocks:
        return [[(block, BLOCK) for block in blocks] for blocks in requests.blocks]
    if requests.follows is None:
        return _text_parts(requests.texts, requests.input_len.tolist()) if requests.texts else []
    parts = list[list[Part]]()
    for index, (length, before) in enumerate(zip(requests.input_len.tolist(), requests.follows.tolist(), strict=True)):
        past = parts[before] if before >= 0 else []
        parts.append([*past, (index, max(0, length - prefix_len - sum(size for _, size in past)))])
    return parts


def _text_parts(texts: Sequence[str], lengths: Sequence[int]) -> list[list[Part]]:
    """Return the parts of texts between the places where texts with the same beginning diverge."""
    cuts: list[set[int]] = [{len(text)} for text in texts]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    for direction in (order, order[::-1]):
        shared = list[int]()  # with the texts before, in ascending order
        for before, index in pairwise(direction):
            common = _common(texts[before], texts[index])
            shared = [*(each for each in shared if each < common), common]
            cuts[index].update(shared)
    parts = list[list[Part]]()
    for text, length, found in zip(texts, lengths, cuts, strict=True):
        ends = sorted(found - {0})
        tokens = [round(length * end / len(text)) for end in ends]
        sizes = np.diff([0, *tokens]).tolist()
        parts.append([(hash(text[:end]), size) for end, size in zip(ends, sizes, strict=True)])
    return parts


def _common(left: str, right: str) -> int:
    """Return the number of first characters that two texts share, by bisection."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left.startswith(right[low:middle], low) else (low, middle - 1)
    return low


def cached_tokens(prompts: Iterable[Sequence[Part]], capacity: float) -> FloatArray:
    """Return the tokens of each prompt, in order, that a cache of `capacity` tokens has from those before it."""
    cache, used, found = OrderedDict[Hashable, int](), 0, list[float]()
    for parts in prompts:
        hit, matches = 0, True
        for name, size in parts:
            matches = matches and name in cache
            hit += size * matches
            used += size - cache.pop(name, 0)
            cache[name] = size
        while used > capacity and cache:
            used -= cache.popitem(last=False)[1]
        found.append(float(hit))
    return np.array(found)


def prefix_lanes(prompts: Sequence[Sequence[Part]], lanes: int) -> IntArray:
    """Return the lane of each prompt if the router is prefix-aware and the lanes are about equally fast."""
    prefixes, counts = Prefixes(lanes), np.zeros(lanes, dtype=np.int64)
    lane_of = np.zeros(len(prompts), dtype=np.int64)
    for index, parts in enumerate(prompts):
        lane_of[index] = prefixes.choose([name for name, _ in parts], (counts - counts.min()).tolist())
        counts[lane_of[index]] += 1
    return lane_of


def turn_order(follows: IntArray, flight: int, seed: int) -> tuple[IntArray, IntArray]:
    """Return the order in which a closed loop sends the requests of conversations, and the turn of each request.

    `flight` conversations run at once, each with its next turn after its last one. Requests of the same turn are in
    random order, because the least busy instance may be any.
    """
    is_first = follows < 0
    conversation = np.cumsum(is_first) - 1
    starts = np.flatnonzero(is_first)
    turn = np.arange(follows.size) - starts[conversation]
    shuffled = np.random.default_rng([seed, 3]).random(follows.size)
    return np.lexsort((shuffled, turn, conversation // max(flight, 1))), turn
