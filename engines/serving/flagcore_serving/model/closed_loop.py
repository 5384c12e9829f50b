"""The steady state of a closed loop, computed for all candidates at once.

A request takes the time of its prompt and then one iteration per token. A mean iteration decodes `decoding` sequences,
and computes the prompt tokens of the requests that replace finished sequences. `decoding` is iterated until Little's
law holds.
"""

from typing import NamedTuple

import numpy as np

from flagcore.domain.space import BoolArray, FloatArray, IntArray
from flagcore_serving.model.iteration import IterationCosts, interpolate
from flagcore_serving.model.work import Overheads

ROUNDS = 30
"""Number of damped iterations. Each moves the number of decoding sequences half of the way to its new value. A choice:
after as many, the iteration has converged."""

MAX_BUSY = 0.95
"""Maximum share of the time that iterations with prompts may take; it keeps the queue finite. A choice."""


class ClosedLoop(NamedTuple):
    """One lane of each candidate, and its load in a closed loop. A lane is one instance.

    - `costs`, `overheads`: costs of the iterations, and overheads of the engine.
    - `flight`: requests in flight.
    - `prompt`, `output`: tokens of a prompt and of an answer.
    - `budget`, `running`: maximum tokens and sequences in an iteration, summed over all `ranks` and `stages`.
    - `cache_tokens`: the capacity of the cache in tokens, summed likewise. `fixed`: tokens that a sequence takes beside
      its own.
    - `ranks`, `stages`: numbers of attention DP ranks and of pipeline stages.
    - `role`: 1 if the lane only computes prompts, 2 if it only decodes, else 0.
    - `ahead`: batches that the scheduler plans ahead (see `Lane`).
    - `mixes`: whether iterations combine prompts and decoding.
    - `encode`: seconds of the vision tower for the images of a request.
    - `cached`: the share of a prompt that need not be computed. Only `parts` depend on it.
    - `drafted`, `gain`: as in `Lane`.
    """

    costs: IterationCosts
    overheads: Overheads
    flight: FloatArray
    prompt: FloatArray
    output: FloatArray
    budget: FloatArray
    running: FloatArray
    cache_tokens: FloatArray
    ranks: FloatArray
    stages: FloatArray
    role: IntArray | int = 0
    fixed: FloatArray | float = 0.0
    ahead: FloatArray | float = 0.0
    mixes: BoolArray | bool = True
    encode: FloatArray | float = 0.0
    cached: FloatArray | float = 0.0
    drafted: FloatArray | float = 0.0
    gain: FloatArray | float = 1.0

    @property
    def front_end(self) -> FloatArray:
        """The seconds that a request takes to pass the front end and reach the scheduler."""
        return self.costs.crowding * (self.overheads.request + self.overheads.entry)

    def reads(self, decoding: FloatArray) -> FloatArray:
        """Return the seconds that an iteration of `decoding` sequences takes to read their cache."""
        ranks, context = self.ranks * self.stages, self.prompt + 0.5 * self.output
        return self.costs.cached * decoding / np.minimum(ranks, np.maximum(decoding, 1.0)) * context

    def handling(self, decoding: FloatArray) -> FloatArray:
        """Return the seconds in which the host handles a token of each of `decoding` sequences, beside the device."""
        return np.where(np.asarray(self.role) == 0, self.overheads.event * decoding, 0.0)

    def device(self, decoding: FloatArray) -> FloatArray:
        """Return the seconds of the device in which each of `decoding` sequences gets a token."""
        costs, rows = self.costs, decoding / (self.ranks * self.stages)
        per_rank, batch = rows * (1.0 + self.drafted), decoding / self.stages * (1.0 + self.drafted)
        seconds = (
            interpolate(costs.local, per_rank)
            + interpolate(costs.shared, batch)
            + interpolate(costs.sampled, per_rank)
            + self.reads(decoding)
        )
        if np.any(self.drafted):
            passes = interpolate(costs.drafts, rows) + interpolate(costs.draft_heads, rows)
            seconds = (seconds + self.drafted * passes) / self.gain
        return seconds


class LoopMeans(NamedTuple):
    """Mean TTFT and TPOT in seconds, and output tokens per second of one lane, by candidate."""

    ttft: FloatArray
    tpot: FloatArray
    rate: FloatArray


def steady_state(loop: ClosedLoop) -> LoopMeans:
    """Return the mean latencies and the rate of a closed loop.

    For lanes that only compute prompts, the rate counts the output tokens of the answers to their prompts, and TPOT is
    0.
    """
    overheads = loop.overheads
    decodes_only = np.asarray(loop.role) == 2
    ahead = loop.ahead / loop.stages * np.clip(loop.flight - 1.0, 0.0, 1.0)  # nothing is planned for a lone request
    context = loop.prompt + 0.5 * loop.output
    room = np.maximum(loop.cache_tokens / (context + loop.fixed), 1.0)
    limit = np.minimum(np.minimum(loop.flight, loop.running), room)
    decoding = limit.copy()
    decode_steps = np.maximum(loop.output - 1.0, 1.0)
    experts = loop.costs.shared + loop.costs.summed
    for _ in range(ROUNDS):
        plain, mixed, prompt_tokens = _iterations(loop, experts, decoding)
        # number of iterations with prompts per decoding iteration
        prompt_share = np.where(decodes_only, 0.0, decoding * loop.prompt / (loop.output * prompt_tokens))
        tpot = plain + prompt_share * (mixed - np.where(loop.mixes, plain, 0.0))
        busy = np.minimum(prompt_share * mixed / tpot, MAX_BUSY)
        pieces = np.maximum(loop.prompt / prompt_tokens, 1.0)
        wait = 0.5 * overheads.receive * tpot + busy / (1.0 - busy) * 0.5 * mixed
        ttft = loop.front_end + ahead * tpot + np.where(decodes_only, tpot, wait + pieces * mixed)
        active = np.minimum(loop.flight, limit) * decode_steps * tpot / (ttft + decode_steps * tpot)
        decoding = 0.5 * (decoding + np.maximum(active, 1e-3))
    e2e = (ttft + decode_steps * tpot) * loop.flight / limit
    means = LoopMeans(e2e - decode_steps * tpot, tpot, loop.flight * loop.output / e2e)
    return _with_prompts_only(loop, experts, means) if np.any(loop.role) else means


def _with_prompts_only(loop: ClosedLoop, experts: FloatArray, means: LoopMeans) -> LoopMeans:
    """Return `means` with recomputed values for prefill-only lanes: the TTFT of a prompt alone, and the rate of full
    iterations, whose prompts are divided among all ranks."""
    prefills, none = np.asarray(loop.role) == 1, np.full_like(loop.flight, 1e-9)
    _, alone, piece = _iterations(loop, experts, none)
    _, full, tokens = _iterations(loop, experts, none, loop.flight * loop.prompt)
    seconds = np.maximum(loop.prompt / piece, 1.0) * alone
    return LoopMeans(
        np.where(prefills, loop.front_end + seconds, means.ttft),
        np.where(prefills, 0.0, means.tpot),
        np.where(prefills, loop.output * tokens / (loop.prompt * full), means.rate),
    )


def _iterations(
    loop: ClosedLoop, experts: FloatArray, decoding: FloatArray, waiting: FloatArray | float = 0.0
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the seconds of an iteration without prompts, and the seconds and prompt tokens of one with prompts. It
    computes at least `waiting` prompt tokens, up to the limit. `experts`: the table of `shared` for prompts."""
    costs, overheads, ranks, batch = loop.costs, loop.overheads, loop.ranks * loop.stages, decoding / loop.stages
    plain, reads = loop.device(decoding), loop.reads(decoding)
    plain = np.maximum(plain, np.where(batch / loop.ranks > costs.captured, costs.floor, costs.decode_floor))
    chunk = np.maximum(loop.budget - decoding * loop.mixes, 1.0)
    arrived = np.maximum(decoding * loop.prompt / loop.output, waiting)
    prompt_tokens = np.minimum(np.maximum(loop.prompt, arrived), chunk)
    piece = np.minimum(np.minimum(loop.prompt, prompt_tokens), loop.budget / loop.ranks)
    piece = np.maximum(np.minimum(piece, loop.budget / ranks), piece / loop.stages)
    longest = np.maximum(prompt_tokens / ranks, piece)
    mixed_in = np.where(loop.mixes, decoding, 0.0)
    tokens = mixed_in / loop.stages + np.maximum(prompt_tokens / loop.stages, longest)
    mixed = interpolate(costs.local, mixed_in / ranks + longest) + interpolate(experts, tokens)
    mixed = mixed + interpolate(costs.sampled, mixed_in / ranks + prompt_tokens / loop.prompt)
    mixed = mixed + costs.pair * longest * 0.5 * loop.prompt + np.where(loop.mixes, reads, 0.0)
    mixed = mixed + loop.encode * longest / loop.prompt
    is_eager = (tokens / loop.ranks > costs.captured) | (not overheads.mixes)
    mixed = np.maximum(mixed, np.where(is_eager, costs.floor, costs.mixed_floor))
    host, mixed_host = (costs.fixed + costs.sequence * each / loop.ranks for each in (decoding, mixed_in))
    return np.maximum(plain + host, loop.handling(decoding)), mixed + mixed_host, prompt_tokens


PARTS = ("queue_s", "prefill_s", "decode_s", "shared_s", "collectives_s", "host_s")
"""Parts of a request's time, in the order in which reports list them."""


def parts(loop: ClosedLoop, decoding: FloatArray) -> tuple[dict[str, FloatArray], dict[str, FloatArray]]:
    """Return the seconds that a request spends in each part of its time before and after the first token, without waits
    for a slot or other prompts.

    `decoding`: the mean number of decoding sequences of a lane. A prompt is assumed to run alone, and an answer to run
    only with other decoding sequences.
    """
    role = np.asarray(loop.role)
    costs, batch, per_rank = loop.costs, decoding / loop.stages, decoding / (loop.ranks * loop.stages)
    decode_steps = np.where(role == 1, 0.0, np.maximum(loop.output - (role == 0), 0.0))
    device = loop.device(decoding)
    decode_comm = interpolate(costs.messages, per_rank) + interpolate(costs.exchanged, batch)
    decode_floor = np.where(batch / loop.ranks > costs.captured, costs.floor, costs.decode_floor)
    decode_floor = np.maximum(decode_floor, loop.handling(decoding))
    launch_wait = np.maximum(decode_floor - device, 0.0)
    computed = np.maximum(loop.prompt * (1.0 - loop.cached), 1.0)
    piece = np.minimum(computed, np.maximum(loop.budget, 1.0))
    pieces = np.where(role == 2, 0.0, computed / piece)
    prefill_comm = pieces * (interpolate(costs.messages, piece) + interpolate(costs.exchanged + costs.summed, piece))
    prompt = pieces * (interpolate(costs.local, piece) + interpolate(costs.shared + costs.summed, piece))
    prompt = prompt + interpolate(costs.sampled, np.ones_like(piece))
    prompt = np.where(role == 2, 0.0, prompt + costs.pair * (computed * (loop.prompt - 0.5 * computed)) + loop.encode)
    is_eager = (piece > costs.captured) | (not loop.overheads.mixes)
    prefill_wait = np.maximum(pieces * np.where(is_eager, costs.floor, costs.mixed_floor) - prompt, 0.0)
    host = costs.fixed + costs.sequence * decoding / loop.ranks + launch_wait
    return {
        "prefill_s": prompt - prefill_comm,
        "collectives_s": prefill_comm,
        "host_s": loop.front_end + prefill_wait + pieces * costs.fixed,
    }, {
        "decode_s": decode_steps * (device - decode_comm),
        "collectives_s": decode_steps * decode_comm,
        "host_s": decode_steps * host,
    }
