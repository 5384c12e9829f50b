"""Measures how many streamed tokens per second the load client processes on one core.

The server, `reference_server.py`, is a separate process on the last core, and the client is on the first one. Every
token is a separate event. With a rate, an answer has an event every connections / rate seconds, so the client reads
every event separately, which is the most work. Without a rate, events follow immediately, and those that wait are read
together.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median

from flagcore_serving.job import Load
from flagcore_serving.load.result import Target
from flagcore_serving.load.sending import measure

GOAL = 20_000


def main() -> None:
    """Print one line per repeat, and finally one JSON object with the results and the machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=GOAL, help="rate of the server in tokens per second")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    figures = {
        "paced": bench(options, options.rate),
        "unpaced": bench(options, math.inf),
        "goal_tokens_per_s": GOAL,
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}",
    }
    print(json.dumps(figures))


def bench(options: argparse.Namespace, rate: float) -> dict[str, float]:
    cores = sorted(os.sched_getaffinity(0))
    program = Path(__file__).with_name("reference_server.py")
    interval_ms = 1e3 * options.concurrency / rate
    server = subprocess.Popen([sys.executable, program, f"--chunk-ms={interval_ms}"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        target = Target(f"http://127.0.0.1:{int(server.stdout.readline())}")
        os.sched_setaffinity(0, cores[:1])
        load = Load(
            input_len=32, output_len=options.tokens, num_prompts=options.requests, concurrency=options.concurrency
        )
        by_wall, by_cpu = [], []
        for seed in range(options.repeats):
            tokens = measure([target], load, model="reference", vocab_size=32000, seed=seed, timeout_s=300)
            if tokens.problems:
                raise SystemExit("; ".join(tokens.problems))
            figures = tokens.figures
            by_wall.append(figures["output_tokens_per_s"])
            by_cpu.append(options.requests * options.tokens / figures["client_cpu_s"])
            print(
                f"{by_wall[-1]:,.0f} tokens/s; {by_cpu[-1]:,.0f} per CPU second of the client, which used "
                f"{figures['client_cpu_share']:.2f} cores; other processes used {figures['others_cores']:.2f}",
                file=sys.stderr,
            )
    finally:
        server.terminate()
        server.wait()
        os.sched_setaffinity(0, cores)
    return {
        "tokens_per_s": median(by_wall),
        "tokens_per_client_cpu_s": median(by_cpu),
        "ratio_to_goal": median(by_cpu) / GOAL,
    }


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
