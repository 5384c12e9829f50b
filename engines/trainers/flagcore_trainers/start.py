"""The command and the configuration file of a candidate. Nothing of the user's is written."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from flagcore_training.frameworks import CONFIG
from flagcore_training.real_job import with_config

from flagcore.domain.space import KnobValue
from flagcore.errors import SpecError
from flagcore.spec.plain_data import lookup, package_yaml, read_text
from flagcore_trainers.program import KnobRow

PASSED: Mapping[str, Sequence[str]] = package_yaml(__package__, "importing.yaml")["passed"]
"""The keywords of calls that take a configuration of DeepSpeed, or the name of its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A user's command, with its configuration file if it has one.

    `config`: the path of the file that appears in the command. `content`: its content.
    """

    words: tuple[str, ...]
    directory: str
    config: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)

    def value(self, row: KnobRow) -> Any:
        """Return the value of a knob that the command or the configuration file sets, or None if neither does."""
        if row.flag and (found := flag_value(self.words, row.flag)) is not None:
            return found
        return lookup(self.content, row.key) if row.key else None


def argv_of(
    command: Command,
    knobs: Mapping[str, KnobRow],
    values: Mapping[str, KnobValue],
    placeholders: Mapping[str, object],
    added: Sequence[str],
    config_file: str,
) -> tuple[str, ...]:
    """Return the command of a candidate.

    `values`: the value of each of `knobs`.
    `placeholders`: what each `{name}` inside a word stands for.
    `added`: further arguments.
    `config_file`: the path of the candidate's configuration file, empty if there is none.

    The user's own flags of knobs are left out. The candidate's flags replace the word `{flags}` or are appended.
    """
    words, flags = list(command.words), list[str]()
    for name, row in knobs.items():
        if row.flag:
            words = _without_flag(words, row.flag, isinstance(values[name], bool))
            flags += _flag_words(row.flag, values[name])
    flags += added
    if config_file:
        words = [with_config(word, command.config, config_file) for word in words]
    argv: list[str] = []
    for word in words if "{flags}" in words else [*words, "{flags}"]:
        argv += flags if word == "{flags}" else [word]
    for name, value in placeholders.items():
        argv = [word.replace(f"{{{name}}}", str(value)) for word in argv]
    return tuple(argv)


def check_config_word(words: Sequence[str], config: str) -> None:
    """Raise SpecError if no word of the command names the configuration file."""
    if not any(with_config(word, config, "\0") != word for word in words):
        fix = f"write {CONFIG} in train.command where the path belongs"
        raise SpecError(key="train.program.config", value=config, problem="is not in train.command", fix=fix)


def _flag_words(flag: str, value: KnobValue) -> list[str]:
    """Return the words that set a flag. A switch without `{}` is passed alone, or left out if it is off."""
    if "{}" in flag:
        return [flag.replace("{}", str(value).lower() if isinstance(value, bool) else str(value))]
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, str(value)]


def _without_flag(words: Sequence[str], flag: str, is_switch: bool) -> list[str]:
    """Return the words of a command without a flag and its value."""
    kept: list[str] = []
    start, skip = flag.partition("{}")[0] if "{}" in flag else f"{flag}=", False
    for word in words:
        if skip or word.startswith(start):
            skip = False
        elif word == flag:
            skip = not is_switch
        else:
            kept.append(word)
    return kept


def flag_value(words: Sequence[str], flag: str) -> Any:
    """Return the last value of a flag in a command as text, True for a flag without a value, or None."""
    start, found = flag.partition("{}")[0] if "{}" in flag else f"{flag}=", None
    for place, word in enumerate(words):
        following = "".join(words[place + 1 : place + 2])
        if word == flag:
            found = True if not following or following.startswith("-") else following
        elif word.startswith(start):
            found = word[len(start) :]
    return found


def own_configurations(words: Sequence[str], directory: Path) -> Iterator[str]:
    """Yield a line for each call in scripts of a command that passes a dictionary as the configuration."""
    for word in words:
        path = Path(directory, word)
        if path.suffix != ".py" or not path.is_file():
            continue
        with suppress(SyntaxError, ValueError, SpecError):
            for line in _own_calls(ast.parse(read_text(path, file=word, key="train.command"))):
                place = f"{word}:{line}"
                yield f"{place} passes a configuration of its own: candidates need the file of the command there"


def _own_calls(tree: ast.Module) -> Iterator[int]:
    """Yield the line of each call that passes a dictionary as the configuration."""
    nodes = [*ast.walk(tree)]
    assigned = [each for each in nodes if isinstance(each, ast.Assign) and _is_dictionary(each.value)]
    names = {name.id for each in assigned for name in each.targets if isinstance(name, ast.Name)}
    for call in (each for each in nodes if isinstance(each, ast.Call)):
        keywords = PASSED.get(getattr(call.func, "attr", getattr(call.func, "id", "")), ())
        values = [each.value for each in call.keywords if each.arg in keywords]
        if any(_is_dictionary(each) or getattr(each, "id", "") in names for each in values):
            yield call.lineno


def _is_dictionary(value: ast.expr) -> bool:
    is_call = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict"
    return isinstance(value, ast.Dict) or is_call


CONFIG_FILE = "job.config_file"


def read_toml(file: str, directory: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises SpecError."""
    text = read_text(Path(directory, file), file=file, key=f"--{CONFIG_FILE}")
    try:
        content: dict[str, Any] = import_module("tomllib").loads(text)
    except ImportError:
        raise SpecError(key=f"--{CONFIG_FILE}", value=file, problem="needs Python 3.11", fix="use it") from None
    except ValueError as error:
        fix = "correct it"
        raise SpecError(key=f"--{CONFIG_FILE}", value=file, problem=f"is not valid TOML: {error}", fix=fix) from None
    return content


def option(words: Sequence[str], *names: str) -> Any:
    """Return the value of the first of the options that the command sets, written with - or _, or None."""
    flags = [f"--{each}" for name in names for each in dict.fromkeys((name, name.replace("_", "-")))]
    return next((value for flag in flags if (value := flag_value(words, flag)) is not None), None)
