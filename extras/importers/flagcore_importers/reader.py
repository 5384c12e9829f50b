"""Converts the command, or the file, that starts an engine to a spec, if it starts no other engine."""

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from flagcore.contracts import Commands, ImportedSpec
from flagcore.domain.chip import USUAL_DEVICES
from flagcore.domain.launch import Start
from flagcore.domain.secrets import is_secret, redact_text, secrets_in_arguments
from flagcore.domain.units import LONGEST_TEXT
from flagcore.errors import SpecError, UsageError, join_errors
from flagcore.i18n import _
from flagcore.spec.plain_data import Notes, read_text
from flagcore_importers.batch import GPUS
from flagcore_importers.containers import images_of
from flagcore_importers.declared import read_table
from flagcore_importers.kubernetes import UNREAD_KIND
from flagcore_importers.starts import FailedScript, Program, Reader
from flagcore_importers.values import KEYS, left_out, split_words, text_of

MAX_WORDS = 5000
_DEVICES = "VISIBLE_DEVICES"
_NAMES_SCRIPT = re.compile(r"[\w./-]+\.(?:sh|bash|slurm|sbatch)\b")
_KIND = re.compile(r"(?m)^apiVersion: *([\w.-]+\.[\w.-]+)/\w+\n(?:[^-].*\n)*?kind: *(\w+)")
_OF_NETWORK = re.compile("_(IFNAME|HCA)$")
_THIS_HOST = re.compile(r"127\.0\.0\.1|localhost|//:")


def convert(
    engines: Mapping[str, Commands],
    words: Sequence[str],
    text: str,
    model: str | None,
    known: Callable[[], Sequence[str]],
    usual_devices: int = USUAL_DEVICES,
) -> ImportedSpec:
    """Return the spec whose baseline is a command, or a file with one, that starts an engine.

    `engines`: those that it may start. `words`: the command as one text or as several words, or the path of a file.
    `text`: the content of the file in place of `words`. `model`: the path of the model if the command does not contain
    it. `known`: returns the names of all engines whose commands can be read, for errors. `usual_devices`: of a host of
    the chip. Raises SpecError, UsageError.
    """
    words, content = _command(words, text)
    programs = [*Reader(images=images_of(engines), directory=os.getcwd()).programs(words, content)]
    shown = " ".join(words[1:] if content else words) or None
    given = Input(programs=programs, shown=shown, text=content or "", engines=engines, known=known)
    failure = given.failure
    first = engines_in(given, programs[: programs.index(failure)] if failure else programs)
    found = first or engines_in(given, programs)
    gave_up = not_one(given, {}) if failure and not first else None
    if error := untuned(given, found):
        raise error
    if error := not_one(given, found):
        raise gave_up or error
    ((name, _role, _words), start) = next(iter(found.items()))
    if len(start.words) > MAX_WORDS:
        raise UsageError(_("the command has {n} words: give at most {most}", n=len(start.words), most=MAX_WORDS))
    conversion = _Conversion(
        engine=engines[name],
        start=replace(start, usual_devices=usual_devices),
        model=model,
        text=content or shlex.join(words),
        others=others(engines[name], given.starts),
        failure=f"{failure.reason}: what follows is {'not ' if first else ''}read" if failure else "",
        gave_up=gave_up.problems if gave_up else (),
    )
    return conversion.spec()


def _command(words: Sequence[str], text: str) -> tuple[list[str], str | None]:
    """Return the words of a command, and the content of its file, if it is one. Raises UsageError."""
    if text or len(words) != 1:
        return list(words), text or None
    if os.path.isfile(words[0]):
        if not (content := read_text(Path(words[0]), file=words[0], key="file")).strip():
            raise UsageError(_("{file} is empty", file=words[0]))
        return ["bash", words[0]], content
    if os.path.isdir(words[0]):
        raise UsageError(_("{file} is a folder: give the script in it that starts the engine", file=words[0]))
    command = split_words(words[0])
    if {">", ">>", "2>&1", "|", "&", "&&", ";"} & set(command):
        return [], words[0]  # a shell has to read it
    if not command:
        raise UsageError(_("the command is empty"))
    if len(command) == 1 and re.search(r"\.\w{2,7}$", command[0]):
        raise UsageError(_("{file} is not a file", file=command[0]))
    return command, None


def _missing(start: Start) -> list[SpecError]:
    """Return the errors for the variables of a program that are not set, and for ConfigMaps that are not here."""
    problem, fix = "is not set, but the script uses it", "set it, or write its value in the command"
    missing = [SpecError(key=each, problem=problem, fix=fix) for each in unset_names(start)]
    problem, fix = _("is not here"), _("give its manifest in the same file or folder")
    return [*missing, *(SpecError(key=each, problem=problem, fix=fix) for each in start.absent)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversion:
    """The conversion of `start`, which starts `engine`, to a spec. `text`: the whole input.

    `model`: the path of the model if the user gave it. `others`: the other programs, and `failure`: how a script
    failed, for notes. `gave_up`: the errors of a script that is not read to its end.
    """

    engine: Commands
    start: Start
    model: str | None
    text: str
    others: Mapping[str, str]
    failure: str
    gave_up: Sequence[SpecError]

    def spec(self) -> ImportedSpec:
        """Return the spec, with the script around the command if trials can start it. Raises SpecError."""
        script = self.start.script if self.engine.keeps_scripts else ()
        is_long = bool(script) and max(map(len, script)) > LONGEST_TEXT  # a template, given as text
        return self._read((), "is long") if is_long else self._read(script)

    def _read(self, script: tuple[str, ...], reason: str = "") -> ImportedSpec:
        """Return the spec with `script` as the command, or with the program alone. `reason`: why without the script."""
        start, notes = self.start, self._notes(script, reason)
        script = tuple(_with_references(word, notes) if "\n" in word else word for word in script)
        named = _names_in(" ".join([self.text, *script])) - {*GPUS} if script else set[str]()
        of_job = {name: value for name, value in start.job.items() if name in named}
        envs = self._envs({**start.envs, **of_job}, script, notes)
        hosts = {name: value for name, value in start.envs.items() if name == "NNODES"}  # not in trials, but of the job
        job = {**start.job, **hosts}
        of_script = replace(start, envs={**job, **envs}, words=script)
        read = of_script if script else replace(start, envs=envs, job=job)
        try:
            data, engine_notes = self.engine.read(read, Path.cwd(), self.model)
        except SpecError as error:
            if script and error.key == "train.command":
                return self._read((), "cannot start it in trials")
            raise join_errors([*self.gave_up, *error.problems, *_missing(start)]) from None
        unset = unset_names(start)
        if unset and str(data["model"]).endswith("/") and not os.path.isdir(data["model"]):
            problem = _("ends with a variable that is not set: {names}", names=", ".join(unset))
            raise SpecError(key="model", value=data["model"], problem=problem, fix=_("set it, or add --model"))
        return ImportedSpec(data={**data, **({"envs": envs} if envs else {})}, notes=(*engine_notes, *notes.notes))

    def _notes(self, script: tuple[str, ...], reason: str) -> Notes:
        """Return the notes on what is not read."""
        notes = Notes()
        if self.failure:
            notes.note("command", f"the script {self.failure}")
        if reason:
            notes.note("train.command", f"is the program without the script, which {reason}", "train.command")
        for key, value in {**self.start.left_out, **({} if script else self.others)}.items():
            shown = redact_text(f"{key} {value}").removeprefix(f"{key} ")  # the program or option tells what is secret
            notes.note(key, "is a secret: not copied" if is_secret(key) else f"is left out: {shown[:100]}")
        return notes

    def _envs(self, variables: Mapping[str, str], script: Sequence[str], notes: Notes) -> dict[str, str]:
        """Return `variables` without those that trials cannot have. Add a note on each variable.

        A text of a shell as `script` needs the variables that it reads and does not set itself.
        """
        read = {*re.findall(r"\$\{?(\w+)", script[2])} if script[1:2] == ("-c",) else set[str]()
        own = {*re.findall(r"(?:^|[\s;&])(\w+)=(?![\"']?\$\{?\1\b)", script[2])} if read else set[str]()
        envs = dict[str, str]()
        for name in unset_names(self.start):
            notes.note(name, "is not set: it is empty in the command")
        noted = {each.key for each in notes.notes}
        for name, value in variables.items():
            reason = self._reason_against(name, value, is_needed=name in read - own)
            if reason and name not in noted:
                notes.note(name, reason)
            elif not reason:
                envs[name] = value
                effect = "restricts the devices of all trials" if name.endswith(_DEVICES) else "is set in all trials"
                notes.note(name, effect, f"envs.{name}")
        return envs

    def _reason_against(self, name: str, value: str, *, is_needed: bool) -> str:
        """Return why a variable is not in the spec, or an empty text. `is_needed`: whether the script reads it.

        If there are several instances, each has its own devices. A network device that is not in the text of the input
        was computed here.
        """
        start, text = self.start, self.text
        is_here = _OF_NETWORK.search(name) or _THIS_HOST.search(value)
        if is_secret(name, value):
            return "is a secret: not copied"
        if (start.hosts > 1 and OF_HOST.match(name)) or (is_here and not (value and value in text)):
            return "dropped: differs between hosts"
        is_of_one = name.endswith(_DEVICES) and (start.instances > 1 or not re.match("[0-9]", value))
        if OF_MACHINE.match(name) or is_of_one:
            return "dropped: belongs to the machine or the container"
        if not value and start.script:
            return "dropped: its value is not known here"
        is_word = not is_needed and _is_word(name, value, start.words, text)
        return "dropped: it is part of the command" if is_word else ""


def _names_in(text: str, depth: int = 0) -> set[str]:
    """Return the words in the text of a script, and in those of the scripts that it names: it reads no other variable
    of its batch job."""
    inner = (text_of(Path(name)) for name in (_NAMES_SCRIPT.findall(text) if depth < 3 else ()))
    return {*re.findall(r"\w+", text)}.union(*(_names_in(each, depth + 1) for each in inner))


def _with_references(text: str, notes: Notes) -> str:
    """Return the text of a script that reads its secrets from variables of the shell. Add a note on each."""
    for number, secret in enumerate(secrets_in_arguments([text]), start=1):
        named = re.search(rf"(\w+)=[\"']?{re.escape(secret)}", text)
        name = named[1] if named else f"FLAGCORE_{number}_SECRET"
        notes.note(name, "is a secret, which the script reads from the shell that starts it")
        parts = text.split(secret)
        for place, before in enumerate(parts[:-1]):
            is_quoted = before.rpartition("\n")[2].count("'") % 2
            parts[place] = before + (f"'\"${{{name}-}}\"'" if is_quoted else f"${{{name}-}}")
        text = "".join(parts)
    return text


def _is_word(name: str, value: str, words: Sequence[str], text: str) -> bool:
    """Return whether a variable only has a word of the command: a path, the value of a flag of its name, or `$NAME`."""
    values = [word.partition("=")[2 if word.startswith("-") else 0] for word in words]
    flags = [re.sub("^--?|=.*", "", word) for n, word in enumerate(words)
             if word.startswith("-") and value in values[n : n + 2]]  # fmt: skip
    is_named = any(name.lower().replace("_", "-").endswith(flag) for flag in flags if len(flag) > 1)
    return value in values and ("/" in value or is_named or bool(re.search(rf"\$[{{(]?{name}\b", text)))


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
            if role is not None and not re.match(KEYS.tools, _text(start)):
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
    commands = [each for each in map(_text, unknown if is_image else given.programs) if not re.match(KEYS.tools, each)]
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
    elif not given.programs and (kinds := re.findall(_KIND, given.text)):
        fix = _(UNREAD_KIND, kind=kinds[0][1], group=kinds[0][0])
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
