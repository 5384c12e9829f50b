"""Where the time of a request goes, in the mean: what is computed for it, what is not, and what it waits for."""

from __future__ import annotations

import numpy as np

from flagcore.domain.space import FloatArray
from flagcore.engines.serving.model.closed_loop import ClosedLoop
from flagcore.engines.serving.model.iteration import IterationCosts, at
from flagcore.engines.serving.model.work import Overheads

PARTS = ("queue_s", "prefill_s", "decode_s", "collectives_s", "host_s")
"""In the order in which they are told."""


def parts(
    costs: IterationCosts, over: Overheads, loop: ClosedLoop, e2e: FloatArray, decoding: FloatArray
) -> dict[str, FloatArray]:
    """Return the seconds of a request by part, by candidate; they add up to `e2e`, the mean seconds of one.

    `decoding` are the sequences of a lane that write at one time. A prompt is told as if it were alone, and an answer
    as if only others that write were beside it: what is left of `e2e` is the queue, the wait for a place and for the
    prompts of others.
    """
    ranks, batch = loop.ranks * loop.stages, decoding / loop.stages
    here, context = decoding / ranks, loop.prompt + 0.5 * loop.output
    more = np.maximum(loop.output - 1.0, 0.0)
    reads = costs.cached * decoding / np.minimum(ranks, np.maximum(decoding, 1.0)) * context
    device = at(costs.local, here) + at(costs.shared, batch) + at(costs.sampled, here) + reads
    said = at(costs.messages, here) + at(costs.exchanged, batch)
    slower = np.where(batch > costs.captured, np.maximum(costs.floor - device, 0.0), 0.0)
    piece = np.minimum(loop.prompt, np.maximum(loop.budget, 1.0))
    pieces = loop.prompt / piece
    told = pieces * (at(costs.messages, piece) + at(costs.exchanged, piece))
    prompt = pieces * (at(costs.local, piece) + at(costs.shared, piece)) + at(costs.sampled, np.ones_like(piece))
    prompt = prompt + costs.pair * 0.5 * loop.prompt**2
    eager = (piece > costs.captured) | (not over.mixes)
    launched = np.where(eager, np.maximum(pieces * costs.floor - prompt, 0.0), 0.0)
    whole = {
        "prefill_s": prompt - told,
        "decode_s": more * (device - said),
        "collectives_s": told + more * said,
        "host_s": over.request
        + over.entry
        + launched
        + pieces * costs.fixed
        + more * (costs.fixed + costs.sequence * decoding + slower),
    }
    taken = sum(whole.values(), np.zeros_like(e2e))
    share = np.minimum(1.0, e2e / taken)
    return {"queue_s": np.maximum(e2e - taken, 0.0)} | {name: each * share for name, each in whole.items()}
