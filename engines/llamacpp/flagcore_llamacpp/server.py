"""A llama-server from the xllamacpp wheel: llama.cpp's own HTTP server with the flags of llama-server.

    python -m flagcore_llamacpp.server -m model.gguf --port 8080 -np 4 -c 4096

Its flags are in `flags.json`: spellings and defaults of llama.cpp `tools/server/README.md` (00dc8057), and fields of
`xllamacpp.CommonParams` (2026.10). The module imports nothing large, because the process of the server does.
"""

import argparse
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

AUTO_SLOTS = 4
"""Number of slots if `-np` is -1. These slots share one KV cache (llama.cpp `tools/server/server.cpp`)."""

LOG_SECONDS = 0.5
"""Seconds in which llama.cpp's log thread can write the cause of a failure before the process exits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag: its spellings `names`, the dotted `field` that it sets, and the type of its value.

    `kind` is int, float, text, list (comma-separated numbers), on/off, switch, or the name of an enum of the wheel with
    the members `words`. A switch sets True, and its `off` spellings set False. Only `tensor_split` is a list.
    """

    names: Sequence[str]
    field: str
    kind: str = "int"
    words: Sequence[str] = ()
    off: Sequence[str] = ()


FLAGS = tuple(Flag(**row) for row in json.loads(Path(__file__).with_name("flags.json").read_text("utf-8")))
FLAGS_BY_NAME = {name.lstrip("-"): flag for flag in FLAGS for name in (*flag.names, *flag.off)}


def main() -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code: 1 if the server cannot be started."""
    options = _parser().parse_args()
    try:
        import xllamacpp  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        print(f"error: the xllamacpp wheel cannot be used: {error}", file=sys.stderr)
        return 1
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = xllamacpp.Server(_params(xllamacpp, options))
    except Exception as error:
        time.sleep(LOG_SECONDS)
        print(f"error: the server cannot be started: {error}", file=sys.stderr)
        return 1
    print(f"listening on {server.listening_address}", flush=True)
    stop.wait()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False, description=__doc__)
    for flag in FLAGS:
        options: dict[str, Any] = {"dest": flag.field, "default": None, "required": "--model" in flag.names}
        if flag.kind == "switch":
            parser.add_argument(*flag.names, action="store_const", const=True, **options)
            if flag.off:
                parser.add_argument(*flag.off, action="store_const", const=False, dest=flag.field)
        else:
            choices = flag.words or (["on", "off"] if flag.kind == "on/off" else None)
            kind = _layers if flag.field.endswith("n_gpu_layers") else {"int": int, "float": float}.get(flag.kind, str)
            parser.add_argument(*flag.names, type=kind, choices=choices, **options)
    return parser


def _layers(text: str) -> int:
    """Parse a number of layers. As in llama.cpp, `auto` is -1 and `all` is -2."""
    return {"auto": -1, "all": -2}.get(text) or int(text)


def _params(wheel: Any, options: argparse.Namespace) -> Any:
    """Convert command-line options to the wheel's parameters. Missing flags have llama-server's defaults."""
    params = wheel.CommonParams()
    params.n_parallel, params.hostnames = -1, ["127.0.0.1"]
    for flag in FLAGS:
        value = getattr(options, flag.field)
        if value is not None:
            *path, name = flag.field.split(".")
            setattr(reduce(getattr, path, params), name, _value(wheel, flag, value))
    if getattr(options, "cpuparams_batch.n_threads") is None:
        params.cpuparams_batch.n_threads = params.cpuparams.n_threads
    if params.n_parallel < 0:
        params.n_parallel = AUTO_SLOTS
        if options.kv_unified is None:
            params.kv_unified = True
    params.timeout_write = params.timeout_read
    return params


MEMBERS = {"on": "enabled", "off": "disabled", "dio": "direct_io"}
"""Names of enum members, by value of the flag, where both differ."""


def _value(wheel: Any, flag: Flag, value: Any) -> Any:
    if flag.words:
        word = re.sub(r"\W", "_", MEMBERS.get(value, value))
        member = getattr(getattr(wheel, flag.kind), f"{flag.kind}_{word}".upper())
        return [member] if flag.field == "speculative.types" else member
    if flag.kind == "on/off":
        return value == "on"
    if flag.kind == "list":
        return [float(part) for part in value.split(",")]
    return {"hostnames": [value], "model_alias": {value}}.get(flag.field, value)


if __name__ == "__main__":
    sys.exit(main())
