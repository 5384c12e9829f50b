"""Generates the requests of a load: lengths, arrivals and prompts.

Lengths and arrivals are equal in every repeat and for every candidate. Prompts differ between repeats, so that a server
does not have them in its prefix cache from an earlier repeat.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore.errors import SpecError
from flagcore_serving.job import DEFAULT_CONCURRENCY, Load
from flagcore_serving.load.images import data_uri, draw_images, random_text
from flagcore_serving.load.result import CHAT, COMPLETIONS, GENERATE
from flagcore_serving.load.traces import Traffic, trace_of


def traffic(load: Load) -> Traffic:
    """Return the requests of a load point. `input_len` includes the shared prefix.

    Raises SpecError for an invalid load or an unreadable trace.
    """
    lengths, times = np.random.default_rng([load.seed, 1]), np.random.default_rng([load.seed, 2])
    if load.trace is not None:
        requests = trace_of(load).first(load.num_prompts)
        if requests.texts and load.prefix_len:
            problem, fix = "cannot be combined with a trace that has texts", "remove it, or put it into the texts"
            raise SpecError(key="serve.profile.prefix_len", value=load.prefix_len, problem=problem, fix=fix)
    elif load.lengths:
        prompts, answers = np.array(load.lengths, dtype=np.int64).T
        blocks = [(index % load.distinct,) for index in range(prompts.size)] if load.distinct else ()
        requests = Traffic(input_len=prompts, output_len=answers, blocks=blocks, block_len=int(prompts.max()))
    elif not load.num_prompts:
        raise SpecError(key="num_prompts", problem="is required to generate load", fix="set the number of requests")
    else:
        prompts, answers = _chats(lengths, load) if load.distribution == "chat" else _lengths(lengths, load)
        requests = Traffic(input_len=prompts, output_len=answers)
        if load.turns > 1:
            requests = _conversations(requests, load.turns, load.sub_agents)
        if load.images is not None:
            rng = np.random.default_rng([load.seed, 3])
            requests = requests._replace(images=draw_images(load.images, load.num_prompts, rng))
    if load.adapters:
        requests = requests._replace(adapters=_adapters(load, requests))
    if requests.follows is not None:
        requests = _in_turns(requests, load, requests.follows >= 0)
    return requests._replace(input_len=requests.input_len + load.prefix_len, arrive_s=_arrivals(times, load, requests))


def _in_turns(requests: Traffic, load: Load, is_later: BoolArray) -> Traffic:
    """Return the requests of conversations with their waits. `is_later`: which ones are no first turn."""
    if not is_later.any():
        return requests._replace(follows=None)  # too few requests: none is a second turn
    conversations = int(np.count_nonzero(~is_later))
    if load.concurrency is not None and conversations < load.concurrency:
        note = f"with {conversations} conversations, there are never {load.concurrency} requests in flight"
        requests = requests._replace(notes=(*requests.notes, note))
    wait_s = np.where(is_later, load.think_time_s, 0.0) if requests.wait_s is None else requests.wait_s
    return requests._replace(wait_s=wait_s)


def _adapters(load: Load, requests: Traffic) -> IntArray:
    """Draw the adapter of each request, the same for all of a conversation: the n-th one, or -1 for the base model."""
    rng, (task, _) = np.random.default_rng([load.seed, 4]), requests.tasks
    count = int(task[-1]) + 1 if task.size else 0
    adapters = rng.choice(load.adapters, size=count, p=load.adapter_shares)
    return np.asarray(np.where(rng.random(count) < load.adapter_share, adapters, -1)[task])


def _conversations(requests: Traffic, turns: int, sub_agents: int = 0) -> Traffic:
    """Group requests into conversations of `turns` requests: a prompt continues the previous prompt and its answer.

    Sub-agents are conversations of their own between the turns of another one, after its first ones.
    """
    size, span = requests.input_len.size, turns * (1 + sub_agents)
    own = [turn + turns * min(turn, sub_agents) for turn in range(turns)]  # places of the conversation's own turns
    before = dict(zip(own[1:], own, strict=False))
    follows = np.full(size, -1, dtype=np.int64)
    fresh = np.zeros(size, dtype=np.bool_)
    lengths = requests.input_len.copy()
    for index in range(size):
        place = index % span
        fresh[index] = place > 0 and place not in before and place - 1 in own
        if place:
            follows[index] = index - place + before.get(place, place - 1)
        if place and not fresh[index]:
            lengths[index] += lengths[follows[index]] + requests.output_len[follows[index]]
    return requests._replace(input_len=lengths, follows=follows, fresh=fresh if fresh.any() else None)


def in_flight(load: Load) -> Load:
    """Return `load`, with DEFAULT_CONCURRENCY requests in flight if nothing determines when its requests are sent.

    Raises SpecError for an unreadable trace.
    """
    if load.trace is None or load.concurrency is not None or load.request_rate is not None:
        return load
    return load if trace_of(load).arrive_s is not None else replace(load, concurrency=DEFAULT_CONCURRENCY)


SIGMA = 1.4
"""The standard deviation of the logarithm of log-normal lengths. A choice; ShareGPT's prompts have 1.57, its answers
1.45."""
CHATS: IntArray = np.array(
    (
        "348,4 679,4 291,5 334,6 770,6 444,7 321,8 651,8 214,9 499,9 258,10 4,11 144,11 771,11 572,12 8,13 699,13 "
        "279,14 771,14 613,15 498,16 698,16 71,18 693,18 433,19 620,19 341,21 349,22 449,23 170,24 780,24 616,26 "
        "460,27 144,29 463,29 417,31 379,34 36,36 31,37 13,39 313,40 10,42 351,44 277,48 280,51 136,54 8,55 24,58 "
        "35,63 402,66 10,69 220,77 14,78 19,83 364,85 253,90 5,96 993,98 4,104 26,107 15,114 886,117 88,121 5,128 "
        "566,132 95,136 13,144 39,147 565,154 54,160 20,169 21,173 135,180 533,185 5,193 268,198 40,203 121,205 "
        "73,215 8,218 22,226 19,230 22,235 22,240 226,248 24,254 30,258 10,265 11,266 122,273 11,280 6,287 342,291 "
        "9,296 62,301 15,308 372,310 231,319 20,322 370,332 30,339 13,347 198,348 17,358 21,368 12,372 138,385 65,395 "
        "341,405 161,409 12,425 32,444 22,446 46,463 10,487 28,498 29,519 34,520 11,553 84,582 15,630 23,660 9,662 "
        "1022,760 596,765 257,774 35,789"
    )
    .replace(",", " ")
    .split(),
    dtype=np.int64,
).reshape(-1, 2)
LONGEST_CHATS = ((232, 856), (232, 908), (531, 950), (396, 1032), (313, 1076), (146, 1195), (206, 1366), (161, 1590))
"""Tokens of prompts and answers of chats, in Qwen's tokens: one for each 128th of the answers, shortest first, of 7,891
chats, those that vLLM's client sends among the first 9,000 of ShareGPT_V3_unfiltered_cleaned_split. They are chosen so
that the quantiles of prompts (5 to 95%), both means, the mean of 1 / (answer - 1) and the correlation of the logarithms
(-0.45) are those of all. The last 128th has one for each eighth of it: the end of a burst depends on the longest
answer."""


def _chats(rng: np.random.Generator, load: Load) -> tuple[IntArray, IntArray]:
    """Draw the lengths of chats, scaled so that their means are those of `load`."""
    chats = np.concatenate([np.repeat(CHATS, len(LONGEST_CHATS), axis=0), LONGEST_CHATS])
    prompts, answers = chats[np.resize(rng.permutation(len(chats)), load.num_prompts or 0)].T
    return (
        _scaled(prompts, load.input_len, load.longest_of(load.input_len)),
        _scaled(answers, load.output_len, load.longest_of(load.output_len)),
    )


def _lengths(rng: np.random.Generator, load: Load) -> tuple[IntArray, IntArray]:
    """Draw the lengths of prompts and of answers."""
    return _drawn(rng, load.input_len, load), _drawn(rng, load.output_len, load)


def _drawn(rng: np.random.Generator, length: int, load: Load) -> IntArray:
    """Draw lengths from the distribution or the range of `load`, rounded as in the engines' own clients."""
    if load.distribution == "lognormal":
        return _scaled(rng.lognormal(sigma=SIGMA, size=load.num_prompts), length, load.longest_of(length))
    if load.range_spread is not None:
        low, high = math.floor(length * (1 - load.range_spread)), math.ceil(length * (1 + load.range_spread))
    else:
        low, high = int(length * load.range_ratio), length
    return rng.integers(max(low, 1), max(high, 1), size=load.num_prompts, endpoint=True)


def _scaled(values: FloatArray | IntArray, mean: int, longest: int) -> IntArray:
    """Return lengths from 1 to `longest`, scaled so that their mean is `mean`."""
    low, high = 0.0, longest / float(values.min())
    for _ in range(50):
        scale = (low + high) / 2
        lengths = np.clip(np.rint(values * scale), 1, longest)
        low, high = (scale, high) if lengths.mean() < mean else (low, scale)
    return lengths.astype(np.int64)


def _arrivals(rng: np.random.Generator, load: Load, requests: Traffic) -> FloatArray | None:
    """Return the arrival times of requests in seconds, drawn at the rate or read from the trace; None for a closed
    loop.

    Drawn gaps are scaled to the exact mean, so that the offered load equals the specified one. All requests of a
    conversation have the arrival time of the first one; the client sends each later turn after the answer to the
    previous one.
    """
    if load.request_rate is None:
        if load.concurrency is not None:
            return None
        if requests.arrive_s is not None:
            return requests.arrive_s
        problem = "or request_rate is required to generate load"
        raise SpecError(key="concurrency", problem=problem, fix="set one of them, or a trace with arrival times")
    size = requests.input_len.size
    if math.isinf(load.request_rate):
        return np.zeros(size)
    first = np.ones(size, dtype=np.bool_) if requests.follows is None else requests.follows < 0
    count = int(first.sum())
    gaps = rng.gamma(load.burstiness, 1.0, size=max(count - 1, 0))
    total = float(gaps.sum())
    scale = gaps.size * (size / count) / load.request_rate / total if total > 0 else 0.0
    starts: FloatArray = np.concatenate([[0.0], np.cumsum(gaps) * scale])[:count]
    return np.asarray(starts[np.cumsum(first) - 1])


MIN_ID_SHARE, MAX_ID_SHARE = 0.1, 0.9
"""Token ids are drawn between these shares of the vocabulary, because its ends contain special tokens, bytes and
padding."""

_PREFIX, _PROMPT, _BLOCK, _WARMUP, _IMAGE = range(5)


def warm_up(requests: Traffic, count: int) -> Traffic:
    """Return `count` requests with the lengths of the load's first requests."""
    return Traffic(
        input_len=np.resize(requests.input_len, count),
        adapters=None if requests.adapters is None else np.resize(requests.adapters, count),
        output_len=np.resize(requests.output_len, count),
        images=[requests.images[index % len(requests.images)] for index in range(count)] if requests.images else (),
    )


def prompts(
    traffic: Traffic, *, prefix_len: int, vocab_size: int, seed: Sequence[int], warm_up: bool = False
) -> list[IntArray]:
    """Return the token ids of each prompt. The ids are deterministic, and independent for different seeds.

    The first `prefix_len` ids are equal in all prompts, also between load and `warm_up`, which share nothing else.
    Equal blocks of a trace have equal ids. A turn of a conversation begins with the ids of the turn before.
    """
    prefix = _draw_tokens(prefix_len, vocab_size, (*seed, _PREFIX))
    rng = np.random.default_rng((*seed, _WARMUP if warm_up else _PROMPT))
    low, high = _token_range(vocab_size)
    ids_by_request = list[IntArray]()
    if not traffic.blocks:
        for length, before in zip(traffic.input_len.tolist(), traffic.continued.tolist(), strict=True):
            past = ids_by_request[before] if before >= 0 else np.zeros(0, dtype=np.int64)
            ids_by_request.append(np.concatenate([past, rng.integers(low, high, size=length - prefix_len - past.size)]))
    else:
        block_ids = {block for blocks in traffic.blocks for block in blocks}
        keys = {block: (*seed, _BLOCK, *(block if isinstance(block, tuple) else (block,))) for block in block_ids}
        tokens_by_block = {block: _draw_tokens(traffic.block_len, vocab_size, key) for block, key in keys.items()}
        ids_by_request = [
            np.concatenate([tokens_by_block[block] for block in blocks])[: length - prefix_len]
            for blocks, length in zip(traffic.blocks, traffic.input_len, strict=True)
        ]
    return [np.concatenate([prefix, ids]) for ids in ids_by_request]


def words(traffic: Traffic, *, prefix_len: int, seed: Sequence[int], warm_up: bool = False) -> list[str]:
    """Return prompts as words instead of token ids (see `prompts`), because the API for images accepts only text."""
    prefix = random_text(prefix_len, np.random.default_rng((*seed, _PREFIX)))
    rng = np.random.default_rng((*seed, _WARMUP if warm_up else _PROMPT))
    return [f"{prefix} {random_text(length - prefix_len, rng)}".strip() for length in traffic.input_len.tolist()]


def image_uris(traffic: Traffic, seed: Sequence[int], *, warm_up: bool = False) -> list[list[str]]:
    """Return the images of each request as data URIs. Random images differ between requests and between seeds."""
    key = (*seed, _IMAGE, int(warm_up))
    return [
        [data_uri(image, (*key, number, place)) for place, image in enumerate(images)]
        for number, images in enumerate(traffic.images)
    ]


def salted(texts: Sequence[str], seed: Sequence[int]) -> list[str]:
    """Return the prompts `texts` with `seed` as their first line.

    Prompts of one repeat still share their prefixes with each other, but not with prompts of other repeats.
    """
    return [f"{'.'.join(map(str, seed))}\n{text}" for text in texts]


ADAPTER = "adapter-{number}"
"""The name by which servers know an adapter."""


def body(
    model: str,
    prompt: IntArray | str,
    output_len: int,
    path: str = COMPLETIONS,
    images: Sequence[str] = (),
    adapter: str = "",
) -> bytes:
    """Return the body of a request for a stream of exactly `output_len` tokens, followed by the token counts.

    `prompt`: text or token ids. `path`: the endpoint. `images`: data URIs, which only the endpoint CHAT accepts.
    `adapter`: the name of the request's adapter. vLLM knows it as a model, SGLang as a path.
    """
    ids = prompt if isinstance(prompt, str) else prompt.tolist()
    request: dict[str, object] = {"max_tokens": int(output_len), "temperature": 0, "ignore_eos": True, "stream": True}
    if adapter:
        model, request["lora_path"] = adapter, adapter
    if path == GENERATE:
        request |= {"input_ids": ids}
    elif path == CHAT:
        content = [{"type": "text", "text": ids}, *({"type": "image_url", "image_url": {"url": uri}} for uri in images)]
        messages = [{"role": "user", "content": content}]
        request |= {"model": model, "stream_options": {"include_usage": True}, "messages": messages}
    else:
        request |= {"model": model, "stream_options": {"include_usage": True}, "prompt": ids}
    return json.dumps(request, separators=(",", ":")).encode()


def _draw_tokens(count: int, vocab_size: int, seed: Sequence[int]) -> IntArray:
    low, high = _token_range(vocab_size)
    return np.random.default_rng(seed).integers(low, high, size=count)


def _token_range(vocab_size: int) -> tuple[int, int]:
    low, high = int(vocab_size * MIN_ID_SHARE), int(vocab_size * MAX_ID_SHARE)
    if high - low < 2:
        raise SpecError(key="model.vocab_size", value=vocab_size, problem="is too small to draw prompts from")
    return low, high
