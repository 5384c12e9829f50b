"""The benchmark of operators: `python -m flagcore_operators.bench JOB.json`.

It compares the results of each implementation with the reference, and then times it. Each result is one line of the
output. A line is written before each implementation, so that the line of one that crashes or hangs is the last one.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flagcore_training.microbench.kernels import Bench
from flagcore_training.trial.forked_ranks import exit_at_once, import_all

from flagcore_operators.arguments import decode, difference, tensors
from flagcore_operators.contract import OperatorLibrary, find_library

SECONDS, AGAIN = 0.1, 2
"""Seconds for which an implementation is timed, after its first calls, and how often it is timed again, in turn with
the others of its operator, because the load of the machine and clocks change. The shortest time counts."""
SEED = 20261128


def main(file: str) -> None:
    """Run the job in a file."""
    job = json.loads(Path(file).read_text(encoding="utf-8"))
    import_all(*job["preload"])
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    library, bench = find_library(job["library"]), Bench(job["device_type"], 0, is_distributed=False)
    with open(job["output"], "w", encoding="utf-8", buffering=1) as output:
        print("{}", file=output)  # the start is over
        for number, implementations in job["todo"]:
            call, expected, right = job["calls"][number], None, list[dict[str, Any]]()
            operator = call["operator"]
            for implementation in implementations:
                record = {"call": number, "implementation": implementation}
                print(json.dumps(record), file=output)
                try:
                    if expected is None:
                        expected = _results(library, call, library.reference_of(call["implementations"]), bench)
                    if not expected:
                        raise TypeError("there are no tensors to compare")
                    record["wrong"] = difference(_results(library, call, implementation, bench), expected)
                    if not record["wrong"]:
                        with library.using(operator, implementation):
                            record["seconds"] = bench.time(_made(library, call, bench), SECONDS).seconds
                        right.append(record)
                except Exception as error:  # of any kind: the implementation is excluded, the others are measured
                    record["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                print(json.dumps({**record, "done": True}), file=output)
            if len(right) > 1:
                run = _made(library, call, bench)
                for record in right * AGAIN:
                    print(json.dumps({name: record[name] for name in ("call", "implementation")}), file=output)
                    with library.using(operator, record["implementation"]):
                        record["seconds"] = min(record["seconds"], bench.time(run, SECONDS).seconds)
                    print(json.dumps({**record, "done": True}), file=output)


def _made(library: OperatorLibrary, call: dict[str, Any], bench: Bench) -> Callable[[], list[Any]]:
    """Return a function that makes the call with tensors that are the same in each process.

    It returns the results, the gradients, and the arguments, which an operator may change.
    """
    generator = torch.Generator().manual_seed(SEED)
    arguments = decode(call["arguments"], bench.device, generator)
    named = {name: decode(value, bench.device, generator) for name, value in call["named"].items()}
    function = library.function(call["function"])
    leaves = [each for each in tensors([arguments, list(named.values())]) if each.requires_grad]
    gradients: list[torch.Tensor] = []

    def made() -> list[Any]:
        results = function(*arguments, **named)
        if not leaves:
            return [results, arguments]
        outputs = [each for each in tensors(results) if each.requires_grad]
        if not gradients:
            gradients.extend(torch.randn(each.shape, generator=generator).to(each) for each in outputs)
        return [results, torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)]

    return made


def _results(library: OperatorLibrary, call: dict[str, Any], implementation: str, bench: Bench) -> list[torch.Tensor]:
    with library.using(call["operator"], implementation):
        found = [each.detach().to("cpu", copy=True) for each in tensors(_made(library, call, bench)())]
    bench.synchronize()
    return found


if __name__ == "__main__":
    main(sys.argv[1])
    exit_at_once(0)
