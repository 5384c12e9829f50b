"""Sends a load to servers and measures their answers. The first request that fails stops the load."""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import psutil

from flagcore.domain.space import FloatArray, IntArray
from flagcore_serving.job import Load
from flagcore_serving.load.client import Encoders, Pairs, send_request, session
from flagcore_serving.load.figures import PRECISION, SteadyState, decode_error, duration_s, figures_of, steady_figures
from flagcore_serving.load.progress import Request, Watch
from flagcore_serving.load.result import CHAT, COMPLETIONS, LoadResult, MinRate, ProblemKind, RequestFailed, Target
from flagcore_serving.load.routing import BOOTSTRAP, LeastBusy, Prefixes, pieces_of
from flagcore_serving.load.stream import Stream
from flagcore_serving.load.traces import Traffic
from flagcore_serving.load.traffic import ADAPTER, body, image_uris, in_flight, prompts, salted, traffic, warm_up, words

LATE_S = 0.1
"""If a request is sent later than planned by more seconds than this, the result gets a note."""

CHECK_S = 0.25
"""Seconds between two checks of whether a load can end in its time."""
GRACE_S = 0.5
"""Seconds after the first failure during which further failures are collected."""


def measure(
    targets: Sequence[Target],
    load: Load,
    *,
    model: str,
    vocab_size: int,
    seed: int,
    timeout_s: float,
    limits: Mapping[str, float] | None = None,
    asked: Collection[str] = (),
    share_s: float = math.inf,
    fewest: int | None = None,
    min_rate: MinRate | None = None,
    prefix_aware: bool = False,
    prefill: Sequence[Target] = (),
    encode: Sequence[Target] = (),
    protocol: str = "",
) -> LoadResult:
    """Send `load` once to `targets`, each request to the least busy one, and return the measurements.

    The load ends when all requests are answered, a request fails, it is certain to exceed one of `limits`, or
    `timeout_s` seconds have passed. The first `load.warmup` requests do not count. Raises SpecError for an invalid
    load. Must not be called inside an event loop.

    - `seed`: the seed of the repeat. It changes prompts, but not lengths or arrivals.
    - `limits`: SLO limits in seconds, by metric.
    - `asked`: the metrics that a steady load must measure precisely. Such a load ends when they are precise, or after
      `share_s` seconds.
    - `share_s`: seconds after which a load may end early.
    - `fewest`: if not None, any load ends after `share_s` or `timeout_s` with the metrics of its requests so far if at
      least this many of them count, and ends at once if they would take much longer than `timeout_s`.
    - `min_rate`: the load also ends if it is very likely slower (`RateCheck`).
    - `prefix_aware`: whether a request goes to the target that got the longest prefix of its prompt before.
    - `prefill`: targets that only prefill. `targets` then only decode, and a request is sent to one of each (`Pairs`).
    - `encode`: targets that only encode images. The others get their embeddings. With BOOTSTRAP, they ask for them.
    - `protocol`: how these targets exchange caches, as `load.routing` names it.
    """
    deadline = time.perf_counter() + timeout_s
    load = in_flight(load)
    steady = SteadyState(asked, load.concurrency, share_s) if load.is_steady else None
    if steady is not None:
        load = replace(load, num_prompts=steady.most(load))
    requests = traffic(load)
    path = CHAT if requests.images else COMPLETIONS if requests.texts else targets[0].path
    targets, prefill, encode = ([each._replace(path=path) for each in kind] for kind in (targets, prefill, encode))
    pairs = Pairs(protocol, prefill) if prefill else None
    encoders = Encoders(encode) if encode and protocol != BOOTSTRAP else None
    warmup_requests = warm_up(requests, load.warmup)
    seeds = (load.seed, seed)
    draw: Callable[..., Sequence[IntArray | str]] = partial(
        prompts, prefix_len=load.prefix_len, vocab_size=vocab_size, seed=seeds
    )
    if requests.images:
        draw = partial(words, prefix_len=load.prefix_len, seed=seeds)
    uris = partial(image_uris, seed=seeds)
    main_prompts = salted(requests.texts, seeds) or draw(requests)
    main = _requests(model, path, requests, main_prompts, uris(requests))
    if prefix_aware and len(targets) > 1 and pairs is None:
        pieces = (pieces_of(each if isinstance(each, str) else each.tolist()) for each in main_prompts)
        main = [replace(request, pieces=each) for request, each in zip(main, pieces, strict=True)]
    warmup_uris = uris(warmup_requests, warm_up=True)
    warmup = _requests(model, path, warmup_requests, draw(warmup_requests, warm_up=True), warmup_uris)
    at_once = max(len(main), len(warmup)) if load.concurrency is None else load.concurrency
    _allow_connections(at_once if pairs is None else 2 * at_once)

    async def run() -> LoadResult:
        async with session() as http:
            if warmup:
                sender = _LoadSender(http, targets, warmup, Watch(warmup, {}), pairs=pairs, encoders=encoders)
                await sender.send(load.concurrency or len(warmup), deadline)
                if sender.problems:
                    return sender.result(requests.notes, None)
            prefixes = Prefixes(len(targets)) if prefix_aware and pairs is None else None
            watch = Watch(main, limits or {}, steady, fewest, min_rate, load.concurrency)
            sender = _LoadSender(http, targets, main, watch, prefixes=prefixes, pairs=pairs, encoders=encoders)
            gc.collect()
            meter = Meter()
            await sender.send(load.concurrency, deadline, share_s)
            return sender.result(requests.notes, meter)

    return asyncio.run(run())


class _LoadSender:
    """Sends the requests of one load."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        targets: Sequence[Target],
        requests: Sequence[Request],
        watch: Watch,
        *,
        prefixes: Prefixes | None = None,
        pairs: Pairs | None = None,
        encoders: Encoders | None = None,
    ) -> None:
        self._http, self._targets, self._requests, self._watch = http, targets, requests, watch
        self._prefixes, self._pairs, self._encoders = prefixes, pairs, encoders
        self._router = LeastBusy(len(targets))
        self._failed, self._late_s = False, 0.0
        self._has_tasks = any(request.turn for request in requests)
        self.problems: Counter[str] = Counter()

    async def send(self, concurrency: int | None, deadline: float, share_s: float = math.inf) -> None:
        """Send all requests.

        Returns when all requests are answered, one fails, `deadline` passes, or they cannot be answered before
        `deadline`. After `share_s` seconds, returns as soon as enough requests are answered.
        """
        watch, start = self._watch, time.perf_counter()
        watch.start = start
        tasks = [asyncio.create_task(work) for work in self._tasks(concurrency)]
        end = asyncio.ensure_future(asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION))
        timeout_s = max(0.0, deadline - start)
        while not end.done():
            left_s = start + timeout_s - time.perf_counter()
            if left_s <= 0 or (timeout_s - left_s > share_s and watch.is_cut()) or watch.is_hopeless(timeout_s):
                break
            if watch.is_too_late():
                break
            await asyncio.wait([end], timeout=min(left_s, CHECK_S))
        end.cancel()
        waiting = [task for task in tasks if not task.done()]
        if self._failed and waiting:
            await asyncio.wait(waiting, timeout=GRACE_S)
        elif waiting and not watch.has_ended and not watch.is_cut():
            problem = f"{ProblemKind.TIMED_OUT.value}: not answered within {watch.time_out().seconds:.1f} s"
            self.problems[problem] += len(self._requests) - len(watch.answers)
        await self._cancel(tasks)

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel tasks, and count their failed requests. Raises their other exceptions."""
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, RequestFailed):
                self.problems[str(result)] += 1
            elif isinstance(result, Exception) and not isinstance(result, _Ended):
                raise result

    def _tasks(self, concurrency: int | None) -> Iterator[Coroutine[Any, Any, None]]:
        """Return the tasks that run concurrently.

        A task sends one conversation after the other or, if conversations have arrival times, a single conversation. A
        request without further turns is a conversation, too.
        """
        starts = [index for index, request in enumerate(self._requests) if not request.turn]
        ends = (*starts[1:], len(self._requests))
        conversations = [self._requests[start:end] for start, end in zip(starts, ends, strict=True)]
        if self._requests[0].arrive_s is None and concurrency is not None:
            queue = iter(conversations)
            return (self._run_slot(queue) for _ in range(min(concurrency, len(conversations))))
        slots = asyncio.Semaphore(concurrency or len(self._requests))
        return (self._send_at_arrival(conversation, slots) for conversation in conversations)

    async def _run_slot(self, queue: Iterator[Sequence[Request]]) -> None:
        for conversation in queue:
            for request in conversation:
                await asyncio.sleep(request.wait_s)
                await self._send_one(request)

    async def _send_at_arrival(self, conversation: Sequence[Request], slots: asyncio.Semaphore) -> None:
        due = self._watch.start + (conversation[0].arrive_s or 0.0)
        await asyncio.sleep(due - time.perf_counter())
        self._late_s = max(self._late_s, time.perf_counter() - due)
        for request in conversation:
            await asyncio.sleep(request.wait_s)
            async with slots:
                await self._send_one(request)

    async def _send_one(self, request: Request) -> None:
        if self._failed or self._watch.has_ended:
            return
        if self._prefixes is not None:
            target = self._prefixes.choose(request.pieces, self._router.busy)
        else:
            target = self._router.choose()
        self._router.begin(target)
        stream = Stream(request.output_tokens)
        self._watch.sent(stream)
        try:
            first = await self._encoders.send(self._http, request.body) if self._encoders is not None else None
            if self._pairs is not None:
                sent = await self._pairs.send(self._http, self._targets[target], request.body, stream)
            else:
                sent = await send_request(self._http, self._targets[target].address, request.body, stream)
            sent = sent if first is None else first
            answer = stream.answer(
                sent_s=sent,
                start_s=sent - self._watch.start,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                target=target,
            )
        except RequestFailed:
            self._failed = True
            raise
        finally:
            self._router.end(target)
        if self._has_tasks:
            answer = replace(answer, task=request.task, turn=request.turn)
        self._watch.answered(stream, answer)
        if self._watch.has_ended:
            raise _Ended

    def result(self, notes: tuple[str, ...], meter: Meter | None) -> LoadResult:
        watch = self._watch
        answers = tuple(sorted(watch.answers, key=lambda answer: answer.start_s))
        figures, error = dict[str, float](), 0.0
        if meter is not None and not self.problems and not watch.is_stopped:
            client_load = meter.figures()
            if watch.steady is not None and not watch.ends_steadily():
                notes = (*notes, "the load has no steady state: latencies changed until its end")
            figures = steady_figures(answers, watch.window) if watch.window else figures_of(answers)
            if watch.window:
                answers = watch.window.counted(answers)
                error = watch.window.error if watch.window.error > PRECISION else 0.0
            if error:
                notes = (*notes, f"the load ended early: its metrics are precise to {error:.0%}")
            elif self._requests[0].arrive_s is None:
                error = decode_error(answers)
            figures |= client_load
            if client_load["client_cpu_share"] > NEAR_LIMIT:
                share = f"{client_load['client_cpu_share']:.2f}"
                notes = (*notes, f"the client used {share} of its core: it may have been the bottleneck")
            if self._late_s > LATE_S:
                notes = (*notes, f"a request was sent {self._late_s:.2f} s late: the client was busy")
        return LoadResult(
            figures=figures,
            duration_s=duration_s(answers) if figures and watch.window is None else time.perf_counter() - watch.start,
            completed=len(answers),
            failed=self.problems.total(),
            problems=tuple(
                f"{text} ({count} requests)" if count > 1 else text for text, count in self.problems.items()
            ),
            requests=answers if figures or watch.is_stopped else (),
            notes=notes,
            stopped=watch.is_stopped,
            slow=watch.is_slow,
            window=None if watch.window is None else (watch.window.begin_s, watch.window.end_s),
            error=error,
            progress=watch.progress,
        )


class _Ended(Exception):
    """Raised to end a load that exceeds a limit or has precise metrics. The exception does not leave this module."""


def _requests(
    model: str, path: str, requests: Traffic, prompts: Sequence[IntArray | str], uris: Sequence[Sequence[str]]
) -> list[Request]:
    def listed(values: IntArray | FloatArray | None, default: Any) -> list[Any]:
        return [default] * len(prompts) if values is None else values.tolist()

    columns = (
        *(uris or [()] * len(prompts), listed(requests.adapters, -1), requests.output_len.tolist()),
        *(listed(requests.arrive_s, None), *(each.tolist() for each in requests.tasks), listed(requests.wait_s, 0.0)),
    )
    found = list[Request]()
    for prompt, images, number, output_len, *others in zip(prompts, *columns, strict=True):
        adapter = "" if number < 0 else ADAPTER.format(number=number)
        tokens = 0 if isinstance(prompt, str) else prompt.size
        found.append(Request(body(model, prompt, output_len, path, images, adapter), tokens, output_len, *others))
    return found


def _allow_connections(count: int) -> None:
    """Raise this process's limit on open files so that it can open `count` connections, as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = count + 256
    if soft != resource.RLIM_INFINITY and soft < required:
        limit = required if hard == resource.RLIM_INFINITY else min(required, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


NEAR_LIMIT = 0.8
"""Share of one core above which the client, which has a single thread, may be the bottleneck."""


class Meter:
    """Measures the CPU time of this process with its descendants, and of the machine, since the meter was created."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._own_cpu = time.process_time()
        self._tree, self._busy = _process_tree_s(), _busy_s()

    def figures(self) -> Mapping[str, float]:
        """Return the metrics of the client and the machine by name.

        - `client_cpu_s`: the client's CPU time in seconds.
        - `client_cpu_share`: the share of one core that the client used.
        - `others_cores`: the mean number of cores that unrelated processes used.
        """
        wall = max(time.perf_counter() - self._start, 1e-9)
        own_cpu = time.process_time() - self._own_cpu
        other_s = (_busy_s() - self._busy) - (_process_tree_s() - self._tree)
        return {"client_cpu_s": own_cpu, "client_cpu_share": own_cpu / wall, "others_cores": max(0.0, other_s / wall)}


def _busy_s() -> float:
    """Return the CPU time of the whole machine in core seconds. I/O wait counts as idle, stolen time as busy."""
    times = psutil.cpu_times()
    busy = times.user + times.system
    return float(busy + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq", "steal")))


def _process_tree_s() -> float:
    """Return the core seconds of this process and its descendants, including those that have ended."""
    client = psutil.Process()
    total = 0.0
    for process in (client, *client.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
