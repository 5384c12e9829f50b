"""Asks the installed vLLM whether it starts the servers of a candidate, and how its scheduler would serve a load.

The program `inside.py` answers in the engine's own Python, in a process of its own.
"""

import atexit
import json
import math
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import count
from math import ceil
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from flagcore_importers import programs
from flagcore_serving.model.sequences import Request, SimulatedRun
from flagcore_serving.model.simulation import CHECKED, Simulation
from flagcore_serving.schedules import Schedule
from flagcore_serving.space.hardware import Hardware
from flagcore_serving.space.placement import instance_kinds
from flagcore_vllm.cache import Kind, is_packed, kinds_of

from flagcore.contracts import Platform, Problem
from flagcore.domain.prediction import MEMORY_ERROR, Predictions
from flagcore.domain.space import Candidate
from flagcore.i18n import N_, Message

INSIDE = Path(__file__).with_name("inside.py")
LIMIT_S = 60.0
"""The seconds of a question, with the import of the engine, and of a simulated load."""
WORKED_S = 1.0
"""The seconds of a processor after which a program works. It has twice LIMIT_S more, once: the machine may be busy."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "INFO"}


class Unanswered(Exception):
    """The program gave no answer: the release has another seam, or it was killed, or took too long."""


class Process:
    """A started program. It ends with this process, and after the seconds of a question. Raises Unanswered.

    `has_answered`: whether it has answered a question. `poll`: returns None while it runs.
    """

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        argv, variables = (python, str(INSIDE), str(os.getpid())), {**os.environ, **environment, **ENVIRONMENT}
        started: dict[str, Any] = {"env": variables, "text": True, "start_new_session": True}
        self._buffer, self._patience, self.has_answered = b"", True, False
        try:
            self._popen: Popen[str] = Popen(argv, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, **started)
        except OSError as error:
            raise Unanswered(f"{python} cannot be started: {error.strerror}") from None
        self.pid, self.poll = self._popen.pid, self._popen.poll

    def ask(self, question: Mapping[str, Any], end: float, seconds: Callable[[Any], float] = float) -> dict[str, Any]:
        """Return the answer to a question, by `end` (time.monotonic()). `seconds`: the time of a batch.

        Raises Unanswered, and then the process has ended, unless it said itself why there is no answer.
        """
        limit = ceil(max(end - time.monotonic(), 1.0) + 2.0 * LIMIT_S)
        try:
            print(json.dumps({**question, "limit": limit}), file=self._popen.stdin, flush=True)
            while "batch" in (answer := self._read(end)):
                print(json.dumps(seconds(answer["batch"])), file=self._popen.stdin, flush=True)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | ValueError):
                raise Unanswered(str(error)) from None
            raise
        if "left" in answer:
            raise Unanswered(str(answer["left"]))
        self.has_answered = True
        return answer

    def _read(self, end: float) -> dict[str, Any]:
        """Return the next line. Raises OSError if it does not come by `end`, ValueError if it is not JSON."""
        assert self._popen.stdout is not None
        while b"\n" not in self._buffer:
            if not select.select([self._popen.stdout], [], [], max(end - time.monotonic(), 0.0))[0]:
                if not self._patience or sum(psutil.Process(self.pid).cpu_times()[:4]) < WORKED_S:
                    raise OSError(f"no answer within {LIMIT_S:.0f} s")
                end, self._patience = end + 2.0 * LIMIT_S, False
            elif piece := os.read(self._popen.stdout.fileno(), 1 << 16):
                self._buffer += piece
            else:
                raise OSError("its program has ended")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        """Kill the program with its children."""
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(OSError, ValueError):
            self._popen.communicate()
        self._popen.wait()


BEST = 10
"""The number of candidates whose loads the engine's scheduler serves."""
REFUSED = "refused_by_engine"
TIMES = ("step_time_s", "low_s", "high_s")
ATTENTION = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")


class VllmSchedule(Schedule):
    """Keeps one process, of the last command and environment. `left`: commands that are not asked any more."""

    def __init__(self) -> None:
        self.process: Process | None = None
        self._key: object = None
        self.left, self._notes = set[str](), dict[str, None]()
        atexit.register(self.close)

    def notes(self) -> Sequence[str]:
        return tuple(self._notes)

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.close()
        self.process = None

    def refusal(self, engine: Any, platform: Platform, candidate: Candidate) -> str:
        """See `Schedule`. Predicted memory may be wrong by MEMORY_ERROR of a device's: with that much more, it fits."""
        answer = dict[str, Any]()
        try:
            process, question = self._question(engine, platform, candidate, more=MEMORY_ERROR)
            answer = process.ask(question, time.monotonic() + LIMIT_S)
        except Unanswered as error:
            self._leaves(engine, platform, error)
        if Hardware.of(platform.task).on_cores:  # a server needs all cores and memory
            self.close()
        return str(answer.get("refused", ""))

    def scheduled(self, problem: Problem) -> Problem:
        """See `Schedule`. Predictions of all other candidates are scaled by the median ratio of those of the best."""
        predictions, pruned, refused = problem.predictions, problem.pruned, dict[int, str]()
        rows, ratios = pruned.open_rows, dict[int, dict[str, float]]()
        order = rows[np.argsort(np.nan_to_num(predictions.step_time_s[rows], nan=math.inf), kind="stable")]
        for row in order[np.isfinite(predictions.step_time_s[order])].tolist():
            try:
                found = self._ratios(problem, row)
            except Unanswered as error:
                found = {}
                if self._leaves(problem.engine, problem.platform, error):
                    break
            if isinstance(found, str):
                refused[row] = found
            else:
                ratios[row] = found
            if len(ratios) == BEST:
                break
        if simulated := {row: each for row, each in ratios.items() if each}:
            text = N_("the engine's own scheduler serves the loads of the {count} fastest candidates")
            self._notes[Message(text, count=len(simulated))] = None
            problem = replace(problem, predictions=_scaled(predictions, simulated))
        if not refused:
            return problem
        rule: Any = SimpleNamespace(name=REFUSED, message=next(iter(refused.values())))
        numbers = pruned.rule.copy()
        numbers[list(refused)] = len(pruned.rules) + 1
        pruned = replace(pruned, rule=numbers, rules=(*pruned.rules, REFUSED))
        return replace(problem, pruned=pruned, rules=(*problem.rules, rule))

    def _ratios(self, problem: Problem, row: int) -> dict[str, float] | str:
        """Return the figures of a candidate by the engine's scheduler relative to flagcore's, or the engine's refusal.

        Empty if no load of it can be scheduled so. Raises Unanswered.
        """
        engine: Any = problem.engine
        platform, task, candidate = problem.platform, problem.task.for_engine(), problem.space.candidate(row)
        process, question = self._question(engine, platform, candidate)
        result = process.ask(question, time.monotonic() + LIMIT_S)
        if "refused" in result:
            return str(result["refused"])
        columns, simulation = engine.columns_of(task, candidate), simulated_by(process, question, result)
        own = engine.predict(task, columns, platform.costs)
        asked = engine.predict(task, columns, platform.costs, simulation=simulation)
        if not result.get("runs"):
            return {}
        pairs = {name: (each[0], own.figures[name][0]) for name, each in asked.figures.items() if name in own.figures}
        pairs |= {name: (getattr(asked, name)[0], getattr(own, name)[0]) for name in TIMES}
        return {name: float(one / other) for name, (one, other) in pairs.items() if other and math.isfinite(other)}

    def _question(
        self, engine: Any, platform: Platform, candidate: Candidate, more: float = 0.0
    ) -> tuple[Process, dict[str, Any]]:
        """Return the process and the question for an instance of a candidate.

        `more`: the share of a device's memory by which its cache may be larger than predicted. 0 for a plan, which
        states the defaults that follow from the chips: this machine may not have them. Raises Unanswered.
        """
        task, model = platform.task.for_engine(), platform.task.spec.model
        command, packages = engine.program.start_command(task.spec), engine.program.packages
        python, instance = programs.interpreter(command[0]), engine.instances(platform, candidate)[0]
        is_known = not is_packed(model) and not instance.kind  # its layers, and an instance that does all
        if command[0] in self.left or not (python and programs.package_version(command[0], *packages) and is_known):
            raise Unanswered  # there is nothing to ask
        columns = engine.columns_of(task, candidate)
        settings = engine.settings(task, instance_kinds(task, columns).columns)
        predicted = engine.predict(task, columns, platform.costs, simulates=False)
        cache = float(predicted.figures["kv_cache_bytes"][0] + more * predicted.device_used_bytes[0])
        now = SimpleNamespace(**{each.name: getattr(settings, each.name)[0].item() for each in fields(settings)})
        fixed = now.cache_bytes * now.devices / (now.tensor * now.pipeline * now.data)
        given = instance.at_port(1).argv[len(command) :]
        argv = list(given if "--model" in given else ("--model", *given))
        layers = [caches(kind, now) if kind else [] for kind in kinds_of(model)]
        question: dict[str, Any] = {"do": "start", "argv": argv, "layers": layers}
        question |= {"bytes": int(cache if math.isnan(fixed) else fixed), "block": now.block_size}
        if not more:
            limits = {"max_num_seqs": now.max_running, "max_num_batched_tokens": now.max_batched_tokens}
            for flag, value in ((f"--{name.replace('_', '-')}", value) for name, value in limits.items()):
                argv += [flag, str(value)] * (flag not in given)
            modes = {"enable_chunked_prefill": bool(now.chunked), "async_scheduling": now.ahead > 0.0}
            limits |= {**modes, "scheduler_cls": None}
            prefixes = {"enable_prefix_caching": bool(now.prefix_caching)}
            question["set"] = {"scheduler_config": limits, "cache_config": prefixes}
        return self._asked(python, instance.environment), question

    def _asked(self, python: str, environment: Mapping[str, str]) -> Process:
        """Return the process for an environment. It replaces that for another one. Raises Unanswered."""
        key = (python, *sorted(environment.items()))
        if self.process is None or self._key != key or self.process.poll() is not None:
            self.close()
            self.process, self._key = Process(python, environment), key
        return self.process

    def _leaves(self, engine: Any, platform: Platform, error: Unanswered) -> bool:
        """Return whether the engine is not asked any more: it ended, or never answered. Then say why."""
        has_answered = self.process is not None and self.process.has_answered and self.process.poll() is None
        if has_answered or not str(error):
            return False
        self.close()
        self.left.add(engine.program.start_command(platform.task.spec)[0])
        text = N_("flagcore-vllm-schedule got no answer from vllm {version}, and flagcore goes on without: {why}")
        self._notes[Message(text, version=engine.program.version(platform.task.spec), why=error)] = None
        return True


def caches(kind: Kind, now: SimpleNamespace) -> list[dict[str, Any]]:
    """Return the caches of a layer of a kind on a rank with the settings `now`, as `inside.specs_of` reads them."""
    if kind.is_state:
        mode = ("align", now.block_size) if now.prefix_caching else ("none", now.context_len)
        row = {"kind": "MambaSpec", "size": math.ceil(kind.size / now.tensor), "block_size": mode[1]}
        row |= {"mamba_cache_mode": mode[0], "num_speculative_blocks": now.drafted}
        more = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if kind.more else {}
        return [{**row, **more}]
    row = {"num_kv_heads": max(int(kind.heads / now.tensor), 1), "bytes": int(now.cache_element_bytes)}
    if kind.heads == 1 and kind.name != "Attention":
        row |= {"kind": "MLAAttentionSpec", "head_size": int(kind.width)}
    else:
        row |= {"head_size": math.ceil(kind.width / 2), "head_size_v": int(kind.width) // 2}
        name = ATTENTION[(kind.window > 0) + kind.pieces]
        row |= {"kind": name, "sliding_window": kind.window, "attention_chunk_size": kind.window or None}
    index = {"kind": "MLAAttentionSpec", "num_kv_heads": 1, "head_size": int(kind.index), "bytes": 1}
    return [row, index] if kind.index else [row]


def _scaled(predictions: Predictions, ratios: Mapping[int, Mapping[str, float]]) -> Predictions:
    """Return predictions with the figures of rows multiplied by their `ratios`, and others by the medians of these."""

    def scaled(name: str, values: Any) -> Any:
        found = [each.get(name, 1.0) for each in ratios.values()]
        factor = np.full(values.shape, np.median(found))
        factor[list(ratios)] = found
        return values * factor

    figures = {name: scaled(name, each) for name, each in predictions.figures.items()}
    return replace(predictions, **{name: scaled(name, getattr(predictions, name)) for name in TIMES}, figures=figures)


def simulated_by(process: Process, question: Mapping[str, Any], result: dict[str, Any]) -> type[Any]:
    """Return the class of simulations that `process` schedules, with an engine that starts as `question` says.

    `result` gets the engine's answer, and `runs`, the number of loads that were scheduled so. The others have
    lanes with several ranks or stages, or requests with drafts, adapters, images, or prefixes of their own.
    """

    class Scheduled:
        def __init__(self, *args: Any, **named: Any) -> None:
            self.plain = Simulation(*args, **named)
            self.requests = self.plain.requests

        def run(self, has_failed: Callable[[float], bool] | None = None) -> SimulatedRun:
            plain, lane, end = self.plain, self.plain.lane, time.monotonic() + LIMIT_S
            is_other = lane.ranks * lane.stages > 1 or lane.drafted or lane.adapters or plain.apart or not lane.mixes
            if is_other or any(each.load or each.read or each.encode or each.hit > 0 for each in self.requests):
                return plain.run(has_failed)
            result.update(process.ask(question, end))
            if "refused" in result:
                raise Unanswered(result["refused"])
            known, last, is_busy = dict[str, Request](), dict[str, float](), False
            for turn in count(1):
                if has_failed is not None and turn % CHECKED == 0 and has_failed(plain.now):
                    plain.outcome.is_stopped = True
                    break
                new = self._new(known)
                if not new and not is_busy:
                    if plain.next >= plain.sent:
                        break
                    plain.now = max(plain.now, plain._next_time())
                    continue
                found = process.ask({"do": "step", "now": plain.now, "requests": new}, end, self._seconds)
                plain.now, is_busy, gaps = found["now"], found["busy"], Counter[float]()
                for name in found["tokens"]:
                    if known[name].first < 0.0:
                        known[name].first = plain.now
                    else:
                        gaps[plain.now - last[name]] += 1
                    last[name] = plain.now
                plain.outcome.gaps += gaps.items()
                for name in found["ended"]:
                    plain._end(known[name])
            plain.outcome.duration, result["runs"] = plain.now, result.get("runs", 0) + 1
            return plain.outcome

        def _seconds(self, batch: Mapping[str, Any]) -> float:
            decoding, prompts = batch["decoding"], ("tokens", "longest", "pairs", "ended")
            read = self.plain.price.cached(decoding) * batch["context"] if decoding else 0.0
            if not batch["tokens"]:
                return read + self.plain.price.decode(decoding)
            return read + self.plain.price.mixed(decoding, *(batch[name] for name in prompts))

        def _new(self, known: dict[str, Request]) -> list[tuple[str, list[tuple[int, int]], int]]:
            """Return the requests that are ready: the name, each token of the prompt with its count, the output."""
            plain, found = self.plain, []
            plain._arrive()
            while plain._ready_time() <= plain.now:
                request = plain._take()
                known[str(plain.next)], shared = request, min(int(plain.prefix), request.prompt)
                tokens = [(1, shared), (1 + plain.next, request.prompt - shared)]
                found.append((str(plain.next), tokens, request.output))
            return found

    return Scheduled


SCHEDULE = VllmSchedule()
