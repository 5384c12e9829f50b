"""The job of the trial program: flagcore writes `serve.json`, and the trial program reads it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import FailurePattern
from flagcore.domain.serving import Load
from flagcore.engines.serving.router import MAX_MORE, MAX_RATIO, PREFIX
from flagcore.engines.serving.settings import HEAD, HEAD_PORT, PORT, TRANSFER_PORT, URL

SERVE = "serve.json"
SHARED_FOLDER = "shared"
"""The folder that instances of a trial share; it is removed after the trial."""
LOCAL_ADDRESS = ("--host", "127.0.0.1", "--port", PORT)
"""Where routers listen."""


def log_name(number: int, part: int = 0) -> str:
    """Return the name of an instance's log, on its first host or a further one."""
    return f"instance-{number}-host-{part}.log" if part else f"instance-{number}.log"


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
    """The program in front of instances: `argv` with PORT, and for each instance the words of its kind with URL and
    TRANSFER_PORT; `decode` are also those of instances that do both. flagcore's router would use `protocol`.
    """

    argv: tuple[str, ...]
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    protocol: str

    @classmethod
    def own(cls, protocol: str, python: str = sys.executable, *, address: Sequence[str] = LOCAL_ADDRESS) -> Router:
        """Return flagcore's router, run by `python`."""
        argv = (python, str(Path(__file__).parent.with_name("router.py")), "--protocol", protocol, *address)
        place = f"{URL},{TRANSFER_PORT}"
        return cls(argv=argv, prefill=("--prefill", place), decode=("--decode", place), protocol=protocol)

    @classmethod
    def cache_aware(cls, program: Sequence[str]) -> Router:
        """Return vLLM's or SGLang's router in front of instances that do both, with the limits of flagcore's.

        Source of the flags: `--help` of vllm-router 0.1.17 and sglang-router 0.3.2.
        """
        limits = ("--balance-abs-threshold", str(MAX_MORE), "--balance-rel-threshold", str(MAX_RATIO))
        flags = ("--policy", "cache_aware", *limits, "--prometheus-port", TRANSFER_PORT)
        return cls(argv=(*program, *flags, *LOCAL_ADDRESS, "--worker-urls"), prefill=(), decode=(URL,), protocol=PREFIX)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The serving and the load of one candidate.

    `engine` is the import path of the engine, as module:attribute. All `loads` run `repeats` times in one launch. `slo`
    are the limits for goodput, `asked` the figures that must be precise. `highest` is as in ServeSpec, `start` the load
    to try first. `client` is the command of another load client, which writes `report`. `hosts` are the names of the
    hosts of instances; none for this machine. The load goes to `router`, if there is one, and else to all instances;
    `prefix_aware` is as in ServeSpec.
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
    prefix_aware: bool = False


def _replaced(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


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
