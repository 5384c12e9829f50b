"""Shell scripts that start an exported job."""

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from flagcore.contracts import ExportJob
from flagcore.contracts.exchange import DEVICES_OF_HOST, shell_quoted
from flagcore.domain.launch import PORT, PORT_VARIABLE, Launch
from flagcore.domain.secrets import is_secret
from flagcore.domain.spec import KIND
from flagcore.errors import UsageError
from flagcore.i18n import _

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Valid names of jobs. They are short, because a pod's name is longer than its job's, and must be a DNS label of at
most 63 characters."""
MASTER_PORT = 29500
NODE_VARIABLES = {
    "{node_rank}": "NODE_RANK",
    "{master_addr}": "MASTER_ADDR",
    "{master_port}": "MASTER_PORT",
    "{nnodes}": "NNODES",
    KIND: "DEVICE_TYPE",
    PORT: PORT_VARIABLE,
}
"""The environment variables of a node that replace the placeholders of a launch."""
ALONE = {"PET_STANDALONE": "1", "PET_LOCAL_ADDR": "127.0.0.1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Let torchrun on one node restart its processes with a new store: the old one has the addresses of the ended ones."""


def job_name(text: str) -> str:
    """Convert a text to a valid name of a job."""
    return re.sub(r"^[^a-z]+", "", re.sub(r"[^a-z0-9]+", "-", text.lower()))[:40].rstrip("-") or "flagcore"


def checked_name(name: str) -> str:
    """Return `name`. Raises UsageError if it is not a valid name of a job."""
    if not NAME.fullmatch(name):
        raise UsageError(_("--name = {name!r}: use at most 40 lower-case letters, digits and dashes", name=name))
    return name


def start_lines(job: ExportJob, *, several: bool = False, names: Mapping[str, str] = {}) -> list[str]:
    """Return the lines of bash that start one node. If there are several, NODE_RANK and MASTER_ADDR must be set.

    `names`: texts in the command, such as secrets, with the names of the variables that contain them.
    """
    launch = job.launch
    lines = [f"cd {_quoted(launch.directory, names)} || exit 1"] if launch.directory else []
    if any(PORT in word for word in launch.argv):
        lines.append(f'{PORT_VARIABLE}="${{{PORT_VARIABLE}:-{urlsplit(launch.ready[0]).port}}}"')
    if any(KIND in word for word in launch.argv):
        lines.append(': "${DEVICE_TYPE:?set it to the type of this node in the host file}"')
    if launch.script:  # its line that sets MASTER_ADDR comes first: interfaces are found with it
        script = launch.script.splitlines()
        at = next((number for number, line in enumerate(script, 1) if "MASTER_ADDR=" in line), 0)
        return [*lines, *script[:at], *exports(launch, names), *script[at:]]
    if several:
        lines.append(f'export NODE_RANK MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-{MASTER_PORT}}}" NNODES={job.nodes}')
        lines.append(f'export PET_NNODES={job.nodes} PET_NODE_RANK="$NODE_RANK"')
        lines.append('export PET_MASTER_ADDR="$MASTER_ADDR" PET_MASTER_PORT="$MASTER_PORT"')
    elif not (launch.ready or launch.own_script):
        lines.append(f'export MASTER_ADDR="${{MASTER_ADDR:-127.0.0.1}}" MASTER_PORT="${{MASTER_PORT:-{MASTER_PORT}}}"')
    lines += exports(launch, names)
    if not launch.sample:
        return [*lines, f"exec {multi_line(launch.argv, names=names)}"]
    sample = re.sub(r"\S*,\S*", r"'\g<0>'", multi_line(launch.sample, separator="\n"))
    lines += [f"# Replace these, which train on generated data: {launch.missing}.", f"SAMPLE=(\n  {sample}\n)"]
    return [*lines, f'exec {multi_line(launch.argv)} \\\n  "${{SAMPLE[@]}}"']


def exports(launch: Launch, names: Mapping[str, str] = {}) -> list[str]:
    """Return the lines of bash that export the variables of a launch, or that check that its secrets are set."""
    lines = list[str]()
    for name, value in launch.environment.items():
        if is_secret(name, value) and value:
            lines.append(f': "${{{name}:?set it: it is secret}}"')
        elif any(each in value for each in DEVICES_OF_HOST):
            lines += [f"{name}={_quoted(value, names)}", f"export {name}"]
        else:
            lines.append(f"export {name}={_quoted(value, names)}")
    return lines


def multi_line(words: Sequence[str], separator: str = " \\\n", names: Mapping[str, str] = {}) -> str:
    """Return a shell command with each flag and its values on a separate line."""
    lines = [""]
    for word in words:
        is_value = not word.startswith("-") and "=" not in lines[-1]
        if is_value or not lines[-1]:
            lines[-1] += f"{' ' if lines[-1] else ''}{_quoted(word, names)}"
        else:
            lines.append(_quoted(word, names))
    return f"{separator}  ".join(lines)


def _quoted(word: str, names: Mapping[str, str] = {}) -> str:
    return shell_quoted(word, {**names, **NODE_VARIABLES, **DEVICES_OF_HOST})
