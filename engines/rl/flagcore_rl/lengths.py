"""Lengths of the samples of a step, and how many micro-batches hold them."""

from functools import lru_cache
from statistics import NormalDist

import numpy as np
from flagcore_training.lengths import best_fit

from flagcore.domain.space import IntArray
from flagcore_rl.job import Lengths, Samples

BLOCK = 64
"""Samples of similar length that are next to each other, so that rollouts of any usual size get equal parts."""


@lru_cache(maxsize=256)
def quantiles(lengths: Lengths, count: int) -> tuple[int, ...]:
    """Return `count` lengths at even quantiles of the distribution, the longest first."""
    if lengths.values:
        places = (np.arange(count, 0, -1) - 0.5) / count * len(lengths.values)
        return tuple(np.array(lengths.values)[places.astype(np.int64)].tolist())
    places = (np.arange(count, 0, -1) - 0.5) / count
    values = np.exp(lengths.spread * np.array([*map(NormalDist().inv_cdf, places.tolist())]))
    low, high = 0.0, lengths.longest / float(values.min())
    for _ in range(60):
        scale = (low + high) / 2
        cut = np.minimum(values * scale, lengths.longest)
        low, high = (scale, high) if cut.mean() < lengths.mean else (low, scale)
    return tuple(np.maximum(np.rint(cut), 1).astype(np.int64).tolist())


@lru_cache(maxsize=64)
def requests_of(samples: Samples) -> tuple[tuple[int, int], ...]:
    """Return the lengths of the prompt and the answer of each sample of a step, in the order of the requests.

    Blocks of samples of similar length are shuffled. In each, the longest is first, so that the first of several
    rollouts, which divide the requests in turn, is the last to end.
    """
    count, rng = samples.prompts * samples.answers, np.random.default_rng(0)
    answers = np.array(quantiles(samples.answer_len, count))
    starts = rng.permutation(-(-count // BLOCK)) * BLOCK
    order = (starts[:, None] + np.arange(BLOCK)).ravel()
    prompts = rng.permutation(quantiles(samples.prompt_len, samples.prompts))
    pairs = zip(np.resize(prompts, count).tolist(), answers[order[order < count]].tolist(), strict=True)
    return tuple(pairs)


@lru_cache(maxsize=64)
def tokens_of(samples: Samples) -> IntArray:
    """Return the tokens of each sample of a step, prompt and answer. The array is shared."""
    return np.asarray(np.array(requests_of(samples), dtype=np.int64).sum(axis=1))


@lru_cache(maxsize=256)
def packs(samples: Samples, number: int, most: int) -> tuple[int, int]:
    """Return into how many micro-batches of at most `most` tokens best fit packs `number` of the samples, and the
    tokens of the longest one.
    """
    tokens = np.sort(tokens_of(samples))[::-1]
    picked = tokens[np.linspace(0, tokens.size - 1, number).round().astype(np.int64)]
    found = best_fit(picked.tolist(), most)
    return len(found), max(map(sum, found))
