"""Simulates the agents of thousands of hosts in one process: hello, heartbeats, logs, slow hosts and lost hosts.

`HostsLauncher` drives it like real hosts. Only the process of each channel is replaced: `Channel` passes the other ends
of its pipes to the simulator.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import json
import os
import random
import selectors
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from flagcore_hosts import wire

LOST_PER_HOST_DAY = 419 / 54 / (16384 / 8)
"""Llama 3 (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 devices, 8 a host."""
MEAN_SLOWDOWN = 1.34
"""Mean delay of large jobs by slow devices and links (Falcon, arXiv 2410.12588)."""
NOISE = 0.01
FIXED = {"peak_memory_bytes": 1 << 30, "warm": False}


class Channel:
    """Replaces the `subprocess.Popen` that connects to an agent; its pipes lead to the simulator."""

    control: socket.socket

    def __init__(self, argv: list[str], **_: object) -> None:
        read_in, write_in = os.pipe()
        read_out, write_out = os.pipe()
        host = argv[argv.index("--") + 1]
        socket.send_fds(self.control, [json.dumps({"open": host}).encode()], [read_in, write_out])
        os.close(read_in)
        os.close(write_out)
        self.stdin, self.stdout = FileIO(write_in, "wb"), FileIO(read_out, "rb")

    def wait(self, seconds: float | None = None) -> int:
        return 0

    poll = wait


@dataclass(kw_only=True)
class SimulatedTrial:
    """The times of one simulated trial, in seconds of the monotonic clock."""

    opened: float
    nodes: int
    started: float = 0.0
    """The time at which the program ran on all hosts."""
    steps_done: float = 0.0
    slowdown: float = 1.0
    lost: str = ""
    silent: float = 0.0
    usage: tuple[int, int, float] = (0, 0, 0.0)
    """Open files, resident bytes and share of a core of the driving process, from the first to the last step."""
    hosts: list[Host] = field(default_factory=list)
    running: int = 0


class Host:
    """One channel to a host."""

    def __init__(self, name: str, read: int, write: int) -> None:
        self.name, self.input, self.output = name, read, write
        self.received = b""
        self.booted = self.closed = False
        self.early: list[dict[str, Any]] | None = []
        """What arrives before its agent has started."""
        self.trial: SimulatedTrial | None = None
        self.started_at = 0.0

    def send(self, **message: object) -> None:
        if not self.closed:
            with contextlib.suppress(BrokenPipeError):
                os.write(self.output, json.dumps(message).encode() + b"\n")


class Simulator:
    """All hosts, with the options of many_hosts.py."""

    def __init__(self, control: socket.socket, log: Path, options: Namespace, iters: int) -> None:
        self.control, self.log, self.options, self.iters = control, log, options, iters
        self.random = random.Random(options.seed)
        self.selector = selectors.DefaultSelector()
        self.due: list[tuple[float, int, Callable[[], object]]] = []
        self.count = self.trials = 0
        self.lost: set[str] = set()
        self.ever_lost = False
        self.step_s, self.trial = 0.0, SimulatedTrial(opened=0.0, nodes=0)
        self.cpu_before = 0.0, 0.0

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self.count += 1
        heapq.heappush(self.due, (time.monotonic() + seconds, self.count, action))

    def run(self) -> None:
        """Simulate until the other side closes the control socket."""
        self.selector.register(self.control, selectors.EVENT_READ, None)
        while True:
            pause = max(0.0, self.due[0][0] - time.monotonic()) if self.due else 1.0
            for key, _ in self.selector.select(min(1.0, pause)):
                if key.data is not None:
                    self.read(key.data)
                elif not self.take_control():
                    return
            while self.due and self.due[0][0] <= time.monotonic():
                heapq.heappop(self.due)[2]()

    def take_control(self) -> bool:
        data, files, _, _ = socket.recv_fds(self.control, 4096, 2)
        message = json.loads(data or b"{}")
        if "open" in message:
            host = Host(message["open"], *files)
            self.selector.register(host.input, selectors.EVENT_READ, host)
        elif "step_s" in message:
            self.write_log()
            self.trial, self.step_s = SimulatedTrial(opened=time.monotonic(), nodes=0), message["step_s"]
        else:
            self.write_log()
        return bool(data)

    def read(self, host: Host) -> None:
        data = os.read(host.input, 1 << 20)
        if not data:
            self.close(host)
            return
        *lines, host.received = (host.received + data).split(b"\n")
        for line in lines if host.name not in self.lost else ():
            if not host.booted:
                host.booted = True
                self.after(self.random.uniform(0, self.options.start), lambda: self.boot(host))
            elif len(line) > 2:
                self.take(host, json.loads(line))

    def boot(self, host: Host) -> None:
        """Start an agent, which takes what has arrived."""
        early, host.early = host.early or (), None
        for message in early:
            self.take(host, message)
        self.after(self.random.uniform(0, wire.BEAT_SECONDS), lambda: self.heartbeat(host))

    def heartbeat(self, host: Host) -> None:
        if not host.closed and host.name not in self.lost:
            host.send()
            self.after(wire.BEAT_SECONDS, lambda: self.heartbeat(host))

    def take(self, host: Host, message: dict[str, Any]) -> None:
        if host.early is not None:
            host.early.append(message)
        elif "prepare" in message:
            state = {"port": 29500, "free_disk_bytes": 1 << 40, "left": 0, "time": time.time(), "python": "3.11.2"}
            host.send(ready=state)
        elif "stop" in message:
            self.exit(host, 143, "request")
        elif "order" in message:
            nodes = int(message["order"]["environment"]["NNODES"])
            self.after(self.random.uniform(0, self.options.start), lambda: self.start(host, nodes))

    def start(self, host: Host, nodes: int) -> None:
        """Start a trial, or end a check before the first trial: a host has no flagcore to report its devices."""
        host.started_at = time.monotonic()
        host.send(started=1000)
        if nodes == 1 or not self.step_s:
            self.exit(host, int(nodes == 1), None)
            return
        self.trial.nodes = nodes
        self.trial.hosts.append(host)
        if len(self.trial.hosts) == nodes:
            self.begin()

    def exit(self, host: Host, code: int, ended_by: str | None) -> None:
        seconds = time.monotonic() - host.started_at
        host.send(exit={"code": code, "ended_by": ended_by, "duration_s": seconds, **FIXED})

    def begin(self) -> None:
        """Draw the events of a trial that runs on all hosts. The third trial loses a host if no earlier one did."""
        trial, self.trials = self.trial, self.trials + 1
        trial.started = time.monotonic()
        if self.random.random() < self.options.slow:
            trial.slowdown = 1.0 + (MEAN_SLOWDOWN - 1.0) / self.options.slow
        lost_after_h = self.random.expovariate(LOST_PER_HOST_DAY / 24 * trial.nodes)
        if lost_after_h > self.options.hours and self.trials == 3 and not self.ever_lost:
            lost_after_h = self.options.hours * self.random.random()
        if lost_after_h < self.options.hours:
            self.after(self.options.play * lost_after_h / self.options.hours, lambda: self.lose_host(trial))
        for step in range(1, self.iters + 1):
            self.after(self.options.play * step / self.iters, lambda step=step: self.step(trial, step))

    def lose_host(self, trial: SimulatedTrial) -> None:
        """Stop a host's messages; the other hosts wait for it."""
        if trial is self.trial:
            trial.lost, trial.silent = self.random.choice(trial.hosts).name, time.monotonic()
            self.lost.add(trial.lost)
            self.ever_lost = True

    def step(self, trial: SimulatedTrial, step: int) -> None:
        """Log a step on the last rank, as Megatron does."""
        if trial.lost or trial is not self.trial:
            return
        milliseconds = self.step_s * trial.slowdown * self.random.gauss(1.0, NOISE)  # as a thousandth, so that it fits
        line = (
            f" iteration {step:4}/{self.iters} | elapsed time per iteration (ms): {milliseconds:.3f} | lm loss: 9.0 |\n"
        )
        if step == 1:
            self.cpu_before = cpu_seconds(os.getppid()), time.monotonic()
        trial.hosts[-1].send(
            file="stdout.log", at=(step - 1) * len(line), data=base64.b64encode(line.encode()).decode()
        )
        if step == self.iters:
            trial.steps_done = time.monotonic()
            trial.usage = usage(os.getppid(), *self.cpu_before)

    def close(self, host: Host) -> None:
        host.closed = True
        self.selector.unregister(host.input)
        os.close(host.input)
        os.close(host.output)

    def write_log(self) -> None:
        """Write the events of the last trial."""
        if self.trial.started:
            names = ("opened", "nodes", "started", "steps_done", "slowdown", "lost", "silent", "usage")
            with self.log.open("a") as file:
                file.write(json.dumps({name: getattr(self.trial, name) for name in names}) + "\n")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def usage(pid: int, cpu_before: float, since: float) -> tuple[int, int, float]:
    """Return the open files of a process, its resident bytes, and its share of a core since then."""
    share = (cpu_seconds(pid) - cpu_before) / (time.monotonic() - since)
    return len(os.listdir(f"/proc/{pid}/fd")), resident_bytes(pid), share


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
