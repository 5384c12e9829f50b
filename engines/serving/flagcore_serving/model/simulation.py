"""Simulates the scheduler of an engine: continuous batching, and chunked prefill together with decoding.

Between two events (an arrival, an end, a full cache) only the context grows, so the simulation computes all decoding
iterations between them in one step: its run time depends on the number of requests, not of tokens. The simulation is
deterministic. Sources: the schedulers of vLLM (Kwon et al. 2023, arXiv 2309.06180; v1 `core/sched/scheduler.py`) and
SGLang (`managers/scheduler.py`). `sequences`, `arrivals` and `batches` have what a lane does without pipeline stages.
"""

from collections import deque
from collections.abc import Callable
from itertools import count
from math import ceil

from flagcore_serving.model.batches import Batches, steps_within
from flagcore_serving.model.sequences import SimulatedRun

STEADY_TURNS, EVEN = 2, 1.01
"""The turns of all groups of a pipeline in which nothing changes, before the next ones are computed in one step, and
how much the times of the last ones may differ, relative to the growth of a turn. Choices."""

CHECKED = 64
"""The number of events between two checks whether a simulation has failed. A choice."""


class Simulation(Batches):
    """A simulation of requests on one lane.

    - `lengths`: (prompt tokens, output tokens) of each request.
    - `arrivals`: times at which requests are sent. If None, `concurrency` requests are sent at once, and then one
      request `think_s` seconds after the end of another one.
    - `hits`: prompt tokens in the prefix cache, besides the prefix that all requests share.
    - `loads`: seconds to load those of them that are not on the devices.
    - `images`: the work for the images of each request.
    - `adapters`: the adapter of each request, if the slots do not hold all.
    - `parts`: the parts of each prompt, after the prefix that all share, which others have, too: their numbers and
      tokens. The cache has one copy for all that need it (`holders`).

    With pipeline stages, as many groups of sequences as stages take turns: the scheduler's call k is for the group k
    modulo the stages, and comes as soon as that of the stages (and `Lane.ahead`) before it has ended. A sequence stays
    in the group in which its prompt ended, so groups are uneven. A call without work is a call, too (vLLM 0.32
    `v1/engine/core.py`: step_with_batch_queue, `core/sched/async_scheduler.py`: next_decode_eligible_step; SGLang
    0.5.23 `scheduler_pp_mixin.py`). The effects of a call are stored at once, with times in the future, and `known` is
    the time of the call. `calls`: the ends of the calls in flight.
    """

    __slots__ = ()

    def run(self, has_failed: Callable[[float], bool] | None = None) -> SimulatedRun:
        """Simulate all requests. `has_failed` gets the current time after every `CHECKED` events; the run is stopped
        if it returns true."""
        outcome, queue, partial = self.outcome, self.queue, self.partial
        for turn in count(1):
            if has_failed is not None and turn % CHECKED == 0 and has_failed(self.now):
                outcome.is_stopped = True
                break
            if self.free:
                if not self._call():
                    break
                continue
            self._receive()
            if queue or partial or self.running:
                if self._prompts():
                    continue
                if self.running:
                    self._decode()
                    continue
            elif not self.loading and self.next >= self.sent:
                break
            if self.known < self.now:  # it waits for its last batch
                self.known = self.now
            else:
                self.now = self.known = self._next_time()
                self.reserve, self.since = self.restored, self.step
        outcome.preemptions = self.preemptions
        outcome.duration = max(self.now, *self.free) if self.free else self.now
        return outcome

    def _call(self) -> bool:
        """Call the scheduler for the next group; return False if all requests have ended."""
        if len(self.calls) == len(self.free) + self.lane.ahead:
            self.known = max(self.known, self.calls.popleft())
        self.known += self.idle_s
        self.idle_s = 0.0
        self._switch((self.turn + 1) % len(self.free))
        turn, known = self.turn, self.known
        period, self.marks[turn] = known - self.marks[turn], known
        if abs(period - self.periods[turn]) > EVEN * self.growth:
            self.steady = -1
        self.periods[turn] = period
        if turn == 0:
            self._leap()
        self._receive()
        running = self.running
        if not running:
            self.now = self.known
        if self._prompts():
            self.calls.append(self.now)
        elif self.running:
            running = self.running
            filled = self.used + self.held + (running + self.others) * self.block
            if filled > self.price.filled:
                self.price.filled = filled
            read = self.price.cached(running) * (self.offset + running * self.step)
            time = self.gain * (self.price.decode(running) + read)
            self._advance(self._tokens(1) if self.gain > 1.0 else 1, self._through(time, running))
            self.calls.append(self.now)
            self._finish()
        elif self.others or self.known < max(self.calls, default=0.0):  # `free` may differ from these by rounding
            self.calls.append(self.known)
            self.idle_s = self.overheads.idle_call
        elif self.queue or self.partial or self.loading or self.next < self.sent:
            self.known = max(self.known, self._next_time())
            self.calls.clear()
        else:
            return False
        return True

    def _leap(self) -> None:
        """Compute in one step the turns in which all groups only decode: up to the one before a sequence ends, a
        request arrives, or the cache is full. Each takes as long as the last one, and the growth of the slowest group.
        """
        all_running = self.running + self.others
        members = (self.tickets, self.preemptions, all_running, len(self.queue), len(self.partial))
        self.steady = self.steady + 1 if members == self.members else 0
        self.members = members
        if not all_running or self.partial or self.loading or self.ending:
            return
        price, steps, slowest, growth = self.price, 1 << 40, 0.0, 0.0
        self._store()
        for group in self.groups:
            running = group.running
            if running:
                steps = min(steps, group.heap[0][0] - group.step - 1)
                cached = price.cached(running)
                time = price.decode(running) + cached * (group.offset + running * group.step)
                if time > slowest:
                    slowest, growth = time, self.gain**2 * cached * running
        self.growth, used = growth, self.used - self.grown + self.groups[-1].grown
        filled = used + self.held + all_running * (steps + self.block)
        if filled > price.filled:
            price.filled = filled
        if filled > self.capacity:
            steps -= ceil((filled - self.capacity) / all_running)
        period, wait = self.periods[0], self._next_time() - self.known
        is_even = self.steady >= STEADY_TURNS and max(self.periods) - min(self.periods) < EVEN * growth
        turns = steps_within(period, growth, wait, int(steps / self.gain)) - 1 if is_even and wait > 0.0 else 0
        if turns > 1:
            total = turns * period + growth * (turns * (turns + 1) / 2.0)
            for turn in range(len(self.free)):
                self._switch(turn)
                self.free[turn] += total
                self.marks[turn] += total
                if self.running:
                    self._advance(self._tokens(turns - 1), total * ((turns - 1) / turns))
                    self._advance(self._tokens(1), total / turns)
            self.calls = deque([end + total for end in self.calls])
            self.known += total
        self._switch(0)
