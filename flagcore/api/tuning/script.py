"""best.sh: what starts the best configuration without flagcore's command, and can be handed on."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flagcore.domain.launch import Launch
from flagcore.domain.plan import Plan
from flagcore.domain.secrets import is_secret, secrets_in_arguments
from flagcore.domain.trial import ESTIMATE, PROBE, RUN
from flagcore.report.text import candidate_text

MEETING_PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""Where the ranks of a best configuration meet by default; each trial gets a free port from its launcher."""
SECRETS = "secrets.sh"
"""Beside `launch.json`, for its owner alone: the secrets that best.sh needs and that this shell does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """The secrets of a launch. `inherited` are variables that have the same value in this shell.

    `kept` are the others by name; a secret in the command line that no variable has gets a name of its own.
    """

    inherited: tuple[str, ...]
    kept: Mapping[str, str]
    variables: Mapping[str, str]
    """The variable that has a secret of the command line, by the secret."""

    @classmethod
    def of(cls, launch: Launch) -> Hidden:
        """Return the secrets of `launch`, as this shell has them or not."""
        named = {name: value for name, value in launch.environment.items() if is_secret(name) and value}
        inherited = [name for name, value in named.items() if os.environ.get(name) == value]
        kept = {name: value for name, value in named.items() if name not in inherited}
        mine = {value: name for name, value in os.environ.items() if is_secret(name) and value}
        variables = {value: name for name, value in named.items()}
        for number, value in enumerate(secrets_in_arguments(launch.argv), start=1):
            if value in mine and mine[value] not in kept:
                variables[value] = mine[value]
                inherited.append(mine[value])
            elif value not in variables:
                variables[value] = f"FLAGCORE_SECRET_{number}"
                kept[variables[value]] = value
        found = {value: variables[value] for value in secrets_in_arguments(launch.argv)}
        return cls(inherited=tuple(dict.fromkeys(inherited)), kept=kept, variables=found)

    def __bool__(self) -> bool:
        return bool(self.inherited or self.kept)


def script(plan: Plan, launch: Launch, hidden: Hidden, folder: Path) -> str:
    """Return a shell script that starts `launch` as it stands. Its secrets are in this shell, or in `folder`."""
    exports = [f'export {name}="${{{name}:-{value}}}"' for name, value in MEETING_PLACE.items()]
    exports += [
        f"export {name}={shlex.quote(value)}"
        for name, value in launch.environment.items()
        if name not in hidden.inherited and name not in hidden.kept
    ]
    needs = [f': "${{{name}:?set it first: its value is not kept}}"' for name in hidden.inherited]
    needs += [f". {shlex.quote(str(folder / SECRETS))} || exit 1"] if hidden.kept else []
    lines = [
        "#!/bin/sh",
        heading(plan),
        f"cd {shlex.quote(directory(launch))} || exit 1",
        *exports,
        *needs,
        f"exec {' '.join(quoted(word, hidden.variables) for word in launch.argv)}",
    ]
    return "\n".join(lines) + "\n"


def secrets_script(hidden: Hidden) -> str:
    """Return a shell script that sets the secrets which this shell does not have."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in hidden.kept.items()]
    return "\n".join(["# Secrets of the best configuration: not to be handed on.", *lines]) + "\n"


def quoted(word: str, variables: Mapping[str, str]) -> str:
    """Return a word for a shell, with `variables` (by their value) for the secrets in it."""
    for value, name in variables.items():
        before, found, after = word.partition(value)
        if found:
            ends: Sequence[str] = [quoted(each, variables) if each else "" for each in (before, after)]
            return f'{ends[0]}"${name}"{ends[1]}'
    return shlex.quote(word)


def excuse(plan: Plan, why: str) -> str:
    """Return a shell script that prints why the best cannot be started."""
    message = f"echo {shlex.quote(f'this cannot be started: {why}')} >&2"
    return "\n".join(["#!/bin/sh", heading(plan), message, "exit 2"]) + "\n"


def heading(plan: Plan) -> str:
    """Return a comment that describes the best."""
    assert plan.best is not None
    of = {
        RUN: f"{len(plan.trials)} trials",
        PROBE: f"{len(plan.trials)} candidates probed on one device, none of which ran,",
        ESTIMATE: f"{plan.counts.candidates} candidates as predicted, none of which ran,",
    }[plan.fidelity]
    return f"# Best of {of} on {plan.devices} x {plan.chip}: {candidate_text(plan.best.candidate)}"


def directory(launch: Launch) -> str:
    """Return where a launch starts."""
    return launch.directory or launch.folder
