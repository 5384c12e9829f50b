"""How one server is started, the router in front of several, and the job of the trial program.

flagcore writes the job to `serve.json`, and the trial program reads it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flagcore.domain.launch import FailurePattern
from flagcore.domain.serving import Load
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Task
from flagcore.engines.serving.load.routing import MAX_MORE, MAX_RATIO

PORT = "{port}"
"""Placeholder for the port in a command line; the port is chosen when the server starts."""
HEAD, HEAD_PORT = "{head}", "{head_port}"
"""Placeholders in a command line of an instance on several hosts: its first host, and a free port there."""
TRANSFER_PORT, SHARED, URL = "{transfer_port}", "{shared}", "{url}"
"""Placeholders for instances that only prefill or decode: the port for caches, a folder that all of them share, and
the URL of an instance for the router."""


def address(task: Task) -> str:
    """Return the address on which servers listen. Servers on other hosts listen on all addresses, so that the client
    can reach them.
    """
    return "0.0.0.0" if task.spec.on_each_host else "127.0.0.1"


ROUTER_HEALTH = "/health"
"""Path that returns 200 when a router is ready; all routers have it."""
LOCAL_ADDRESS = ("--host", "127.0.0.1", "--port", PORT)
"""Where routers listen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One server. `argv` has the placeholder PORT; `cores` are the cores to which it is pinned, empty for all cores.

    `requested` are the knob values that the server must report; None: the engine chooses. The server runs on host
    number `host`. The commands `further` run on the next hosts, which serve no requests. `kind` is prefill or decode if
    it does only one of both.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    requested: Mapping[str, KnobValue] = field(default_factory=dict)
    host: int = 0
    further: tuple[tuple[str, ...], ...] = ()
    kind: str = ""

    def at_port(self, port: int) -> Instance:
        """Return the instance with `port` in place of PORT, on this host unless it has another one."""
        return self.filled({PORT: str(port), TRANSFER_PORT: str(transfer_port(port)), HEAD: "127.0.0.1"})

    def at_head(self, host: str, port: str) -> Instance:
        """Return the instance with its first host and the rendezvous port of its hosts."""
        return self.filled({HEAD: host, HEAD_PORT: port})

    def filled(self, values: Mapping[str, str]) -> Instance:
        """Return the instance with `values` for placeholders."""

        def words(argv: Sequence[str]) -> tuple[str, ...]:
            return tuple(_replaced(word, values) for word in argv)

        environment = {name: _replaced(value, values) for name, value in self.environment.items()}
        further = tuple(words(argv) for argv in self.further)
        return replace(self, argv=words(self.argv), environment=environment, further=further)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """vLLM's or SGLang's router in front of instances: `argv` with PORT, and for each instance the words of its kind
    with URL and TRANSFER_PORT; `decode` are also those of instances that do both.

    Source of the flags: `--help` of vllm-router 0.1.17 and sglang-router 0.3.2.
    """

    argv: tuple[str, ...]
    prefill: tuple[str, ...]
    decode: tuple[str, ...]

    @classmethod
    def of_replicas(cls, program: Sequence[str], *, prefix_aware: bool) -> Router:
        """Return the router in front of instances that do both. It divides requests as the client of trials does."""
        limits = ("--balance-abs-threshold", str(MAX_MORE), "--balance-rel-threshold", str(MAX_RATIO))
        policy = ("cache_aware", *limits) if prefix_aware else ("power_of_two",)
        argv = (*program, "--policy", *policy, "--prometheus-port", TRANSFER_PORT, *LOCAL_ADDRESS, "--worker-urls")
        return cls(argv=argv, prefill=(), decode=(URL,))

    @classmethod
    def of_pairs(cls, program: Sequence[str], switch: str, prefill: Sequence[str] = ("--prefill", URL)) -> Router:
        """Return the router in front of instances that only prefill or only decode."""
        argv = (*program, switch, "--policy", "round_robin", "--prometheus-port", TRANSFER_PORT, *LOCAL_ADDRESS)
        return cls(argv=argv, prefill=tuple(prefill), decode=("--decode", URL))

    @property
    def name(self) -> str:
        """The program, or the Python package of the program."""
        return self.argv[2].partition(".")[0] if self.argv[1] == "-m" else Path(self.argv[0]).name

    def instance(self, places: Sequence[tuple[str, str, int]]) -> Instance:
        """Return how to start it in front of instances, by kind, host and port."""
        words = list(self.argv)
        for kind, host, port in places:
            values = {URL: f"http://{host}:{port}", TRANSFER_PORT: str(transfer_port(port))}
            words += [_replaced(word, values) for word in (self.prefill if kind == "prefill" else self.decode)]
        return Instance(argv=tuple(words))


def transfer_port(port: int) -> int:
    """Return the port for caches of the instance at `port`."""
    return port + 10_000 if port < 50_000 else port - 10_000


def _replaced(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


Fetch = Callable[[str], str]
"""Returns the response to a path of a running server. Raises OSError."""

SERVE = "serve.json"
SHARED_FOLDER = "shared"
"""The folder that instances of a trial share; it is removed after the trial."""


def log_name(number: int, part: int = 0) -> str:
    """Return the name of an instance's log, on its first host or a further one."""
    return f"instance-{number}-host-{part}.log" if part else f"instance-{number}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The serving and the load of one candidate.

    `engine` is the import path of the engine, as module:attribute. All `loads` run `repeats` times in one launch. `slo`
    are the limits for goodput, `asked` the figures that must be precise. `highest` is as in ServeSpec, `start` the load
    to try first. `client` is the command of another load client, which writes `report`. `hosts` are the names of the
    hosts of instances; none for this machine. The load goes to all instances; another client sends it to `router`.
    `protocol` is how instances that only prefill or only decode exchange caches (`load.routing`). `prefix_aware` is as
    in ServeSpec. `predicted_s` is the predicted mean time of a request of the only load.
    """

    engine: str
    instances: tuple[Instance, ...]
    loads: tuple[Load, ...]
    vocab_size: int
    timeout_s: float
    repeats: int = 1
    slo: Mapping[str, float] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    patterns: tuple[FailurePattern, ...] = ()
    directory: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    client: tuple[str, ...] | None = None
    report: str = ""
    highest: str | None = None
    start: float = 1.0
    hosts: tuple[str, ...] = ()
    router: Router | None = None
    protocol: str = ""
    prefix_aware: bool = False
    predicted_s: float | None = None


def as_text(job: Job) -> str:
    """Return a job as JSON."""
    data = asdict(job) | {"loads": [plain_load(load) for load in job.loads]}
    return json.dumps(data, indent=1, default=lambda state: state.value)


def read_job(folder: Path) -> Job:
    """Return the job in `folder`. Raises ValueError with the problem."""
    try:
        return TypeAdapter(Job).validate_json((folder / SERVE).read_bytes())
    except OSError as error:
        raise ValueError(f"{folder / SERVE} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise ValueError(f"{folder / SERVE} is invalid: {error}") from None


def plain_load(load: Load) -> dict[str, Any]:
    """Return a load point as plain JSON data; an infinite rate is the text inf."""
    rate = load.request_rate
    return {**asdict(load), "request_rate": "inf" if rate is not None and math.isinf(rate) else rate}
