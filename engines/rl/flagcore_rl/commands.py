"""Commands of the frameworks: what they set, as a spec, and the same commands with other settings.

`commands.yaml` has the keys. Nothing of the user's is written: settings of a file are overridden by words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from flagcore_training.commands import flat

from flagcore.errors import LaunchError, SpecError
from flagcore.spec.plain_data import package_yaml, parse_yaml, read_text

Settings = dict[str, Any]
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_ARITHMETIC: Mapping[str, Any] = {"mul": lambda a, b: a * b, "div": lambda a, b: a // b, "add": lambda a, b: a + b}
"""Resolvers that NeMo-RL registers (7ea279ab `nemo_rl/utils/config.py`)."""
_LAUNCHERS = ("launch", "torchrun", "torch.distributed.run", "trl")


@dataclass(frozen=True, slots=True)
class Row:
    """How commands set one thing; see `commands.yaml`."""

    keys: tuple[str, ...]
    words: Mapping[str, Any] = field(default_factory=dict)
    per_rank: bool = False
    before_program: bool = False


def _row(data: Any) -> Row:
    data = data if isinstance(data, Mapping) else {"keys": data}
    keys = data["keys"]
    return Row(**{**data, "keys": (keys,) if isinstance(keys, str) else tuple(keys)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A framework's row of `commands.yaml`."""

    starts: str
    style: str
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any]
    trial: Mapping[str, Any]
    step: str
    parts: Mapping[str, str]
    harmless: str
    bare: bool = False
    asynchronous: str = ""
    variants: str = ""
    nested: bool = False
    presets: Mapping[str, Settings] = field(default_factory=dict)
    config: Sequence[str] = ()
    launcher: Sequence[str] = ()
    usual_config: str = ""
    trainer: str = ""
    rollout: str = ""
    stands_for: str = ""
    packs: bool = True
    per_update: bool = False

    def rows(self, trainer: str) -> dict[str, Row]:
        """Return the row of each setting of jobs with a trainer."""
        own = self.settings.get(f"trainer.{trainer}", {})
        general = {name: row for name, row in self.settings.items() if not name.startswith("trainer.")}
        return {name: _row(row) for name, row in {**general, **own}.items()}

    def key(self, name: str) -> str:
        """Return a key as it is written in `commands.yaml`, but without the mark of a new one."""
        return name.lstrip("+") if self.style == "hydra" else name.lstrip("-!").replace("-", "_")


@cache
def dialect_of(name: str) -> Dialect:
    """Return how commands of a framework are written."""
    return Dialect(**package_yaml(__package__, "commands.yaml")[name])


@dataclass(frozen=True, slots=True)
class Given:
    """A user's command. `places`: the words of each setting, from its first to the one after its last."""

    dialect: Dialect
    words: tuple[str, ...]
    directory: Path

    def places(self) -> Iterator[tuple[str, Any, int, int]]:
        """Yield the key, the value, and the positions of the words of each setting."""
        if self.dialect.style == "hydra":
            for place, word in enumerate(self.words):
                if (match := _OVERRIDE.fullmatch(word)) and "." in match[2]:
                    yield match[2], _scalar(match[3]), place, place + 1
            return
        place = 0
        while place < len(self.words):
            name, equals, value = self.words[place].partition("=")
            end = place + 1
            if re.match(r"--[A-Za-z]", name):
                while not equals and end < len(self.words) and not re.match(r"--?[A-Za-z]|--$", self.words[end]):
                    end += 1
                found = [_scalar(each) for each in ([value] if equals else self.words[place + 1 : end])]
                yield self.dialect.key(name), (found[0] if len(found) == 1 else found or True), place, end
            place = end

    def settings(self) -> Settings:
        """Return the settings of the files that the command names, and of its words. Raises SpecError."""
        own = {key: value for key, value, _start, _end in self.places()}
        files = [path for option in (*self.dialect.launcher, *self.dialect.config) if (path := self._value_of(option))]
        if usual := next((each for each in self.words if each.endswith(".py")), None):
            near = Path(usual).parent / "configs" / self.dialect.usual_config
            files = files or ([str(near)] if self.dialect.usual_config and (self.directory / near).is_file() else [])
        folder, name = self._value_of("--config-path"), self._value_of("--config-name")
        if folder and name:  # hydra's; those inside a package are not here
            own_file = Path(folder, f"{name.removesuffix('.yaml')}.yaml")
            files += [str(own_file)] if (self.directory / own_file).is_file() else []
        content: Settings = {}
        for file in files:
            if file in self.dialect.presets:
                content |= self.dialect.presets[file]
                continue
            content |= {self.dialect.key(key): value for key, value in flat(_chain(self.directory / file))}
        content |= own
        return {key: _resolved(value, content) for key, value in content.items()}

    def _value_of(self, option: str) -> str:
        for place, word in enumerate(self.words):
            name, equals, value = word.partition("=")
            if name == option:
                return value if equals else next(iter(self.words[place + 1 :]), "")
        return ""

    def changed(self, settings: Mapping[str, Any], before: Mapping[str, Any] = {}) -> tuple[str, ...]:
        """Return the command with other values of keys; None removes one. `before`: keys of the launcher.

        Raises LaunchError if keys of a launcher are new, and the command has none.
        """
        words, left = list(self.words), {self.dialect.key(key): (key, value) for key, value in settings.items()}
        left |= {self.dialect.key(key): (key, value) for key, value in before.items()}
        for key, _value, start, end in reversed([*self.places()]):
            if key in left:
                words[start:end] = self._written(words[start], left[key][1])
        present = {key for key, *_ in self.places()}
        for key, (name, value) in left.items():
            if key in present or value is None:
                continue
            if name not in before:
                words += self._written(name, value)
            elif place := next((n + 1 for n, each in enumerate(words) if Path(each).name in _LAUNCHERS), 0):
                words[place:place] = self._written(name, value)
            elif value != 1:
                raise LaunchError(f"--{name} {value} needs a launcher: start the command with accelerate launch")
        return tuple(words)

    def _written(self, word: str, value: Any) -> list[str]:
        """Return the words of a setting. `word`: the word that had its key, or the key."""
        if value is None or (self.dialect.bare and value is False):
            return []
        text = value if isinstance(value, str) else str(value)
        if self.dialect.style == "hydra":
            name = word.partition("=")[0]
            return [f"{name}={text}"]
        name = word.partition("=")[0] if word.startswith("--") else f"--{self._spelled(word)}"
        if self.dialect.bare and value is True:
            return [name]
        return [f"{name}={text}"] if "=" in word else [name, text.lower() if isinstance(value, bool) else text]

    def _spelled(self, key: str) -> str:
        hyphens = any(re.match(r"--\w+-\w", word) for word in self.words)
        return key.replace("_", "-") if hyphens else key


def _scalar(text: str) -> Any:
    with suppress(yaml.YAMLError):
        found = yaml.safe_load(text)
        return text if isinstance(found, (str, dict)) else found
    return text


def _chain(path: Path, depth: int = 0) -> Settings:
    """Return the content of a YAML file over that of the files in its `defaults`. Raises SpecError."""
    content = parse_yaml(read_text(path, file=str(path), key="command"), file=str(path))
    if not isinstance(content, dict):
        raise SpecError(key="command", value=str(path), problem="is not a mapping", fix="give a configuration")
    bases = content.pop("defaults", None) or []
    result: Settings = {}
    for base in [bases] if isinstance(bases, str) else bases:
        file = path.parent / f"{str(base).removesuffix('.yaml')}.yaml"
        if isinstance(base, str) and file.is_file() and depth < 16:  # hydra's other defaults belong to a package
            result = _merged(result, _chain(file, depth + 1))
    return _merged(result, content)


def _merged(base: Settings, over: Settings) -> Settings:
    both = {key: _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
            for key, value in over.items()}  # fmt: skip
    return {**base, **both}


def _resolved(value: Any, content: Mapping[str, Any]) -> Any:
    """Return a value with OmegaConf's references and NeMo-RL's arithmetic replaced. Unknown ones stay."""
    for _time in range(32):
        match = _REFERENCE.search(value) if isinstance(value, str) else None
        found = _referred(match[1], content) if match else None
        if match is None or found is None:
            break
        value = f"{value[: match.start()]}{found}{value[match.end() :]}"
    return _scalar(value) if isinstance(value, str) else value


def _referred(text: str, content: Mapping[str, Any]) -> Any:
    name, colon, rest = text.partition(":")
    words = [each.strip() for each in rest.split(",")]
    if colon and name in _ARITHMETIC:
        numbers = [_scalar(each) for each in words]
        return _ARITHMETIC[name](*numbers) if [type(each) for each in numbers] == [int, int] else None
    if colon and name in ("oc.env", "oc.select"):
        return content.get(words[0], words[1] if len(words) > 1 else None)
    return content.get(text)
