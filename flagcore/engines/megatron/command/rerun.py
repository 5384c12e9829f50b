"""The user's own script with other arguments for the program that it starts: what the script computes, it computes when
it starts, and it loads, makes and logs what it wants.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flagcore.domain.spec import Spec
from flagcore.engines.megatron.command.arguments import Argument
from flagcore.engines.megatron.command.script import SHELLS
from flagcore.engines.megatron.command.user_command import UserCommand, readable_command

STARTERS = ("nohup", "setsid", "env", "srun", "mpirun")
"""Programs that may stand before the one that a script starts."""
TEXT = """\
flagcore_start() {{
  local word skip=0 words=()
  if [[ "$*" != *{program}* ]]; then command "$@"; return; fi
  for word in "$@"; do
    if [[ $skip == 0 ]]; then
      case $word in
        {cases}
      esac
    fi
    if [[ $skip == 0 ]]; then words+=("$word"); else skip=$((skip - 1)); fi
  done
  command "${{words[@]}}" {values}
}}
{functions}
export -f flagcore_start {names}
exec "$@"\
"""
"""Functions stand for the programs in all shells that a script starts. Another shell passes them over."""


def rerun(
    spec: Spec, found: UserCommand, gone: Iterable[Argument], values: Sequence[str], variables: Mapping[str, str]
) -> tuple[str, ...] | None:
    """Return a command that runs the script of `spec`, with `values` in place of arguments `gone` of what it starts.

    `found` is what the script starts. None if the script does not keep to that: it is read once more to find out.
    """
    words = spec.train.command or ()
    script = words[1:] if Path(words[0]).name in SHELLS else words
    argv = ("bash", "-c", _text(found, gone, values), "best", "bash", *script)
    other = readable_command(replace(spec, work=replace(spec.train, command=argv)), variables)
    if other is None or other.program != found.program or other.arguments[-len(values) :] != tuple(values):
        return None
    return argv if len(other.arguments) == len(found.arguments) - sum(map(_length, gone)) + len(values) else None


def _text(found: UserCommand, gone: Iterable[Argument], values: Sequence[str]) -> str:
    names = dict.fromkeys((found.words[0], *STARTERS))
    cases: dict[int, dict[str, None]] = {}
    for argument in gone:
        cases.setdefault(_length(argument), {})[argument.flag] = None
        if argument.spec.values != 0:
            cases.setdefault(1, {})[f"{argument.flag}=*"] = None
    return TEXT.format(
        program=shlex.quote(Path(found.program[-1]).name),
        cases="\n        ".join(f"{' | '.join(flags)}) skip={count} ;;" for count, flags in cases.items()) or "-) ;;",
        values=" ".join(word if word == shlex.quote(word) else f'"{word}"' for word in values),
        functions="\n".join(f'{name}() {{ flagcore_start {name} "$@"; }}' for name in names),
        names=" ".join(names),
    )


def _length(argument: Argument) -> int:
    return argument.end - argument.position
