"""One reader for the settings of other programs: of command lines, YAML, JSON and overrides.

A dialect is a table: what each key sets in a spec, which keys are harmless, and which are known but not modelled. A key
that no table knows is always named.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from flagcore_vendorkit.settings import Settings, read_settings

from flagcore.errors import SpecError
from flagcore.spec.plain_data import load_json, parse_yaml, read_text
from flagcore_importers.programs import grouped
from flagcore_importers.values import load_documents

OFF: tuple[Any, ...] = (None, False, "", "none", "no", "false", 0, [], {})
"""The values with which a known key changes nothing."""
SUFFIXES = (".json", ".yaml", ".yml")
"""The ends of names of files with settings."""
_OPTION = re.compile(r"--?[A-Za-z]|--$")
_OVERRIDE = re.compile(r"(\+{0,2}|~)([a-z_][\w-]*|[A-Za-z_][\w-]*[./@][\w./@-]*)=(.*)", re.DOTALL)
_REMOVED = re.compile(r"~([A-Za-z_][\w-]*\.[\w./@-]*)")
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_ARITHMETIC: Mapping[str, Any] = {"mul": lambda a, b: a * b, "div": lambda a, b: a // b, "add": lambda a, b: a + b}
"""Resolvers that NeMo-RL registers (7ea279ab `nemo_rl/utils/config.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What programs set under one of several names.

    - `names`: the names, of which the first that is set counts. Dashes and underscores are the same. The value of
      `NAME~PATTERN` is whether the name's value matches; `!NAME` negates; commands write a new name as `+NAME`.
    - `words`: the program's value of each of flagcore's.
    - `per_rank`: whether each rank of context parallelism has that many tokens.
    - `before_program`: whether it is an option of the launcher.
    """

    names: tuple[str, ...]
    words: Mapping[str, Any] = field(default_factory=dict)
    per_rank: bool = False
    before_program: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A key that is set, and that predictions do not include. `why`: what it changes, empty if that is unknown."""

    key: str
    value: Any
    why: str
    is_known: bool

    @property
    def reason(self) -> str:
        """What follows `not in the predictions` in a note."""
        return f": {self.why}" if self.why else "" if self.is_known else ": unknown to flagcore"


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How a program names its settings.

    - `starts`: a pattern of the words of its commands.
    - `keys`: the names of each setting, by what it is in a spec; those of one trainer are below `trainer.NAME`.
    - `defaults`: the program's own values of these settings, in its own words.
    - `harmless`, `named`: the keys without an effect, and those that are known, but not modelled. Each is a mapping
      from the starts of keys to their ends, all separated by spaces. `END~PATTERN` is harmless with values that match,
      and named with all others. `*` at the end of a key stands for any ending.
    - `why`: what keys change that are known, but not modelled, as phrases.
    - `classes`: for starts of keys, the package and the file with the classes of settings for the ends.
    - `config`: options that name a file of settings. `program`: the word before such a file as the first argument.
    - `usual_config`: the file of settings, beside the program, of a command that names none.
    - `presets`: settings of names in place of files.
    - `follows`: the start of names that trials set as well, but that are not read.
    """

    starts: str
    keys: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    why: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    config: Sequence[str] = ()
    program: str = "$^"
    usual_config: str = ""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    follows: str = "\0"

    def keys_of(self, trainer: str) -> dict[str, Key]:
        """Return the keys of jobs with a trainer."""
        general = {name: row for name, row in self.keys.items() if not name.startswith("trainer.")}
        return {name: _key(row) for name, row in {**general, **self.keys.get(f"trainer.{trainer}", {})}.items()}

    @cached_property
    def modelled(self) -> frozenset[str]:
        """The names of all settings with a place in a spec."""
        trainers = [name.partition(".")[2] for name in self.keys if name.startswith("trainer.")]
        keys = [key for trainer in (trainers or [""]) for key in self.keys_of(trainer).values()]
        return frozenset(name_of(name) for key in keys for name in key.names)

    @cached_property
    def _harmless(self) -> Mapping[str, re.Pattern[str] | None]:
        parts = (each.partition("~") for each in _spread(self.harmless))
        return {name_of(name): re.compile(pattern) if tilde else None for name, tilde, pattern in parts}

    @cached_property
    def _named(self) -> frozenset[str]:
        return frozenset(map(name_of, (*_spread(self.named), *self.why)))

    @cached_property
    def sections(self) -> frozenset[str]:
        """The names of sections with keys that a table knows."""
        names = {*self.modelled, *self._harmless, *self._named}
        return frozenset(name[: place.start()] for name in names for place in re.finditer(r"\.", name))

    def is_known(self, name: str) -> bool:
        """Return whether a table knows a key."""
        tables = (self.modelled, self._harmless, self._named)
        return any(_found(name, table) is not None for table in tables) or self._classes(name) is not None

    def is_harmless(self, name: str, value: Any) -> bool:
        """Return whether a key that a table knows has no effect with a value."""
        entry = _found(name, self._harmless)
        pattern = None if entry is None else self._harmless[entry]
        if pattern is not None and value is not None:
            return pattern.fullmatch(str(value)) is not None
        return entry is not None or value in OFF

    def _classes(self, name: str) -> tuple[Settings, str] | None:
        """Return the classes of settings that know a key, and its name there."""
        for start, (package, file) in self.classes.items():
            settings, rest = read_settings(package, file), name.removeprefix(start)
            if name.startswith(start) and not settings.unclassed([rest]):
                return settings, rest
        return None

    def reason(self, name: str, value: Any) -> str:
        """Return what a key changes that predictions do not include, or an empty text."""
        if (own := self.why.get(name)) or (found := self._classes(name)) is None:
            return own or ""
        effect = found[0].unmodelled(found[1], value)
        return str(effect.why) if effect else ""


def _key(row: Any) -> Key:
    row = row if isinstance(row, Mapping) else {"names": row}
    names = row["names"]
    return Key(**{**row, "names": (names,) if isinstance(names, str) else tuple(names)})


def name_of(text: str) -> str:
    """Return the name in an entry of a table or a word of a command, with underscores for dashes."""
    return text.lstrip("-!+").partition("~")[0].replace("-", "_")


def _spread(table: Mapping[str, str]) -> Iterator[str]:
    for starts, ends in table.items():
        yield from (start + end for start in (starts.split() or [""]) for end in ends.split())


def _found(name: str, names: Iterable[str]) -> str | None:
    """Return the entry of `names` that stands for a name."""
    if name in names:
        return name
    return next((each for each in names if each.endswith("*") and name.startswith(each[:-1])), None)


def scalar(text: str) -> Any:
    """Return the value of a word, as YAML reads it, or the word."""
    with suppress(yaml.YAMLError, RecursionError):
        return next(load_documents(text), None)
    return text


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a configuration with their values, which are no mappings, also those in lists."""
    for name, value in sorted(content.items(), key=lambda item: item[0] != "<<"):  # merged sections come first
        if name == "<<" and isinstance(value, Mapping):
            yield from flat(value, prefix)
        elif isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
            for each in value:
                yield from flat(each if isinstance(each, Mapping) else {"": each}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def placed(words: Sequence[str], read: Callable[[str], Any] = scalar) -> Iterator[tuple[str, Any, int, int]]:
    """Yield the name, the value, and the positions of the words of each option `--NAME VALUE` and word `NAME=VALUE`.

    The value of a word `~NAME`, which removes a setting, is None. An option without a value is on. One with several
    values has a list; files and programs after them are arguments. `read` returns the value of a word.
    """
    for name, inline, following, place in grouped(words, _split):
        values = inline or following
        if re.match("--[A-Za-z]", name):
            found = [read(each) for each in values if not each.endswith((*SUFFIXES, ".py"))] or values[:1]
            end = place + 1 + (0 if inline else len(following))
            yield name_of(name), (found[0] if len(found) == 1 else found or True), place, end
        elif match := _REMOVED.fullmatch(words[place]):
            yield name_of(match[1]), None, place, place + 1
        elif match := _OVERRIDE.fullmatch(words[place]):
            yield name_of(match[2]), None if match[1] == "~" else read(match[3]), place, place + 1


def _split(word: str) -> tuple[str, str, str]:
    is_new = _OPTION.match(word) or _OVERRIDE.fullmatch(word) or _REMOVED.fullmatch(word)
    return word.partition("=") if is_new else ("", "", "")


def read_config(config: str, directory: str, key: str = "train.program.config") -> dict[str, Any]:
    """Return the content of a configuration file. Raises SpecError. `key` is the key of the spec that names the file"""
    path = Path(directory, config)
    if path.suffix not in SUFFIXES:
        fix = "convert it to JSON or YAML, or set its values by flags"
        raise SpecError(key=key, value=config, problem="is neither JSON nor YAML", fix=fix)
    text = read_text(path, file="", key=key)
    try:
        content = load_json(_plain_json(text)) if path.suffix == ".json" else parse_yaml(text, file=str(path))
    except ValueError as error:
        raise SpecError(key=key, value=config, problem=str(error), fix="correct the file") from None
    if not isinstance(content, dict):
        raise SpecError(key=key, value=config, problem="is not a mapping", fix="write keys and values")
    return content


def _plain_json(text: str) -> str:
    """Return JSON without the comments and the trailing commas that DeepSpeed's reader (hjson) accepts."""
    string = r'("(?:\\.|[^"\\\n])*")'
    for other in (r"//[^\n]*|#[^\n]*|/\*.*?\*/", r",(?=\s*[}\]])"):
        text = re.sub(
            f"{string}|{other}", lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text, flags=re.DOTALL
        )
    return text


def _with_bases(file: str, directory: Path, depth: int = 0) -> dict[str, Any]:
    """Return the content of a file over that of the files in its `defaults`. Raises SpecError."""
    content = read_config(file, str(directory), key="command")
    bases, result = content.pop("defaults", None) or [], dict[str, Any]()
    for base in [bases] if isinstance(bases, str) else bases:
        own = Path(file).parent / f"{str(base).removesuffix('.yaml')}.yaml"
        if isinstance(base, str) and os.path.isfile(directory / own) and depth < 16:  # others belong to a package
            result = merged(result, _with_bases(str(own), directory, depth + 1))
    return merged(result, content)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return nested sections with the values of `over` in place of those of `base`."""
    both = {key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
            for key, value in over.items()}  # fmt: skip
    return {**base, **both}


def _resolved(value: Any, content: Mapping[str, Any]) -> Any:
    """Return a value with OmegaConf's references and NeMo-RL's arithmetic replaced. Unknown ones stay."""
    for _time in range(32):
        match = _REFERENCE.search(value) if isinstance(value, str) else None
        found = _referred(match[1], content) if match else None
        if match is None or found is None:
            return value
        value = f"{value[: match.start()]}{found}{value[match.end() :]}"
        value = value if _REFERENCE.search(value) else scalar(value)
    return value


def _referred(text: str, content: Mapping[str, Any]) -> Any:
    name, colon, rest = text.partition(":")
    words = [each.strip() for each in rest.split(",")]
    if colon and name in _ARITHMETIC:
        numbers = [scalar(each) for each in words]
        return _ARITHMETIC[name](*numbers) if [type(each) for each in numbers] == [int, int] else None
    if colon and name in ("oc.env", "oc.select"):
        return content.get(words[0], words[1] if len(words) > 1 else None)
    return content.get(text)


def read_given(dialect: Dialect, words: Sequence[str], directory: Path) -> dict[str, Any]:
    """Return the settings of the files that a command names, and of its words, by name: the last value counts.

    Values of words that are mappings are sections if a table knows keys of them. Raises SpecError.
    """
    content = dict[str, Any]()
    for file in files_of(dialect, words, directory):
        preset = dialect.presets.get(file)
        found = flat(_with_bases(file, directory)) if preset is None else preset.items()
        content |= {name_of(key): value for key, value in found}
    for name, value, _start, _end in placed(words):
        content.pop(name, None)
        if isinstance(value, Mapping) and value and name in dialect.sections:
            content |= {name_of(key): each for key, each in flat(value, f"{name}.")}
        else:
            content[name] = value
    return {key: _resolved(value, content) for key, value in content.items()}


def files_of(dialect: Dialect, words: Sequence[str], directory: Path) -> list[str]:
    """Return the files of settings of a command, in its order: of its launcher first."""
    found = [
        file
        for before, word in zip(("", *words), words, strict=False)
        if (file := _file(dialect, before, word, directory))
    ]
    program = next((each for each in words if each.endswith(".py")), "")
    near = str(Path(program).parent / "configs" / dialect.usual_config)
    if program and dialect.usual_config and not found and os.path.isfile(directory / near):
        found.append(near)
    options = {name: str(value) for name, value, _start, _end in placed(words) if name.startswith("config_")}
    if {"config_path", "config_name"} <= options.keys():  # hydra's; those inside a package are not here
        own = str(Path(options["config_path"], f"{options['config_name'].removesuffix('.yaml')}.yaml"))
        found += [own] if os.path.isfile(directory / own) else []
    return found


def _file(dialect: Dialect, before: str, word: str, directory: Path) -> str:
    """Return the file of settings that a word names after the word `before`, or an empty text."""
    name, equals, value = word.partition("=")
    is_option = bool(equals) and name in dialect.config
    file = value if is_option else word
    if is_option or before in dialect.config:
        is_file = file.endswith(SUFFIXES) or file in dialect.presets or os.path.isfile(directory / file)
        return file if is_file else ""
    return word if word.endswith(SUFFIXES) and re.search(dialect.program, before) else ""


class Reading:
    """What a command says in a dialect, by what it is in a spec.

    `given`: the settings by name. `around`: variables, which count as settings if a table has their names.
    """

    def __init__(
        self, dialect: Dialect, given: Mapping[str, Any], around: Mapping[str, Any], trainer: str = ""
    ) -> None:
        self.dialect, self.given, self.around = dialect, given, around
        self.keys = dialect.keys_of(trainer)
        self.defaults = dialect.defaults
        self._dropped = set[str]()
        self._read = dict[str, list[str]]()
        for entry in (each for key in self.keys.values() for each in key.names):
            self._read.setdefault(name_of(entry), []).append(entry.partition("~")[2])

    def found(self, target: str) -> dict[str, Any]:
        """Return the values of a target's names that are set, unless their section is not enabled."""
        values = dict[str, Any]()
        for entry in self.keys[target].names if target in self.keys else ():
            name, (_start, tilde, pattern) = name_of(entry), entry.partition("~")
            value = self.given.get(name, self.around.get(name))
            switch = f"{name.rpartition('.')[0]}.enabled"
            if value is None or name.startswith(self.dialect.follows) or (
                switch != name and self.given.get(switch) is False
            ):  # fmt: skip
                continue
            value = bool(re.search(pattern, str(value))) if tilde else value
            values[name] = value in OFF if entry.startswith("!") else value
        return values

    def values(self, target: str) -> list[Any]:
        """Return the values of a target's names that are set, or else the program's own value."""
        return [*self.found(target).values()] or [self.defaults.get(target)]

    def value(self, target: str) -> Any:
        """Return the first value of a target in flagcore's words, or None if neither command nor program has one."""
        value, words = self.values(target)[0], self.keys[target].words if target in self.keys else {}
        if not words or value is None:
            return value
        theirs = {own: each[0] if isinstance(each, list) else each for own, each in words.items()}
        return next((own for own, each in theirs.items() if each == value), None)

    def is_on(self, target: str) -> bool:
        """Return whether any name of a target is on."""
        return any(value not in OFF for value in self.values(target))

    def number(self, target: str) -> int | None:
        """Return the first positive number of a target, or None. The first of several words counts."""
        firsts = (value[0] if isinstance(value, list) and value else value for value in self.values(target))
        texts = (str(each).replace("_", "").removesuffix(".0") for each in firsts)
        return next((int(text) for text in texts if text.isdecimal() and int(text)), None)

    def drop(self, *targets: str) -> None:
        """Name the keys of targets that this job's predictions do not include, although others do."""
        on = [name for target in targets for name, value in self.found(target).items() if value not in OFF]
        self._dropped |= {*on}

    def unread(self) -> Iterator[Named]:
        """Yield the keys that are set and not in the predictions: all that no table knows, and known ones that are
        neither read, nor off, nor harmless. Of a list that only patterns read, this holds for each element."""
        for name, value in self.given.items():
            if name.startswith("ENV."):
                continue
            if name not in self._read or name in self._dropped:
                yield from self._not_read(name, value)
            elif isinstance(value, list) and all(self._read[name]):
                left = (each for each in value if not re.search("|".join(self._read[name]), str(each)))
                for each in left:
                    yield from self._not_read(name, each, f"{name}: {each}")

    def _not_read(self, name: str, value: Any, key: str = "") -> Iterator[Named]:
        is_known = self.dialect.is_known(name)
        is_harmless = name not in self._dropped and self.dialect.is_harmless(name, value)
        if not (is_known and (is_harmless or self.is_idle(name))):
            yield Named(key=key or name, value=value, why=self.dialect.reason(name, value), is_known=is_known)

    def is_idle(self, name: str) -> bool:
        """Return whether a key that a table knows does nothing in this job."""
        return name in self.dialect.modelled - self._read.keys()
