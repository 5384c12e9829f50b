"""Runs in the engine's own Python: vLLM's start-up and scheduler on a virtual clock, without weights.

It needs vLLM, and nothing of flagcore. Each line of stdin is a question, each line of stdout an answer, both JSON. It
ends with the process whose id is its argument, and after the seconds of a question.

Its `Device` is vLLM's seam for hardware, an executor: it reports the caches of layers and the bytes for them, and
answers a batch after the seconds that the other side states. Sources: vllm 0.28 to 0.33 `v1/executor/abstract.py`,
`v1/engine/core.py`, `v1/kv_cache_interface.py`.
"""

import inspect
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import redirect_stderr
from io import StringIO
from types import SimpleNamespace
from typing import Any

REFUSALS = (ValueError, NotImplementedError, AssertionError)
"""What vLLM raises about values. Other errors show that this program does not fit the release, or the machine."""
PRINTED = {"tokens": r"KV cache size: ([\d,]+) tokens", "concurrency": r"tokens per request: ([\d.,]+)x"}


def device(specs: Any, size: int, seconds: Any) -> Any:
    """Return the class of an executor of workers with `specs` of the caches of their layers, and `size` bytes for them.

    `seconds`: the time of a batch, which has a row for each request: its tokens, those before them, whether it decodes,
    and whether it gets a token.
    """
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.outputs import ModelRunnerOutput

    clock = SimpleNamespace(now=0.0, free=0.0)  # virtual time, and when the device has finished what it was given

    class Ready(Future):  # type: ignore[type-arg]
        def __init__(self, when: float, value: object) -> None:
            super().__init__()
            self.when = when
            self.set_result(value)

        def done(self) -> bool:
            return bool(clock.now >= self.when)

        def result(self, timeout: float | None = None) -> Any:  # who waits for it moves the clock
            clock.now = max(clock.now, self.when)
            return super().result(timeout)

    answers = {
        "get_kv_cache_spec": specs,
        "determine_available_memory": [size] * len(specs),
        "get_supported_kv_cache_layouts": [["LBNHC"]] * len(specs),
        "get_supported_tasks": [("generate",)],
    }

    class Device(Executor):  # type: ignore[misc]
        time, scheduler, pending, supports_pp = clock, SimpleNamespace(), (0.0, None), True
        _init_executor = check_health = shutdown = compile_or_warm_up_model = take_draft_token_ids = lambda self: None
        supports_async_scheduling = classmethod(lambda kind: True)

        def collective_rpc(self, method: Any, *args: Any, non_block: bool = False, **more: Any) -> Any:
            answer = answers.get(method, [None] * len(specs))
            return Ready(0.0, answer) if non_block else answer

        def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
            kind, cached, batch = type(self), scheduled.scheduled_cached_reqs, []
            before = {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs}
            before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=False))
            for name, tokens in (counts := scheduled.num_scheduled_tokens).items():
                request, done = kind.scheduler.requests[name], before[name]
                ends = done + tokens >= request.num_tokens
                batch.append((tokens, done, done >= request.num_prompt_tokens and tokens == 1 and ends, ends))
            if batch:
                clock.free = max(clock.now, clock.free) + seconds(batch)
            places, made = {name: place for place, name in enumerate(counts)}, [[7] if row[3] else [] for row in batch]
            more: dict[str, Any] = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}
            output = ModelRunnerOutput(list(counts), places, sampled_token_ids=made, **more)
            kind.pending, value = (clock.free, output), None if batch else output  # no tokens of an empty batch
            return Ready(clock.now, value) if non_block else value

        def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
            future = Ready(*type(self).pending)
            return future if non_block else future.result()

    return Device


def known(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values for which a function of this release has a parameter."""
    return {name: value for name, value in values.items() if name in inspect.signature(function).parameters}


def specs_of(layers: Any, block: int) -> dict[str, Any]:
    """Return vLLM's specs of the caches of layers by name. A layer has a row for each of its caches.

    `block`: the tokens of a block of attention. States are padded to the page of attention, if there is any.
    """
    import torch
    from vllm.v1 import kv_cache_interface as caches

    types, found, pages = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}, dict[str, Any](), [0]
    places = {f"model.layers.{place}.cache{n}": row for place, rows in enumerate(layers) for n, row in enumerate(rows)}
    for name, row in sorted(places.items(), key=lambda each: "size" in each[1]):
        values = {"block_size": block, **row, "dtype": types[row.get("bytes", 2)]}
        if size := row.get("size"):
            padded = max(pages) if max(pages) >= size else None
            values |= {"shapes": ((size,),), "dtypes": (torch.uint8,), "page_size_padded": padded}
        kind = getattr(caches, row["kind"])
        found[name] = kind(**known(kind.__init__, values))
        pages.append(0 if size else found[name].page_size_bytes)
    return {name: found[name] for name in places}


class Oracle:
    """Answers questions with the installed vLLM. `ask`: sends a batch to the other side, and returns its seconds."""

    engine: Any
    kind: Any

    def __init__(self, ask: Any) -> None:
        self.ask, self.printed, self.logs = ask, list[str](), logging.Handler()
        self.logs.emit = lambda record: self.printed.append(record.getMessage())  # type: ignore[method-assign]

    def start(self, question: Any) -> dict[str, Any]:
        """Start an engine. Return its blocks, and the tokens and the concurrency that it prints."""
        from vllm.distributed.utils import get_pp_indices
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.core import EngineCore

        for each in vars(sys.modules["vllm.logger"]).values():  # what was printed once is printed again
            getattr(each, "cache_clear", lambda: None)()
        words, _ = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(question["argv"])
        args = AsyncEngineArgs.from_cli_args(words)
        args.skip_tokenizer_init, args.load_format, args.data_parallel_size = True, "dummy", 1
        layers, stages, block = question["layers"], args.pipeline_parallel_size, question["block"]
        specs, ranks = specs_of(layers, block).items(), [get_pp_indices(len(layers), n, stages) for n in range(stages)]
        of_stages = [{name: each for name, each in specs if a <= int(name.split(".")[2]) < b} for a, b in ranks]
        workers = [each for each in of_stages for _ in range(args.tensor_parallel_size)]
        self.kind = args.distributed_executor_backend = device(workers, question["bytes"], self.seconds)
        config = args.create_engine_config()
        logging.getLogger("vllm").addHandler(self.logs)  # 0.33 sets up its loggers with the first config
        config.cache_config.block_size = block
        for part, values in question.get("set", {}).items():  # defaults of chips that this machine does not have
            vars(getattr(config, part)).update(values)
        self.engine = EngineCore(config, self.kind, log_stats=False)
        self.kind.scheduler, text = self.engine.scheduler, "\n".join(self.printed)
        found = {name: re.findall(pattern, text) for name, pattern in PRINTED.items()}
        numbers = {name: float(each[-1].replace(",", "")) for name, each in found.items() if each}
        return {"blocks": int(config.cache_config.num_gpu_blocks), **numbers}

    def seconds(self, batch: Any) -> float:
        """Return the seconds of a batch, which the other side knows."""
        decoding, prompts = [row for row in batch if row[2]], [row for row in batch if not row[2]]
        sums = {
            "tokens": sum(row[0] for row in prompts),
            "longest": max((row[0] for row in prompts), default=0),
            "pairs": sum(tokens * (done + 0.5 * tokens) for tokens, done, *_ in prompts),
            "ended": sum(row[3] for row in prompts),
        }
        return float(self.ask({"decoding": len(decoding), "context": sum(row[1] + 1 for row in decoding), **sums}))

    def step(self, question: Any) -> dict[str, Any]:
        """Add requests and let the engine work once. Return the time, which requests got a token or ended, and whether
        work is left. `now`: the time until which the engine was idle."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        engine, clock = self.engine, self.kind.time
        clock.now = max(clock.now, question["now"])
        shared = {"pooling_params": None, "eos_token_id": None, "client_index": 0, "arrival_time": clock.now}
        shared["block_hasher"] = engine.request_block_hasher
        for name, parts, output in question["requests"]:
            tokens = [token for token, count in parts for _ in range(count)]
            values = {"request_id": name, "prompt_token_ids": tokens, **shared}
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            engine.add_request(Request(**known(Request.__init__, {**values, "sampling_params": params})))
        outputs, _ = engine.step_fn()
        made = [each for of_client in (outputs or {}).values() for each in of_client.outputs]
        return {
            "now": clock.now,
            "tokens": [each.request_id for each in made if each.new_token_ids],
            "ended": [each.request_id for each in made if each.finish_reason is not None],
            "busy": bool(engine.scheduler.has_requests() or engine.batch_queue),
        }


def refusal(error: BaseException, printed: str) -> str:
    """Return the engine's text if it refuses the values that it was given, or an empty text for any other error."""
    if isinstance(error, SystemExit):
        return printed.strip().rpartition("error: ")[2]
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_own = trace is None or trace.tb_frame.f_code.co_filename == __file__
    if is_own or not isinstance(error, REFUSALS):
        return ""
    problems = error.errors() if hasattr(error, "errors") else [{"msg": str(error)}]
    return "; ".join(str(each["msg"]).removeprefix("Value error, ") for each in problems)


def watch(parent: int) -> None:
    """End this process and its children with the process that started it."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Answer questions until stdin ends. The answers take the place of stdout, on which vLLM prints."""
    threading.Thread(target=watch, args=(int(sys.argv[1]),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def ask(batch: object) -> Any:
        print(json.dumps({"batch": batch}), file=answers, flush=True)
        return json.loads(sys.stdin.readline())

    oracle = Oracle(ask)
    for line in iter(sys.stdin.readline, ""):
        question, printed = json.loads(line), StringIO()
        oracle.printed.clear()
        signal.alarm(question["limit"])  # it ends this process, also while it waits in native code
        try:
            with redirect_stderr(printed):
                answer = getattr(oracle, question["do"])(question)
        except BaseException as error:
            text = refusal(error, printed.getvalue()) if question["do"] == "start" else ""
            answer = {"refused": text} if text else {"left": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
