"""Measures the kernels of torch on this machine with all cores busy: `python -m flagcore_cpu.measure CORES SECONDS`.

It prints one JSON object. Each of up to `MAX_PROCESSES` processes has one thread, like a rank in training, and measures
at about the same time as the others. Times are medians of processor times, so other programs hardly change them. Beside
other programs it takes longer than `SECONDS`.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

now = time.process_time

MAX_PROCESSES = 16
"""Maximum number of measuring processes. They saturate the memory bandwidth, and more would need too much memory."""

SLOTS = {
    "launch": 0.05,
    "elementwise": 0.35,
    "attention": 0.2,
    "fp32": 0.3,
    "bf16": 0.35,
    "fp16": 0.15,
    "reduction": 0.5,
}
"""Share of the time for each kind of kernel, in the order of measurement."""

TOKENS_AND_SIDES = ((64, 256), (64, 512), (64, 1024), (256, 1024))
"""Tokens and width of linear layers, in ascending order, so that a slow format ends after a small one."""
LAYERS = 2
"""Number of layers with separate weights, so that weights are not in a cache when they are used."""

ELEMENTS = (1 << 16, 1 << 22, (1 << 23) + (1 << 16))
"""Sizes of fp32 tensors: in a cache, in memory that the allocator reuses, and above the 32 MiB from which glibc returns
memory to the system, so that each new tensor has new pages."""

ATTENTION = (2, 8, 256, 64)
"""Number of sequences, number of heads, sequence length, and width of a head."""
REDUCED_BYTES = (1 << 10, 1 << 20, 1 << 23)
CALLS = 200

Found = dict[str, Any]


def usual(call: Callable[[], object], end: float) -> float:
    """Return the median processor time of `call`, which is repeated until the processor time `end`: once to warm up,
    then at least twice."""
    call()
    times: list[float] = []
    while len(times) < 2 or (now() < end and len(times) < 1000):
        start = now()
        call()
        times.append(now() - start)
    return median(times)


def launch(torch: Any, end: float) -> Found:
    """Measure the time of a tiny kernel with its bookkeeping for the backward pass, and of its backward pass."""
    weight, value = torch.ones(1, requires_grad=True), torch.ones(1)

    def chain() -> None:
        result = value
        for _ in range(CALLS):
            result = result * weight
        result.backward()

    return {"launch_s": usual(chain, end) / (3 * CALLS)}


def elementwise(torch: Any, end: float) -> Found:
    """Measure a mix of training kernels: a conversion to a new tensor, four kernels in place, and a copy."""
    rows, slot = [], (end - now()) / (len(ELEMENTS) + 1)
    tensors = [torch.ones(ELEMENTS[-1], dtype=each) for each in (torch.bfloat16, torch.float32, torch.float32)]
    for count in ELEMENTS:
        narrow, wide, other = (each[:count] for each in tensors)

        def mix(narrow: Any = narrow, wide: Any = wide, other: Any = other) -> None:
            narrow.float()
            for _ in range(2):
                other.mul_(1.0)
                other.add_(1.0)
            wide.copy_(other)

        rows.append([46 * count, usual(mix, now() + slot)])
    copied = usual(lambda: wide.copy_(other), now() + slot)
    return {"elementwise": rows, "bytes_per_second": 8 * ELEMENTS[-1] / copied}


def attention(torch: Any, end: float) -> Found:
    """Measure causal attention forward and backward, in fp32 and bf16."""
    found, slot = {}, (end - now()) / 4
    for name in ("fp32", "bf16"):
        inputs = [torch.ones(*ATTENTION, dtype=_dtype(torch, name), requires_grad=True) for _ in range(3)]
        forward = partial(torch.nn.functional.scaled_dot_product_attention, *inputs, is_causal=True)
        output = forward()
        backward = partial(torch.autograd.grad, output, inputs, torch.ones_like(output), retain_graph=True)
        found[name] = [usual(forward, now() + slot), usual(backward, now() + slot)]
    return {"attention_s": found}


def _dtype(torch: Any, precision: str) -> Any:
    return getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[precision])


def products(torch: Any, name: str, end: float) -> float:
    """Measure the three matrix products of a linear layer, and return their usual rate in FLOP/s."""
    dtype = _dtype(torch, name)
    rates: list[float] = []
    for place, (tokens, side) in enumerate(TOKENS_AND_SIDES):
        left = end - now()
        work = 6 * tokens * side * side * LAYERS
        if rates and 2.5 * work / rates[-1] > left:
            break
        weights = [torch.full((side, side), 0.01, dtype=dtype) for _ in range(LAYERS)]
        value, gradient = (torch.full((tokens, side), 0.01, dtype=dtype) for _ in range(2))

        def layers(weights: Any = weights, value: Any = value, gradient: Any = gradient) -> None:
            for weight in weights:
                value @ weight.t()
                gradient @ weight
                gradient.t() @ value

        until = end - left * (1.0 - 1.0 / (len(TOKENS_AND_SIDES) - place))
        rates.append(work / usual(layers, until))
    return median(rates)


def reduction(torch: Any, number: int, store: str, end: float) -> Found:
    """Measure all-reduces between two processes. Returns bytes and seconds: the processor time of both, as they take
    turns."""
    dist = torch.distributed
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # otherwise gloo resolves the name of this host
    limit = timedelta(seconds=10)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=number, world_size=2, timeout=limit)
    rows, begin = [], time.perf_counter()
    work = torch.ones(256, 256)
    for place, size in enumerate(REDUCED_BYTES, 1):
        data, times = torch.zeros(size // 4), list[float]()
        until = begin + (end - begin) * place / len(REDUCED_BYTES)
        going = torch.ones(1)
        while going.item() and len(times) < 50:
            torch.mm(work, work)  # ranks compute between reductions, so that no rank waits in a busy loop
            start = now()
            dist.all_reduce(data)
            times.append(2.0 * (now() - start))
            going.fill_(time.perf_counter() < until)
            dist.all_reduce(going, op=dist.ReduceOp.MIN)
        rows.append([size, median(times)])
    return {"reduction": rows}


def measured(torch: Any, number: int, processes: int, store: str, seconds: float) -> Found:
    """Return the measurements of the process `number`."""
    found: Found = {"flops": {}}
    end = now()
    for name, share in SLOTS.items():
        end += seconds * share / sum(SLOTS.values())
        with suppress(RuntimeError):  # torch lacks a kernel, or there is no network: use the other results
            if name == "reduction":
                end = time.perf_counter() + seconds * share
                found |= reduction(torch, number, store, end) if processes > 1 and number < 2 else {}
            elif name in ("fp32", "bf16", "fp16"):
                found["flops"][name] = products(torch, name, end)
            else:
                found |= {"launch": launch, "elementwise": elementwise, "attention": attention}[name](torch, end)
    return found


def middle(found: list[Any]) -> Any:
    """Return the element-wise medians of several structures of numbers that have the same shape."""
    first = found[0]
    if isinstance(first, dict):
        return {key: middle([each[key] for each in found if key in each]) for key in first}
    return [middle(list(column)) for column in zip(*found, strict=True)] if isinstance(first, list) else median(found)


def forked(processes: int, work: Callable[[int], Found]) -> Iterator[Found]:
    """Run `work` in `processes` forked processes, and yield their results."""
    pipes = []
    for number in range(processes):
        receive, send = os.pipe()
        if not os.fork():
            with suppress(BaseException), os.fdopen(send, "w") as file:
                file.write(json.dumps(work(number)))
            os._exit(0)
        os.close(send)
        pipes.append(receive)
    for receive in pipes:
        with os.fdopen(receive) as file, suppress(ValueError):
            yield json.load(file)


def main(cores: int, seconds: float) -> None:
    """Measure for about `seconds` and print the result."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    attention(torch, 0.0)  # load the kernels before the measurement
    processes = min(cores, MAX_PROCESSES)
    with tempfile.TemporaryDirectory(prefix="flagcore-") as folder:
        store = os.path.join(folder, "store")
        found = list(forked(processes, lambda each: measured(torch, each, processes, store, seconds)))
    print(json.dumps({"torch": torch.__version__, **middle(found)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
