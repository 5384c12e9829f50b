"""The prompts of a load: the parts that they share, the instances that get them, and their order in a closed loop."""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from flagcore.domain.space import IntArray
from flagcore_serving.load.routing import Prefixes
from flagcore_serving.load.traces import Traffic
from flagcore_serving.model.tiers import Part


def prompt_parts(requests: Traffic, prefix_len: int) -> list[list[Part]]:
    """Return the parts of each prompt after the common prefix.

    Prompts with the same part share the tokens up to its end. The list is empty if prompts share only the prefix.
    """
    if requests.blocks:
        size = requests.block_len  # the last block of a prompt may be incomplete
        return [
            [(block, max(0, min(size, length - prefix_len - place * size))) for place, block in enumerate(blocks)]
            for blocks, length in zip(requests.blocks, requests.input_len.tolist(), strict=True)
        ]
    if requests.follows is None:
        return _text_parts(requests.texts, requests.input_len.tolist()) if requests.texts else []
    parts = list[list[Part]]()
    for index, (length, before) in enumerate(
        zip(requests.input_len.tolist(), requests.continued.tolist(), strict=True)
    ):
        past = parts[before] if before >= 0 else []
        parts.append([*past, (index, max(0, length - prefix_len - sum(size for _, size in past)))])
    return parts


def _text_parts(texts: Sequence[str], lengths: Sequence[int]) -> list[list[Part]]:
    """Return the parts of each text. A text is divided where it diverges from another text with the same beginning."""
    cuts: list[set[int]] = [{len(text)} for text in texts]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    for direction in (order, order[::-1]):
        shared = list[int]()  # lengths shared with earlier texts, in ascending order
        for before, index in pairwise(direction):
            common = _common(texts[before], texts[index])
            shared = [*(each for each in shared if each < common), common]
            cuts[index].update(shared)
    parts = list[list[Part]]()
    for text, length, cut_lengths in zip(texts, lengths, cuts, strict=True):
        ends = sorted(cut_lengths - {0})
        tokens = [round(length * end / len(text)) for end in ends]
        sizes = np.diff([0, *tokens]).tolist()
        parts.append([(hash(text[:end]), size) for end, size in zip(ends, sizes, strict=True)])
    return parts


def _common(left: str, right: str) -> int:
    """Return the length of the common prefix of two texts, found by bisection."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left.startswith(right[low:middle], low) else (low, middle - 1)
    return low


def prefix_lanes(prompts: Sequence[Sequence[Part]], lanes: int) -> IntArray:
    """Return the lane (instance) to which a prefix-aware router sends each prompt, if all lanes are equally fast."""
    prefixes, counts = Prefixes(lanes), np.zeros(lanes, dtype=np.int64)
    lane_of = np.zeros(len(prompts), dtype=np.int64)
    for index, parts in enumerate(prompts):
        lane_of[index] = prefixes.choose([name for name, _ in parts], (counts - counts.min()).tolist())
        counts[lane_of[index]] += 1
    return lane_of


def turn_order(task: IntArray, turn: IntArray, flight: int) -> IntArray:
    """Return the order in which a closed loop sends the requests of conversations.

    `flight` conversations run at once, and take turns: each sends its next request after the answer to the one before.
    The next conversation starts where one has ended.
    """
    lengths, free = np.bincount(task), [(0, slot) for slot in range(max(flight, 1))]
    starts = np.zeros((2, lengths.size), dtype=np.int64)
    for number, length in enumerate(lengths.tolist()):
        starts[:, number] = begin, slot = heappop(free)
        heappush(free, (begin + length, slot))
    return np.lexsort((starts[1, task], starts[0, task] + turn))
