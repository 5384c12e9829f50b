"""An operator library with planted costs on any device, and a program that trains with it: `python planted.py STEPS`.

Each implementation computes for its cost in processor time. One is wrong, one crashes, one hangs, and one changes its
input.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flagcore_operators.contract import OperatorLibrary, read_choice

VARIABLE = "PLANTED_OPERATORS"
MS = {
    "relu": {"usual": 3.0, "fast": 1.0, "slow": 6.0},
    "tanh": {"usual": 3.0, "wrong": 0.2},
    "sigmoid": {"usual": 2.0, "crashes": 0.2},
    "exp": {"usual": 2.0, "hangs": 0.2, "fast": 1.0},
    "abs": {"usual": 4.0, "spoils": 0.2, "fast": 1.0},
    "neg": {"usual": 2.0, "avoided": 0.2},
}
"""The milliseconds of each implementation, the default first."""
BEST = {"relu": "fast", "exp": "fast", "abs": "fast"}
SIZE = 256


class Planted(OperatorLibrary):
    name, reference, data = "planted", "usual", ("planted",)

    def serves(self, device_type: str, engine: str) -> bool:
        return True

    def environment(self, choice: Mapping[str, str]) -> Mapping[str, str]:
        return {VARIABLE: ",".join(f"{name}={value}" for name, value in sorted(choice.items()))}

    def file(self, choice: Mapping[str, str]) -> str:
        return "\n".join(f"{name}: {value}" for name, value in sorted(choice.items()))

    def in_effect(self, environment: Mapping[str, str], vendor: str) -> Mapping[str, str]:
        return read_choice(environment.get(VARIABLE, ""))

    def operator(self, function: str, arguments: Sequence[Any]) -> str:
        name = function.removeprefix("aten.").removesuffix(".default")
        return name if name in MS else ""

    def implementations(self, operator: str) -> Sequence[str]:
        return list(MS[operator])

    @contextmanager
    def using(self, operator: str, implementation: str) -> Iterator[None]:
        library = use({operator: implementation})
        yield
        library._destroy()


def use(choice: Mapping[str, str]) -> Any:
    """Replace operators of torch on the device by planted ones."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    for operator, implementation in choice.items():
        library.impl(operator, made(operator, implementation), os.environ.get("PLANTED_KEY", "CPU"))
    return library


def made(operator: str, implementation: str) -> Any:
    import torch

    def run(value: Any) -> Any:
        end = time.process_time() + MS[operator][implementation] * 1e-3
        while time.process_time() < end:
            pass
        if implementation == "crashes":
            os.abort()
        while implementation == "hangs":
            time.sleep(1)
        result = value.new_empty(value.shape)
        getattr(torch.ops.aten, operator).out(value, out=result) if operator != "relu" else torch.clamp_min(
            value, 0.0, out=result
        )
        if implementation == "spoils":
            value.zero_()
        return result.mul_(1.01) if implementation == "wrong" else result

    return run


def main(steps: int) -> None:
    import torch

    if "PLANTED_PRELOAD" in os.environ:
        __import__(os.environ["PLANTED_PRELOAD"])
    library = use({name: next(iter(costs)) for name, costs in MS.items()} | read_choice(os.environ.get(VARIABLE, "")))
    value = torch.ones(SIZE, device=os.environ.get("PLANTED_DEVICE", "cpu"))
    for step in range(1, steps + 1):
        start = time.process_time()
        for _ in range(4):
            for name in MS:
                getattr(torch, name)(value)
        print(f"step {step} took {1e3 * (time.process_time() - start):.3f} ms", flush=True)
    del library


PLANTED = Planted()

if __name__ == "__main__":
    main(int(sys.argv[1]))
