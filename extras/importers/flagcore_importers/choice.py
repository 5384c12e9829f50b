"""Finds the only engine among the programs of an input, or says what the input starts instead."""

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from flagcore.contracts import Commands
from flagcore.domain.launch import Start
from flagcore.domain.secrets import is_secret, redact_text
from flagcore.errors import SpecError
from flagcore.i18n import _
from flagcore_importers.containers import images_of
from flagcore_importers.declared import read_table
from flagcore_importers.starts import FailedScript, Program
from flagcore_importers.values import KEYS, left_out

Found: TypeAlias = Mapping[tuple[str, str, str], Start]
"""The programs that are engines, by engine, role and command."""
_OF_COPY = re.compile(r"\s--([\w-]*port|host|node.rank|data-parallel-(start-)?rank)[=\s]\S+|\s--headless")
"""Arguments that copies of a server have of their own."""
_FOLLOWER = re.compile(r"--(node|data-parallel|data-parallel-start).rank[=\s][1-9]|--headless")
"""Arguments of the other hosts of a server."""
_SCRIPT = re.compile(r"\b(?:ba|da)?sh\s(?:-\w+\s)*([^\s'\"]+\.(?:sh|bash|slurm|sbatch))\b")
OF_MACHINE = re.compile(
    r"^(BASH_FUNC_.*|PATH|PWD|HOME|HOSTNAME|USER|TMPDIR|LANG|TZ|HF_HOME|HF_HUB_CACHE|XDG_\w+|\w+_proxy|\w+_PROXY|HOSTS"
    r"|(NODE_|LOCAL_)?RANK|WORLD_SIZE|NNODES|(MASTER|\w+_SIDE_CHANNEL)_(ADDR|HOST|PORT)|\w+_HOST_IP|(FLAGCORE|LWS|PET)_\w+)$"
)
"""Variables that belong to a machine or a container."""
_NEVER = "(?!)"
OF_HOST = re.compile("SLURM_(NODEID|PROCID|LOCALID|JOB_?ID|(JOB_)?NODELIST)$")
"""Variables that differ between the hosts of a job, or between jobs."""


def unset_names(program: Program) -> list[str]:
    """Return the names of the variables in a program's script that are not set, without those of a machine."""
    return [each for each in program.unset if not (is_secret(each) or OF_MACHINE.match(each) or OF_HOST.match(each))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """The programs that an input starts.

    `shown`: the input in errors. `text`: the content of its file, or empty. `engines`: those that may be started.
    `known`: returns the names of all engines whose commands can be read.
    """

    programs: Sequence[Program]
    shown: str | None
    text: str
    engines: Mapping[str, Commands]
    known: Callable[[], Sequence[str]]

    @property
    def starts(self) -> list[Start]:
        """The programs without failed scripts."""
        return [each for each in self.programs if isinstance(each, Start)]

    @property
    def failure(self) -> FailedScript | None:
        """The first script that could not be read to its end."""
        return next((each for each in self.programs if isinstance(each, FailedScript)), None)


def engines_in(given: Input, programs: Sequence[Program]) -> Found:
    """Return the engines among `programs` of an input. Those of one server are a single one."""
    found = dict[tuple[str, str, str], Start]()
    starts = [each for each in programs if isinstance(each, Start) and each.words]
    for name, engine in given.engines.items():
        for start in sorted(starts, key=_follows):
            role = engine.role(start.words, os.getcwd())
            if role is not None and not KEYS.tools.match(_text(start)):
                key = name, start.role or role, _OF_COPY.sub("", shlex.join(start.words))
                found[key] = _joined(found[key], start) if key in found else start
    bare = [[*entry] for entry in images_of(given.engines).values()]  # beside the server's
    found = {key: each for key, each in found.items() if [*each.words] not in bare} or found
    return _paired(found)


def _paired(found: Found) -> Found:
    """Return both halves of a pair as one server, or any other engines themselves."""
    roles = {role: start for (_name, role, _words), start in found.items()}
    if len(found) == len(roles) == 2 and roles.keys() == {"prefill", "decode"}:
        return {next(iter(found)): replace(roles["decode"], prefill=roles["prefill"])}
    return found


def untuned(given: Input, found: Found) -> SpecError | None:
    """Return the error for an input that starts what flagcore does not tune, by its name, or None."""
    unknown = [each for each in given.starts if each.image and each.words]
    is_image = len(given.programs) > 1 and bool(unknown)
    commands = [each for each in map(_text, unknown if is_image else given.programs) if not KEYS.tools.match(each)]
    for name, row in read_table("untuned").items():
        is_sure, words, text = row.get("always"), row.get("words", _NEVER), row.get("text", _NEVER)
        if found and not is_sure:
            continue
        in_words = any(re.search(words, each) for each in commands)
        if in_words or ((is_sure or not is_image) and re.search(text, given.text, re.MULTILINE)):
            fix = _("plan the shape of its model with `flag estimate --model NAME --chip NAME`")
            problem = _("starts {name}, which `flag import` does not read", name=name)
            if row.get("is"):
                problem = _("is {name}, which `flag import` does not read", name=name)
            return SpecError(key="command", value=given.shown, problem=problem, fix=row.get("fix") or fix)
    return None


def not_one(given: Input, found: Found) -> SpecError | None:
    """Return the error for an input that does not start exactly one engine, or None."""
    if len(found) == 1:
        return None
    scripts = (hit[1] for hit in map(_SCRIPT.search, [*map(_text, given.starts)] or [given.text]) if hit)
    absent = next((each for each in scripts if not os.path.isfile(each)), "")
    if given.failure and not found:
        problem = _("starts no engine: it {failure}", failure=redact_text(_text(given.failure)))
        fix = _("give its arguments, as in `flag import -- bash FILE ARGUMENT`, set its variables, or give its command")
    elif absent and not found:
        problem = _("starts no engine: the script {file}, which it starts, is not here", file=redact_text(absent))
        fix = _("give that script, or start from the folder to which its path belongs")
    else:
        return _several(given, found)
    if names := dict.fromkeys(name for each in given.programs for name in unset_names(each)):
        fix = _("{fix}; not set: {names}", fix=fix, names=", ".join([*names][:6]))
    return SpecError(key="command", value=given.shown, problem=problem, fix=fix)


def _several(given: Input, found: Found) -> SpecError:
    """Return the error for an input with no engine, or with several ones."""
    texts = [redact_text(_text(each)) for each in [*(found.values() or given.starts)][-4:]]
    common = next((n for n, each in enumerate(zip(*texts, strict=False)) if len({*each}) > 1), 0) * (len(found) > 1)
    common = texts[0].rfind(" ", 0, common) + 1 if texts else 0
    shown = ", ".join(f"{'... ' if common > 40 else ''}{each[common * (common > 40) :][:60]}" for each in texts)
    shown = shown or _("nothing")
    problem = _("must start exactly one engine, but starts {n}; its commands are {shown}", n=len(found), shown=shown)
    if not found and len((given.shown or "").split()) == 1 and not os.path.isfile(given.shown or ""):
        problem = _("is neither a file nor a command that starts an engine")
    return SpecError(key="command", value=given.shown, problem=problem, fix=_fix(given, found))


def _fix(given: Input, found: Found) -> str:
    unknown = [each.image for each in given.starts if each.image and (each.words or len(given.programs) == 1)]
    fix = _("give the command of one of {engines}", engines=", ".join(given.known()))
    if found:
        fix = _("give one of them: flag import -- COMMAND")
    elif not given.programs and given.text:
        fix = _("it starts no program, and only sets variables at most: give the file or the command that starts one")
    elif any("$" in each or "{" in each or "__" in each for each in unknown):
        fix = _("its image is a placeholder: give the file after `envsubst`, `helm template` or the like has filled it")
    elif unknown:
        fix = _("the entry point of the image is not known: write the program before its arguments")
    return fix


def _text(program: Program) -> str:
    if isinstance(program, FailedScript):
        return program.reason
    return shlex.join((f"image {program.image}", *program.words) if program.image else program.words)


def _follows(start: Start) -> bool:
    """Return whether a program is not the first one of its server."""
    return bool(_FOLLOWER.search(" ".join(start.words)))


def _joined(start: Start, other: Start) -> Start:
    """Return a server that is also started as `other`: on another host, or as a copy."""
    envs = {name: value for name, value in other.envs.items() if start.envs.get(name) == value}
    unset = start.unset if start.unset == other.unset else ()
    copies = 0 if _follows(other) else other.instances
    return replace(start, instances=start.instances + copies, envs=envs, unset=unset)


def others(engine: Commands, starts: Sequence[Start]) -> dict[str, str]:
    """Return the other programs of an input, with their arguments, that may change speed."""
    words = [(each.image, *each.words) if each.image else each.words for each in starts
             if not (each.words and engine.role(each.words, os.getcwd()) is not None)]  # fmt: skip
    named = {os.path.basename(each[0]): " ".join(each[1:]) for each in reversed(words)}
    return left_out(KEYS.programs, {name: text or name for name, text in named.items()})
