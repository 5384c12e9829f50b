"""The steady state of a closed loop for all candidates at once, as an approximation of the simulation.

A request needs its prompt and then one iteration per token. A mean iteration decodes `decoding` sequences and computes
the prompt tokens that replace ended sequences. Little's law is iterated until it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flagcore.domain.space import FloatArray, IntArray
from flagcore.engines.serving.model.iteration import IterationCosts, interpolate
from flagcore.engines.serving.model.work import Overheads

ROUNDS = 30
"""Number of damped iterations: the number of decoding sequences moves half of the way each time.
Chosen: the iteration converges."""

MAX_BUSY = 0.95
"""Upper limit of the share of time with prompts, for a finite queue. Chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """One lane of each candidate and its load: `flight` requests of `prompt` and `output` tokens.

    `costs` and `overheads` are those of the iterations and of the engine.
    `budget` (tokens of an iteration), `running` (sequences) and `cache_tokens` are totals over all `ranks` and
    `stages`. A lane whose `role` is 1 only computes prompts, with role 2 it only decodes. The vision tower takes
    `encode` seconds for the images of a request.
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
    role: IntArray | None = None
    encode: FloatArray | float = 0.0

    @property
    def front_end(self) -> FloatArray:
        """The seconds that a request takes to reach the scheduler."""
        return self.costs.crowding * (self.overheads.request + self.overheads.entry)

    def reads(self, decoding: FloatArray) -> FloatArray:
        """Return the seconds in which an iteration of `decoding` sequences reads their cache."""
        ranks, context = self.ranks * self.stages, self.prompt + 0.5 * self.output
        return self.costs.cached * decoding / np.minimum(ranks, np.maximum(decoding, 1.0)) * context

    def device(self, decoding: FloatArray) -> FloatArray:
        """Return the seconds of an iteration of `decoding` sequences on the device."""
        costs, per_rank = self.costs, decoding / (self.ranks * self.stages)
        return (
            interpolate(costs.local, per_rank)
            + interpolate(costs.shared, decoding / self.stages)
            + interpolate(costs.sampled, per_rank)
            + self.reads(decoding)
        )


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Mean TTFT and TPOT in seconds, and output tokens per second of one lane, by candidate."""

    ttft: FloatArray
    tpot: FloatArray
    rate: FloatArray


def steady_state(loop: ClosedLoop) -> SteadyState:
    """Return the mean latencies and the rate of a closed loop.

    Lanes that only compute prompts have the rate of output tokens that their prompts lead to, and no TPOT.
    """
    overheads = loop.overheads
    decodes_only = np.zeros(loop.flight.shape, dtype=np.bool_) if loop.role is None else loop.role == 2
    context = loop.prompt + 0.5 * loop.output
    room = np.maximum(loop.cache_tokens / context, 1.0)
    limit = np.minimum(np.minimum(loop.flight, loop.running), room)
    decoding = limit.copy()
    decode_steps = np.maximum(loop.output - 1.0, 1.0)
    for _ in range(ROUNDS):
        plain, mixed, prompt_tokens = _iterations(loop, decoding)
        prompt_share = (
            decoding * loop.prompt / (loop.output * prompt_tokens)
        )  # iterations with prompts for each that decodes
        prompt_share = np.where(decodes_only, 0.0, prompt_share)
        tpot = plain + prompt_share * (mixed - plain if overheads.mixes else mixed)
        busy = np.minimum(prompt_share * mixed / tpot, MAX_BUSY)
        pieces = np.maximum(loop.prompt / prompt_tokens, 1.0)
        wait = 0.5 * overheads.receive * tpot + busy / (1.0 - busy) * 0.5 * mixed
        ttft = loop.front_end + np.where(decodes_only, tpot, wait + pieces * mixed)
        active = np.minimum(loop.flight, limit) * decode_steps * tpot / (ttft + decode_steps * tpot)
        decoding = 0.5 * (decoding + np.maximum(active, 1e-3))
    e2e = (ttft + decode_steps * tpot) * loop.flight / limit
    state = SteadyState(e2e - decode_steps * tpot, tpot, loop.flight * loop.output / e2e)
    return state if loop.role is None else _with_prompts_only(loop, state)


def _with_prompts_only(loop: ClosedLoop, state: SteadyState) -> SteadyState:
    """Return the state with that of lanes that only compute prompts, one after the other."""
    _, mixed, tokens = _iterations(loop, np.full_like(loop.flight, 1e-9))
    seconds, prefills = np.maximum(loop.prompt / tokens, 1.0) * mixed, loop.role == 1
    return SteadyState(
        np.where(prefills, loop.front_end + seconds, state.ttft),
        np.where(prefills, 0.0, state.tpot),
        np.where(prefills, loop.output / seconds, state.rate),
    )


def _iterations(loop: ClosedLoop, decoding: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the seconds of an iteration without and with prompts, and the prompt tokens of the latter."""
    costs, overheads, ranks, batch = loop.costs, loop.overheads, loop.ranks * loop.stages, decoding / loop.stages
    plain, reads = loop.device(decoding), loop.reads(decoding)
    plain = np.where(batch > costs.captured, np.maximum(plain, costs.floor), plain)
    chunk = np.maximum(loop.budget - decoding * overheads.mixes, 1.0)
    prompt_tokens = np.minimum(np.maximum(loop.prompt, decoding * loop.prompt / loop.output), chunk)
    longest = np.maximum(prompt_tokens / ranks, np.minimum(loop.prompt, prompt_tokens))
    mixed_in = decoding if overheads.mixes else np.zeros_like(decoding)
    tokens = mixed_in / loop.stages + np.maximum(prompt_tokens / loop.stages, longest)
    mixed = interpolate(costs.local, mixed_in / ranks + longest) + interpolate(costs.shared, tokens)
    mixed = mixed + interpolate(costs.sampled, mixed_in / ranks + prompt_tokens / loop.prompt)
    mixed = mixed + costs.pair * longest * 0.5 * loop.prompt + (reads if overheads.mixes else 0.0)
    mixed = mixed + loop.encode * longest / loop.prompt
    is_eager = (tokens > costs.captured) | (not overheads.mixes)
    mixed = np.where(is_eager, np.maximum(mixed, costs.floor), mixed)
    host = costs.fixed + costs.sequence * decoding
    return plain + host, mixed + costs.fixed + costs.sequence * mixed_in, prompt_tokens


PARTS = ("queue_s", "prefill_s", "decode_s", "collectives_s", "host_s")
"""Parts of a request's time in the order of reports."""


def parts(loop: ClosedLoop, decoding: FloatArray) -> dict[str, FloatArray]:
    """Return the seconds that a request spends in each part on its lane, without waits for a slot and other prompts.

    `decoding` is the mean number of decoding sequences of a lane. The time of a prompt assumes that it runs alone, the
    time of an answer that it runs only with decoding sequences.
    """
    role = np.zeros(loop.flight.shape, dtype=np.int64) if loop.role is None else loop.role
    costs, batch, per_rank = loop.costs, decoding / loop.stages, decoding / (loop.ranks * loop.stages)
    decode_steps = np.where(role == 1, 0.0, np.maximum(loop.output - (role == 0), 0.0))
    device = loop.device(decoding)
    decode_comm = interpolate(costs.messages, per_rank) + interpolate(costs.exchanged, batch)
    launch_wait = np.where(batch > costs.captured, np.maximum(costs.floor - device, 0.0), 0.0)
    piece = np.minimum(loop.prompt, np.maximum(loop.budget, 1.0))
    pieces = np.where(role == 2, 0.0, loop.prompt / piece)
    prefill_comm = pieces * (interpolate(costs.messages, piece) + interpolate(costs.exchanged, piece))
    prompt = pieces * (interpolate(costs.local, piece) + interpolate(costs.shared, piece)) + interpolate(
        costs.sampled, np.ones_like(piece)
    )
    prompt = np.where(role == 2, 0.0, prompt + costs.pair * 0.5 * loop.prompt**2 + loop.encode)
    is_eager = (piece > costs.captured) | (not loop.overheads.mixes)
    prefill_wait = np.where(is_eager, np.maximum(pieces * costs.floor - prompt, 0.0), 0.0)
    return {
        "prefill_s": prompt - prefill_comm,
        "decode_s": decode_steps * (device - decode_comm),
        "collectives_s": prefill_comm + decode_steps * decode_comm,
        "host_s": loop.front_end
        + prefill_wait
        + pieces * costs.fixed
        + decode_steps * (costs.fixed + costs.sequence * decoding + launch_wait),
    }
