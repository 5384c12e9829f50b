"""The steady state of a closed loop in closed form: what a simulation tends to, for all candidates at once.

Each request needs its prompt computed and then one iteration a token; in the mean an iteration decodes `decoding`
sequences and computes as many tokens of prompts as they use up. Solved by repeating Little's law until it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import FloatArray
from flagcore.engines.serving.model.iteration import IterationCosts, at
from flagcore.engines.serving.model.work import Overheads

ROUNDS = 30
"""Repetitions: the number of decoding sequences moves half of the way each time."""

BUSIEST = 0.95
"""Share of the time with prompts beyond which no queue is computed: a closed loop keeps it finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """One lane of each candidate, and its load: `flight` requests of `prompt` and `output` tokens.

    `budget` tokens and `running` sequences of an iteration and `cache_tokens` are those of all `ranks` and `stages`
    together.
    """

    flight: FloatArray
    prompt: FloatArray
    output: FloatArray
    budget: FloatArray
    running: FloatArray
    cache_tokens: FloatArray
    ranks: FloatArray
    stages: FloatArray


@dataclass(frozen=True, slots=True)
class Steady:
    """Seconds to the first token and between tokens, and output tokens per second of one lane, by candidate."""

    ttft: FloatArray
    tpot: FloatArray
    rate: FloatArray


def steady(costs: IterationCosts, over: Overheads, loop: ClosedLoop) -> Steady:
    """Return the mean figures of a closed loop."""
    context = loop.prompt + 0.5 * loop.output
    room = np.maximum(loop.cache_tokens / context, 1.0)
    most = np.minimum(np.minimum(loop.flight, loop.running), room)
    decoding = most.copy()
    more = np.maximum(loop.output - 1.0, 1.0)
    for _ in range(ROUNDS):
        plain, mixed, prompt_tokens = _iterations(costs, over, loop, decoding, context)
        used = decoding * loop.prompt / (loop.output * prompt_tokens)  # iterations with prompts for each that decodes
        tpot = plain + used * (mixed - plain if over.mixes else mixed)
        busy = np.minimum(used * mixed / tpot, BUSIEST)
        pieces = np.maximum(loop.prompt / prompt_tokens, 1.0)
        wait = 0.5 * over.receive * tpot + busy / (1.0 - busy) * 0.5 * mixed
        ttft = over.request + over.entry + wait + pieces * mixed
        here = np.minimum(loop.flight, most) * more * tpot / (ttft + more * tpot)
        decoding = 0.5 * (decoding + np.maximum(here, 1e-3))
    whole = (ttft + more * tpot) * loop.flight / most
    return Steady(whole - more * tpot, tpot, loop.flight * loop.output / whole)


def _iterations(
    costs: IterationCosts, over: Overheads, loop: ClosedLoop, decoding: FloatArray, context: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return an iteration without prompts, one with, and how many tokens of prompts that has."""
    ranks, batch = loop.ranks * loop.stages, decoding / loop.stages
    here, reads = decoding / ranks, costs.cached * decoding / np.minimum(ranks, np.maximum(decoding, 1.0)) * context
    plain = at(costs.local, here) + at(costs.shared, batch) + at(costs.sampled, here) + reads
    plain = np.where(batch > costs.captured, np.maximum(plain, costs.floor), plain)
    chunk = np.maximum(loop.budget - decoding * over.mixes, 1.0)
    prompt_tokens = np.minimum(np.maximum(loop.prompt, decoding * loop.prompt / loop.output), chunk)
    longest = np.maximum(prompt_tokens / ranks, np.minimum(loop.prompt, prompt_tokens))
    mixed_in = decoding if over.mixes else np.zeros_like(decoding)
    whole = mixed_in / loop.stages + np.maximum(prompt_tokens / loop.stages, longest)
    mixed = at(costs.local, mixed_in / ranks + longest) + at(costs.shared, whole)
    mixed = mixed + at(costs.sampled, mixed_in / ranks + prompt_tokens / loop.prompt)
    mixed = mixed + costs.pair * longest * 0.5 * loop.prompt + (reads if over.mixes else 0.0)
    floor = (whole > costs.captured) | (not over.mixes)
    mixed = np.where(floor, np.maximum(mixed, costs.floor), mixed)
    host = costs.fixed + costs.sequence * decoding
    return plain + host, mixed + costs.fixed + costs.sequence * mixed_in, prompt_tokens


PARTS = ("queue_s", "prefill_s", "decode_s", "collectives_s", "host_s")
"""In the order of reports."""


def parts(
    costs: IterationCosts, over: Overheads, loop: ClosedLoop, e2e: FloatArray, decoding: FloatArray
) -> dict[str, FloatArray]:
    """Return the seconds of a request by part, by candidate; they add up to `e2e`, the mean seconds of one.

    `decoding` is the number of sequences of a lane that decode at one time. A prompt is counted as if it ran alone, an
    answer as if it ran with decoding sequences only. The rest of `e2e` is the queue: the wait for a slot and for
    other prompts.
    """
    ranks, batch = loop.ranks * loop.stages, decoding / loop.stages
    here, context = decoding / ranks, loop.prompt + 0.5 * loop.output
    more = np.maximum(loop.output - 1.0, 0.0)
    reads = costs.cached * decoding / np.minimum(ranks, np.maximum(decoding, 1.0)) * context
    device = at(costs.local, here) + at(costs.shared, batch) + at(costs.sampled, here) + reads
    decode_comm = at(costs.messages, here) + at(costs.exchanged, batch)
    slower = np.where(batch > costs.captured, np.maximum(costs.floor - device, 0.0), 0.0)
    piece = np.minimum(loop.prompt, np.maximum(loop.budget, 1.0))
    pieces = loop.prompt / piece
    prefill_comm = pieces * (at(costs.messages, piece) + at(costs.exchanged, piece))
    prompt = pieces * (at(costs.local, piece) + at(costs.shared, piece)) + at(costs.sampled, np.ones_like(piece))
    prompt = prompt + costs.pair * 0.5 * loop.prompt**2
    eager = (piece > costs.captured) | (not over.mixes)
    launched = np.where(eager, np.maximum(pieces * costs.floor - prompt, 0.0), 0.0)
    whole = {
        "prefill_s": prompt - prefill_comm,
        "decode_s": more * (device - decode_comm),
        "collectives_s": prefill_comm + more * decode_comm,
        "host_s": over.request
        + over.entry
        + launched
        + pieces * costs.fixed
        + more * (costs.fixed + costs.sequence * decoding + slower),
    }
    total = sum(whole.values(), np.zeros_like(e2e))
    share = np.minimum(1.0, e2e / total)
    return {"queue_s": np.maximum(e2e - total, 0.0)} | {name: each * share for name, each in whole.items()}
