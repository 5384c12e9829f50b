"""Runs the user's own script unchanged, but replaces arguments of the program that it starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flagcore.domain.spec import Spec
from flagcore.engines.megatron.command.arguments import Argument
from flagcore.engines.megatron.command.user_command import UserCommand, readable_command
from flagcore.engines.script import SHELLS

WRAPPER_PROGRAMS = ("nohup", "setsid", "env", "srun", "mpirun")
"""Programs that a script may use to start the training program."""
SHELL_TEMPLATE = """\
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
"""Shell functions that shadow these programs. They are exported to all bash processes of the script."""


def rerun(
    spec: Spec, command: UserCommand, replaced: Iterable[Argument], values: Sequence[str], variables: Mapping[str, str]
) -> tuple[str, ...] | None:
    """Return a command that runs the script of `spec` with `values` in place of the arguments `replaced`.

    `command` is the command that the script starts. Returns None if the script, read again, starts anything else.
    """
    words = spec.train.command or ()
    script = words[1:] if Path(words[0]).name in SHELLS else words
    argv = ("bash", "-c", _shell_functions(command, replaced, values), "best", "bash", *script)
    trace = readable_command(replace(spec, work=replace(spec.train, command=argv)), variables)
    if trace is None or trace.program != command.program or trace.arguments[-len(values) :] != tuple(values):
        return None
    count = len(command.arguments) - sum(map(_word_count, replaced)) + len(values)
    return argv if len(trace.arguments) == count else None


def _shell_functions(command: UserCommand, replaced: Iterable[Argument], values: Sequence[str]) -> str:
    names = dict.fromkeys((command.words[0], *WRAPPER_PROGRAMS))
    cases: dict[int, dict[str, None]] = {}
    for argument in replaced:
        cases.setdefault(_word_count(argument), {})[argument.flag] = None
        if argument.spec.values != 0:
            cases.setdefault(1, {})[f"{argument.flag}=*"] = None
    return SHELL_TEMPLATE.format(
        program=shlex.quote(Path(command.program[-1]).name),
        cases="\n        ".join(f"{' | '.join(flags)}) skip={count} ;;" for count, flags in cases.items()) or "-) ;;",
        values=" ".join(word if word == shlex.quote(word) else f'"{word}"' for word in values),
        functions="\n".join(f'{name}() {{ flagcore_start {name} "$@"; }}' for name in names),
        names=" ".join(names),
    )


def _word_count(argument: Argument) -> int:
    return argument.end - argument.position
