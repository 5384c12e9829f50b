"""Describes how one server is started, the router in front of several, and the job of the trial program.

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

from flagcore.domain.launch import PORT, FailurePattern
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import Task
from flagcore_serving.job import Load
from flagcore_serving.load.result import MinRate
from flagcore_serving.load.routing import DECODE, ENCODE, MAX_MORE, MAX_RATIO, PREFILL

HEAD, HEAD_PORT = "{head}", "{head_port}"
"""Placeholders in the command line of an instance on several hosts: its first host, and a free port of this host."""
TRANSFER_PORT, URL = "{transfer_port}", "{url}"
"""Placeholders for instances that only prefill or decode: the port for caches, and their URL for the router."""
ENCODER_URLS, EMBEDDING_PORT = "{encoder_urls}", "{embedding_port}"
"""Placeholders for instances that get the embeddings of images: a word for the URLs of all instances that encode, and a
port for embeddings."""


def address(task: Task) -> str:
    """Return the address on which servers listen: all addresses if the client may be on another host."""
    return "0.0.0.0" if task.spec.on_each_host else "127.0.0.1"


ROUTERS = {"vllm-router": "vllm-router==0.1.17", "sglang_router": "sglang-router==0.3.2"}
"""The pip requirements of the routers, by program or module. `Router` has the flags of these releases."""
EPD_PROXY = "disagg_epd_proxy.py"
_REPOSITORY = "https://raw.githubusercontent.com/vllm-project/vllm/0134b939b5132174db8497cec05b6f5713d58560"
PROXIES = {
    EPD_PROXY: (
        "pip install aiohttp fastapi msgspec uvicorn uvloop && python3 -c 'import sys, urllib.request as u; "
        f"u.urlretrieve(*sys.argv[1:])' {_REPOSITORY}/examples/disaggregated/disaggregated_encoder/{EPD_PROXY} "
        f"/usr/local/bin/{EPD_PROXY} && chmod +x /usr/local/bin/{EPD_PROXY}"
    )
}
"""How a router is installed that is no package, by its program: vLLM's example of a proxy in front of servers that
encode. Its routers know no such servers."""
ROUTER_HEALTH = "/health"
"""Path that returns status 200 when a router is ready, for all routers."""
LOCAL_ADDRESS = ("--host", "127.0.0.1", "--port", PORT)
"""Flags for the address on which routers listen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One server: its command line, CPU cores, requested knob values and hosts.

    - `argv`: the command line, with the placeholder PORT.
    - `cores`: the CPU cores to which it is pinned; empty for all cores.
    - `devices`: the names of its devices on their host, as in `Device.selector`.
    - `requested`: the knob values that the server must report. None means that the engine chooses.
    - `host`: the index of the host on which it runs.
    - `further`: the command lines for the other hosts if it spans several. Only the first host serves requests.
    - `kind`: encode, prefill or decode if it does only this, else empty.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    requested: Mapping[str, KnobValue] = field(default_factory=dict)
    host: int = 0
    further: tuple[tuple[str, ...], ...] = ()
    kind: str = ""

    def at_port(self, port: int, text: str = "") -> Instance:
        """Return the instance with `port` in place of PORT, and this machine's address in place of a remaining HEAD.

        `text`: how the command writes the port, by default as a number.
        """
        ports = {PORT: text or str(port), TRANSFER_PORT: str(transfer_port(port))}
        return self.filled({**ports, EMBEDDING_PORT: str(transfer_port(port) + 1), HEAD: "127.0.0.1"})

    def with_encoders(self, urls: Sequence[str]) -> Instance:
        """Return the instance with the URLs of the instances that encode in place of ENCODER_URLS."""
        argvs = [
            tuple(word for each in argv for word in (urls if each == ENCODER_URLS else (each,)))
            for argv in (self.argv, *self.further)
        ]
        return replace(self, argv=argvs[0], further=tuple(argvs[1:]))

    def at_head(self, host: str, port: str) -> Instance:
        """Return the instance with `host` in place of HEAD, and the rendezvous port `port` in place of HEAD_PORT."""
        return self.filled({HEAD: host, HEAD_PORT: port})

    def filled(self, values: Mapping[str, str]) -> Instance:
        """Return the instance with the placeholders in `values` replaced."""

        def words(argv: Sequence[str]) -> tuple[str, ...]:
            return tuple(_replaced(word, values) for word in argv)

        environment = {name: _replaced(value, values) for name, value in self.environment.items()}
        further = tuple(words(argv) for argv in self.further)
        return replace(self, argv=words(self.argv), environment=environment, further=further)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The command line of vLLM's or SGLang's router in front of instances.

    - `argv`: the command line, with the placeholder PORT.
    - `prefill`: the words to add for each instance that only prefills, with the placeholders URL and TRANSFER_PORT.
    - `decode`: the words to add for each other instance, with the same placeholders.
    - `lists`: flags for the URLs of all instances of a kind, separated by commas, instead of `prefill` and `decode`.

    Instances that encode get requests from those that prefill, except with `lists`.

    Source of the flags: `--help` of the releases in ROUTERS.
    """

    argv: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    lists: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_replicas(cls, program: Sequence[str], *, prefix_aware: bool) -> Router:
        """Return the router for instances that both prefill and decode, with the routing policy of the load client."""
        limits = ("--balance-abs-threshold", str(MAX_MORE), "--balance-rel-threshold", str(MAX_RATIO))
        policy = ("cache_aware", *limits) if prefix_aware else ("power_of_two",)
        argv = (*program, "--policy", *policy, "--prometheus-port", TRANSFER_PORT, *LOCAL_ADDRESS, "--worker-urls")
        return cls(argv=argv, prefill=(), decode=(URL,))

    @classmethod
    def of_pairs(cls, program: Sequence[str], switch: str, prefill: Sequence[str] = ("--prefill", URL)) -> Router:
        """Return the router for instances that only prefill or only decode. `switch`: the flag for such instances."""
        argv = (*program, switch, "--policy", "round_robin", "--prometheus-port", TRANSFER_PORT, *LOCAL_ADDRESS)
        return cls(argv=argv, prefill=tuple(prefill), decode=("--decode", URL))

    @property
    def installation(self) -> str:
        """The shell command that installs the router."""
        name = self.argv[2].partition(".")[0] if self.argv[1] == "-m" else Path(self.argv[0]).name
        return PROXIES[name] if name in PROXIES else f"pip install {ROUTERS[name]}"

    def instance(self, places: Sequence[tuple[str, str, int]], port_text: Callable[[int], str] = str) -> Instance:
        """Return the router as an instance to start. `places`: the kind, host and port of each server behind it.

        `port_text`: how the command writes a port.
        """
        words, urls = list(self.argv), [(kind, f"http://{host}:{port_text(port)}") for kind, host, port in places]
        for kind, flag in self.lists.items():
            words += [flag, ",".join(url for each, url in urls if (each or DECODE) == kind) or "disable"]
        for (kind, url), (*_, port) in zip(urls, places, strict=True):
            values, of_kind = {URL: url, TRANSFER_PORT: str(transfer_port(port))}, {PREFILL: self.prefill, ENCODE: ()}
            words += [_replaced(word, values) for word in of_kind.get(kind, self.decode)]
        return Instance(argv=tuple(words))


def transfer_port(port: int) -> int:
    """Return the port at which the instance at `port` exchanges caches."""
    return port + 10_000 if port < 50_000 else port - 10_000


def _replaced(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


Fetch = Callable[[str], str]
"""A function that returns a running server's response to a path. Raises OSError."""

SERVE = "serve.json"


def log_name(number: int, part: int = 0) -> str:
    """Return the file name of an instance's log. `part`: the index of the host among the instance's hosts."""
    return f"instance-{number}-host-{part}.log" if part else f"instance-{number}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """The servers and the loads of one candidate's trial.

    - `engine`: the import path of the engine's `ServerReports`, as module:attribute.
    - `loads`: all of them run `repeats` times with the same servers.
    - `slo`: limits for goodput and for the search of the highest load, in seconds by metric.
    - `asked`: the metrics that must be precise.
    - `highest`, `prefix_aware`: as in ServeSpec.
    - `start`: the load to try first in the search for the highest load.
    - `hosts`: the names of the hosts on which instances run; empty for this machine.
    - `protocol`: how instances that only prefill or only decode exchange caches (`load.routing`).
    - `predicted_s`: the predicted mean time of a request; None if there are several loads.
    - `answers`: whether answers are compared with those of other trials.
    - `min_rate`: the load is stopped if its rate is very likely lower; None if it may not be stopped.
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
    highest: str | None = None
    start: float = 1.0
    hosts: tuple[str, ...] = ()
    protocol: str = ""
    prefix_aware: bool = False
    predicted_s: float | None = None
    min_rate: MinRate | None = None
    answers: bool = False


def as_text(job: TrialJob) -> str:
    """Return a job as JSON."""
    data = asdict(job) | {"loads": [plain_load(load) for load in job.loads]}
    return json.dumps(data, indent=1, default=lambda state: state.value)


def read_job(folder: Path) -> TrialJob:
    """Read the job in `folder`. Raises ValueError with a description of the problem."""
    try:
        return TypeAdapter(TrialJob).validate_json((folder / SERVE).read_bytes())
    except OSError as error:
        raise ValueError(f"{folder / SERVE} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise ValueError(f"{folder / SERVE} is invalid: {error}") from None


def plain_load(load: Load) -> dict[str, Any]:
    """Return a load point as plain JSON data. An infinite rate becomes the string "inf"."""
    rate = load.request_rate
    return {**asdict(load), "request_rate": "inf" if rate is not None and math.isinf(rate) else rate}
