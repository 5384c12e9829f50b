"""Measures the overhead of `flag tune` on thousands of simulated hosts, with the real loop and launcher.

`python benchmarks/many_hosts.py --hosts 4096` prints one JSON object. With `--channels 4096` it instead starts 4096
real processes that only echo, in place of `ssh`. See benchmarks/LOG.md.
"""

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flagcore_hosts import connection, wire
from simulated_hosts import Channel, Simulator, resident_bytes

from flagcore import api
from flagcore.contracts import Event

ITERS = 6
SPEC = """
model: {{name: bench, num_layers: 96, hidden_size: 12288, ffn_hidden_size: 49152, num_attention_heads: 96,
         vocab_size: 51200}}
cluster: {{chip: H100-SXM, hostfile: {hosts}, spares: {spares}}}
train: {{engine: megatron, seq_length: 4096, global_batch_size: {batch}, precision: bf16,
         command: [torchrun, {program}]}}
auto_tuner:
  launcher: ssh
  control: {{train_iters: {iters}, warmup_iters: 1, max_trials: {trials}, repeats: {repeats}}}
"""


class Watch:
    """Follows the events of a tune, and sets the step time of the simulator's next trial."""

    def __init__(self, control: socket.socket, seed: int) -> None:
        self.control, self.seed = control, seed
        self.marks: list[tuple[str, float, float, Any]] = []
        self.true: dict[Any, float] = {}
        self.idle_bytes = 0
        """Resident memory before the first trial."""

    def __call__(self, event: Event) -> None:
        self.marks.append((event.kind, time.monotonic(), time.process_time(), event.trial))
        if event.kind == "trial_started":
            self.idle_bytes = self.idle_bytes or resident_bytes(os.getpid())
            model_error = random.Random(f"{self.seed} {event.trial.candidate}").uniform(0.9, 1.1)
            self.true[event.trial.candidate] = (event.trial.predicted_step_s or 0.0) * model_error
            self.control.send(json.dumps({"step_s": self.true[event.trial.candidate]}).encode())


def main() -> None:
    """Print one JSON object with the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--channels", type=int, help="start this many real processes instead")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--start", type=float, default=0.5, help="start time of an agent or a program in seconds")
    parser.add_argument("--play", type=float, default=10.0, help="simulated duration of a trial's steps in seconds")
    parser.add_argument(
        "--hours", type=float, default=0.5, help="duration that a trial represents, for the rate of lost hosts"
    )
    parser.add_argument("--slow", type=float, default=0.5, help="share of trials with a slow host or link")
    parser.add_argument("--silence", type=float, default=connection.SILENCE_SECONDS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    machine = {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    print(json.dumps({**machine, **(channels(options.channels) if options.channels else tune_simulated(options))}))


def channels(count: int) -> dict[str, Any]:
    """Start real channel processes, and return their costs."""
    begin, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryFile() as errors:
        result = [
            subprocess.Popen(
                ["sh", "-c", "exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )
            for _ in range(count)
        ]  # fmt: skip
    spawned, own_usage = time.monotonic() - begin, time.process_time() - cpu
    pages = sum(int(Path(f"/proc/{each.pid}/statm").read_text().split()[1]) for each in result)
    files = len(os.listdir("/proc/self/fd"))
    for each in result:
        assert each.stdin
        each.stdin.close()
    for each in result:
        each.wait()
    ended = time.monotonic() - begin - spawned
    return {
        "channels": count,
        "spawned_s": round(spawned, 2),
        "own_cpu_s": round(own_usage, 2),
        "ended_s": round(ended, 2),
        "open_files": files,
        "rss_of_processes_mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def tune_simulated(options: argparse.Namespace) -> dict[str, Any]:
    """Tune on simulated hosts, and return the results."""
    connection.SILENCE_SECONDS, wire.BEAT_SECONDS = options.silence, options.silence / 6
    parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "played.jsonl")
        pid = os.fork()
        if pid == 0:
            parent_socket.close()
            try:
                Simulator(child_socket, log, options, ITERS).run()
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(0)
        child_socket.close()
        Channel.control = parent_socket
        pipes = {"PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
        vars(connection)["subprocess"] = SimpleNamespace(Popen=Channel, **pipes)
        os.environ["XDG_DATA_HOME"] = os.environ["XDG_CACHE_HOME"] = folder
        watch = Watch(parent_socket, options.seed)
        begin, cpu = time.monotonic(), time.process_time()
        outcome = api.tune(write_spec(options, Path(folder)), run_dir=Path(folder, "run"), on_event=watch)
        total, cpu = time.monotonic() - begin, time.process_time() - cpu
        parent_socket.close()
        os.waitpid(pid, 0)
        played = [json.loads(line) for line in log.read_text().splitlines()]
    return figures(options, watch, played, outcome.plan, begin, total, cpu)


def write_spec(options: argparse.Namespace, folder: Path) -> Path:
    """Write the spec and its host file."""
    spares = max(2, options.hosts // 128)
    hosts, spec = folder / "hosts", folder / "bench.yaml"
    hosts.write_text("".join(f"node-{number:04} slots=8\n" for number in range(options.hosts + spares)))
    program = folder / "pretrain_gpt.py"
    program.touch()
    named = {"hosts": hosts, "program": program, "spares": spares, "batch": options.hosts * 8}
    spec.write_text(SPEC.format(iters=ITERS, trials=options.trials, repeats=options.repeats, **named))
    return spec


def figures(
    options: argparse.Namespace,
    watch: Watch,
    trials: list[dict[str, Any]],
    plan: Any,
    begin: float,
    total: float,
    cpu: float,
) -> dict[str, Any]:
    """Return the results of a run from its events and the simulator's log."""
    starts = [mark for mark in watch.marks if mark[0] == "trial_started"]
    ends = [mark for mark in watch.marks if mark[0] == "trial_finished"]
    assert len(starts) == len(ends) == len(trials)
    rows = list(zip(starts, ends, trials, strict=True))
    undisturbed = [(start, end, each) for start, end, each in rows if not each["lost"]]
    lost_trials = [(end, each) for _, end, each in rows if each["lost"]]
    best = min(watch.true[end[3].candidate] for _, end, _ in undisturbed)
    files, resident, _ = max(each["usage"] for _, _, each in undisturbed)
    return {
        "hosts": options.hosts,
        "trials": len(rows),
        "lost": len(lost_trials),
        "looked_at_hosts_s": round(starts[0][1] - begin, 2),
        "all_started_s": _median([each["started"] - start[1] for start, _, each in rows]),
        "overhead_s": _median([end[1] - start[1] - options.play for start, end, _ in undisturbed]),
        "cpu_s": _median([end[2] - start[2] for start, end, _ in undisturbed]),
        "noticed_s": [round(end[1] - each["silent"], 2) for end, each in lost_trials],
        "ended_by_host": sum(end[3].inconclusive and each["lost"] in end[3].reason for end, each in lost_trials),
        "core_share": _median([each["usage"][2] for _, _, each in undisturbed if each["steps_done"]]),
        "open_files": files,
        "rss_mib": resident >> 20,
        "rss_before_mib": watch.idle_bytes >> 20,
        "total_s": round(total, 1),
        "total_cpu_s": round(cpu, 1),
        "best_over_fastest": round(watch.true[plan.best.candidate] / best, 4),
        "balanced": plan.counts.balanced,
        "candidates": plan.counts.candidates,
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 2)


if __name__ == "__main__":
    main()
