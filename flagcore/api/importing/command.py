"""Read a command of an engine as a spec."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.common.inputs import check_chips, validate_engines
from flagcore.contracts import CommandReader, ImportNote
from flagcore.errors import SpecError, SpecErrors, UsageError
from flagcore.i18n import _
from flagcore.spec.importing import commented_yaml

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedCommand:
    """The data of a spec, with absolute paths, and notes on the arguments of the command."""

    data: dict[str, Any]
    notes: tuple[ImportNote, ...]

    def as_yaml(self) -> str:
        """Return the spec as YAML, with the notes as comments."""
        return commented_yaml(self.data, self.notes)


def read_command(
    engine: str, words: Sequence[str], *, model: str | None = None, chip: str | None = None
) -> ImportedCommand:
    """Return a spec for a command of `engine`: one quoted text, the path of a script, or several words.

    `model` is the path of the model if the command does not have one, `chip` is the chip of the cluster; None: detected
    later. Raises SpecError, UsageError.
    """
    workload = plugins.workload(engine)
    if not isinstance(workload, CommandReader):
        raise UsageError(_("the engine {engine} does not support the import of commands", engine=engine))
    command, envs = _split(words)
    path = os.path.abspath(model) if model is not None else None
    data, notes = workload.read_command(command, Path.cwd(), path)
    return imported(data, notes, chip, envs)


def imported(
    data: dict[str, Any], notes: Sequence[ImportNote], chip: str | None, envs: Mapping[str, str]
) -> ImportedCommand:
    """Return a checked spec for the data of a command, with a chip and with variables. Raises SpecError."""
    if chip is not None:
        data["cluster"]["chip"] = chip
    if envs:
        data["envs"] = dict(envs)
    try:
        validate_engines(data, file=Path(), base=Path())
    except SpecError as error:
        problems = [each for each in error.problems if each.key != "model"]
        if problems:
            raise SpecErrors(problems) from None
    check_chips(data.get("cluster"))
    return ImportedCommand(data=data, notes=tuple(notes))


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words of a command and the variables that it sets first. Raises UsageError."""
    if len(words) == 1 and os.path.isfile(words[0]):
        words = ["bash", words[0]]
    elif len(words) == 1:
        try:
            words = shlex.split(words[0].replace("\\\n", " "))
        except ValueError as error:
            raise UsageError(_("the command cannot be read: {reason}", reason=error)) from None
    command = list(words)
    envs = dict[str, str]()
    while command and (command[0] == "env" or ASSIGNMENT.match(command[0])):
        name, equals, value = command.pop(0).partition("=")
        if equals:
            envs[name] = value
    if not command:
        raise UsageError(_("the command is empty"))
    if len(command) == 1 and command[0].endswith(".sh"):
        raise UsageError(_("{file} is not a file", file=command[0]))
    return command, envs
