"""Prompts as token ids: fresh ones by seed, so that no repeat finds its prompts in a server's prefix cache."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from flagcore.domain.space import IntArray
from flagcore.engines.serving.load.result import COMPLETIONS, GENERATE
from flagcore.engines.serving.load.traces import BLOCK
from flagcore.engines.serving.load.traffic import Traffic
from flagcore.errors import SpecError

LOWEST, HIGHEST = 0.1, 0.9
"""Ids are drawn between these shares of the vocabulary: special ids, bytes and padding are at its ends."""

_PREFIX, _PROMPT, _BLOCK, _WARMUP = range(4)


def prompts(traffic: Traffic, *, prefix_len: int, vocab_size: int, seed: Sequence[int]) -> list[IntArray]:
    """Return the token ids of each request. The same seed gives the same, another seed shares nothing with it.

    The first `prefix_len` ids are the same in all requests; equal blocks of a trace are equal ids.
    """
    prefix = _draw(prefix_len, vocab_size, (*seed, _PREFIX))
    rng = np.random.default_rng((*seed, _PROMPT))
    low, high = _range(vocab_size)
    if not traffic.blocks:
        own = [rng.integers(low, high, size=length - prefix_len) for length in traffic.input_len]
    else:
        known = {block for blocks in traffic.blocks for block in blocks}
        drawn = {block: _draw(BLOCK, vocab_size, (*seed, _BLOCK, block)) for block in known}
        own = [
            np.concatenate([drawn[block] for block in blocks])[: length - prefix_len]
            for blocks, length in zip(traffic.blocks, traffic.input_len, strict=True)
        ]
    return [np.concatenate([prefix, ids]) for ids in own]


def warmup_prompts(
    traffic: Traffic, count: int, *, prefix_len: int, vocab_size: int, seed: Sequence[int]
) -> list[IntArray]:
    """Return `count` prompts with the lengths and the prefix of the load's first requests, and ids of their own."""
    prefix = _draw(prefix_len, vocab_size, (*seed, _PREFIX))
    lengths = np.resize(traffic.input_len, count) - prefix_len
    return [
        np.concatenate([prefix, _draw(int(length), vocab_size, (*seed, _WARMUP, number))])
        for number, length in enumerate(lengths)
    ]


def body(model: str, prompt: IntArray, output_len: int, path: str = COMPLETIONS) -> bytes:
    """Return a request for exactly `output_len` streamed tokens and their count, as the API at `path` has it."""
    ids = prompt.tolist()
    request: dict[str, object] = {"max_tokens": int(output_len), "temperature": 0, "ignore_eos": True, "stream": True}
    if path == GENERATE:
        request |= {"input_ids": ids}
    else:
        request |= {"model": model, "stream_options": {"include_usage": True}, "prompt": ids}
    return json.dumps(request, separators=(",", ":")).encode()


def _draw(count: int, vocab_size: int, seed: Sequence[int]) -> IntArray:
    low, high = _range(vocab_size)
    ids: IntArray = np.random.default_rng(seed).integers(low, high, size=count)
    return ids


def _range(vocab_size: int) -> tuple[int, int]:
    low, high = int(vocab_size * LOWEST), int(vocab_size * HIGHEST)
    if high - low < 2:
        raise SpecError(key="model.vocab_size", value=vocab_size, problem="is too small to draw prompts from")
    return low, high
