"""Converts the command, or the file, that starts an engine to a spec."""

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flagcore.contracts import Commands, ImportedSpec
from flagcore.domain.launch import Start
from flagcore.domain.secrets import is_secret, redact_text, secrets_in_arguments
from flagcore.domain.units import LONGEST_TEXT
from flagcore.errors import SpecError, UsageError, join_errors
from flagcore.i18n import _
from flagcore.spec.plain_data import Notes, read_text
from flagcore_importers.batch import GPUS
from flagcore_importers.choice import OF_HOST, OF_MACHINE, Input, engines_in, not_one, others, unset_names, untuned
from flagcore_importers.containers import images_of
from flagcore_importers.starts import Reader
from flagcore_importers.values import split_words, text_of

MAX_WORDS = 5000
_DEVICES = "VISIBLE_DEVICES"
_NAMES_SCRIPT = re.compile(r"[\w./-]+\.(?:sh|bash|slurm|sbatch)\b")
_OF_NETWORK = re.compile("_(IFNAME|HCA)$")
_THIS_HOST = re.compile(r"127\.0\.0\.1|localhost|//:")


def convert(
    engines: Mapping[str, Commands],
    words: Sequence[str],
    text: str,
    model: str | None,
    known: Callable[[], Sequence[str]],
) -> ImportedSpec:
    """Return the spec whose baseline is a command, or a file with one, that starts an engine.

    `engines`: those that it may start. `words`: the command as one text or as several words, or the path of a file.
    `text`: the content of the file in place of `words`. `model`: the path of the model if the command does not contain
    it. `known`: returns the names of all engines whose commands can be read, for errors. Raises SpecError, UsageError.
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
        start=start,
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
        envs = self._envs({**start.envs, **of_job}, notes)
        hosts = {name: value for name, value in start.envs.items() if name == "NNODES"}  # not in trials, but of the job
        of_program = replace(start, envs=envs, job={**start.job, **hosts})
        read = replace(start, envs={**start.job, **envs}, words=script) if script else of_program
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
        notes = Notes()
        if self.failure:
            notes.note("command", f"the script {self.failure}")
        if reason:
            notes.note("train.command", f"is the program without the script, which {reason}", "train.command")
        for key, value in {**self.start.left_out, **({} if script else self.others)}.items():
            shown = redact_text(f"{key} {value}").removeprefix(f"{key} ")  # the program or option tells what is secret
            notes.note(key, "is a secret: not copied" if is_secret(key) else f"is left out: {shown[:100]}")
        return notes

    def _envs(self, variables: Mapping[str, str], notes: Notes) -> dict[str, str]:
        """Return `variables` without those that trials cannot have. Add a note on each variable."""
        envs = dict[str, str]()
        for name in unset_names(self.start):
            notes.note(name, "is not set: it is empty in the command")
        noted = {each.key for each in notes.notes}
        for name, value in variables.items():
            reason = self._reason_against(name, value)
            if reason and name not in noted:
                notes.note(name, reason)
            elif not reason:
                envs[name] = value
                effect = "restricts the devices of all trials" if name.endswith(_DEVICES) else "is set in all trials"
                notes.note(name, effect, f"envs.{name}")
        return envs

    def _reason_against(self, name: str, value: str) -> str:
        """Return why a variable is not in the spec, or an empty text. If there are several instances, each has its own
        devices. A network device that is not in the text of the input was computed here."""
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
        return "dropped: it is part of the command" if _is_word(name, value, start.words, text) else ""


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
