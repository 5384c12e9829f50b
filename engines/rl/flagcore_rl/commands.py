"""Commands of the frameworks: what they set, as a spec, and the same commands with other settings.

`commands.yaml` has the keys. Nothing of the user's is written: settings of a file are overridden by words.
On several nodes, commands that use Ray are one program, and a process of Ray on each node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from flagcore_importers import dialect
from flagcore_importers.dialect import name_of, placed

from flagcore.errors import LaunchError
from flagcore.spec.plain_data import package_yaml

_LAUNCHERS = ("launch", "torchrun", "torch.distributed.run", "trl")


@dataclass(frozen=True, kw_only=True)
class Dialect(dialect.Dialect):
    """A framework's row of `commands.yaml`."""

    style: str
    trial: Mapping[str, Any]
    step: str
    parts: Mapping[str, str]
    mismatch: str
    bare: bool = False
    asynchronous: str = ""
    variants: str = ""
    nested: bool = False
    ray: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    trainer: str = ""
    rollout: str = ""
    stands_for: str = ""
    packs: bool = True
    per_update: bool = False
    of_command: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    checks_offload: bool = False


@cache
def dialect_of(name: str) -> Dialect:
    """Return how commands of a framework are written."""
    return Dialect(**package_yaml(__package__, "commands.yaml")[name])


@dataclass(frozen=True, slots=True)
class Given:
    """A user's command."""

    dialect: Dialect
    words: tuple[str, ...]

    def changed(self, settings: Mapping[str, Any], before: Mapping[str, Any] = {}) -> tuple[str, ...]:
        """Return the command with other values of keys; None removes one. `before`: keys of the launcher.

        Raises LaunchError if keys of a launcher are new, and the command has none.
        """
        words, left = list(self.words), {name_of(key): (key, value) for key, value in settings.items()}
        left |= {name_of(key): (key, value) for key, value in before.items()}
        for key, _value, start, end in reversed([*placed(words)]):
            if key in left:
                words[start:end] = self._written(words[start], left[key][1])
        present = {key for key, *_ in placed(self.words)}
        for key, (name, value) in left.items():
            if key in present or value is None:
                continue
            if name not in before:
                words += self._written(name, value)
            elif place := next((n + 1 for n, each in enumerate(words) if Path(each).name in _LAUNCHERS), 0):
                words[place:place] = self._written(name, value)
            elif value != 1:
                raise LaunchError(f"--{name} {value} needs a launcher: start the command with accelerate launch")
        return tuple(words)

    def _written(self, word: str, value: Any) -> list[str]:
        """Return the words of a setting. `word`: the word that had its key, or the key."""
        if value is None or (self.dialect.bare and value is False):
            return []
        text = value if isinstance(value, str) else str(value)
        if self.dialect.style == "hydra":
            name, equals, _old = word.partition("=")
            return [f"{name}={text}" if equals else f"++{name.lstrip('+')}={text}"]  # the file may lack the key
        name = word.partition("=")[0] if word.startswith("--") else f"--{self._spelled(word)}"
        if self.dialect.bare and value is True:
            return [name]
        return [f"{name}={text}"] if "=" in word else [name, text.lower() if isinstance(value, bool) else text]

    def _spelled(self, key: str) -> str:
        hyphens = any(re.match(r"--\w+-\w", word) for word in self.words)
        return key.replace("_", "-") if hyphens else key


_CLUSTER = """\
at=$MASTER_ADDR:$MASTER_PORT
up() { ray status --address="$at" 2> /dev/null | grep -c "^ *1 node_"; }
joined() { for _ in $(seq 60); do [ "$(up)" -ge "$1" ] && break; sleep 5; done; }
own=${ROCR_VISIBLE_DEVICES:-}; unset ROCR_VISIBLE_DEVICES; [ -z "$own" ] || export HIP_VISIBLE_DEVICES="$own"
if [ "$NODE_RANK" = 0 ]; then place="--head --port=$MASTER_PORT"; else place=--address=$at; joined 1; fi
ray start $place --block & trap "kill $!; wait $!" EXIT
joined "$1"; shift
if [ "$NODE_RANK" = 0 ]; then RAY_ADDRESS=$at "$@"; exit; fi
while [ "$(up)" -gt 0 ]; do sleep 10; done
"""
"""Each node starts Ray in the foreground of the script, which stops only what it started. The first node waits up to 5
minutes for the others, runs the command, and ends with its exit code; the others end when the first one is gone. Tried
with Ray 2.60. Slurm assigns AMD's devices by a variable with which Ray does not start (since 2.45: `amd_gpu.py`)."""
_FIRST = '[ "$NODE_RANK" != 0 ] || exec "$@"'
"""A job that is submitted starts nothing of its cluster."""


def on_all_nodes(words: Sequence[str], nodes: int) -> tuple[str, ...]:
    """Return the command that each of several nodes runs, with NODE_RANK, MASTER_ADDR and MASTER_PORT set."""
    if tuple(words[:3]) == ("ray", "job", "submit"):
        return ("bash", "-c", _FIRST, "ray", *words)
    return ("bash", "-c", _CLUSTER, "ray", str(nodes), *words)
