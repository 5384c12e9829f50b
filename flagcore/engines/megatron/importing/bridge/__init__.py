"""Imports recipes of Megatron-Bridge as specs, with a note on each key that is dropped or changed.

Megatron-Bridge is github.com/NVIDIA-NeMo/Megatron-Bridge; the format is that of `ConfigContainer.to_yaml` and of the
`run_config.yaml` in its checkpoints, as of commit 067f987d (2026-08-22) and release 0.3.1.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flagcore.contracts import Importer, ImportNote
from flagcore.domain.chip import Chip
from flagcore.engines.megatron.importing.bridge.translation import translate
from flagcore.errors import SpecError, UsageError, join_errors
from flagcore.i18n import _
from flagcore.spec.data_file import parse_yaml, read_text
from flagcore.spec.importing import commented_yaml
from flagcore.spec.plain_data import plain, spec_error

SECTIONS = {"model": "model", "train.seq_length": "dataset", "train": "train", "auto_tuner.baseline": "model"}
"""Sections of a config by those of a spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRecipe:
    """The data of a spec, and notes on the keys of a config that are dropped or changed."""

    data: dict[str, Any]
    notes: tuple[ImportNote, ...]
    file: str

    def translate_error(self, error: SpecError) -> SpecError:
        return join_errors([self._with_own_key(each) for each in error.problems])

    def as_yaml(self) -> str:
        return commented_yaml(self.data, self.notes)

    def _with_own_key(self, error: SpecError) -> SpecError:
        for prefix, section in SECTIONS.items():
            if error.key == prefix or error.key.startswith(f"{prefix}."):
                key = f"{section}.{error.key.rpartition('.')[2]}" if "." in error.key else section
                return spec_error(key, error.problem, value=error.value, fix=error.fix, file=self.file)
        return error


class Bridge:
    """Imports configs of Megatron-Bridge."""

    name, title, has_trees = "bridge", "Megatron-Bridge", False

    def read_tree(
        self, directory: Path, name: str, overrides: Sequence[str] = (), chips: Callable[[], Sequence[Chip]] = tuple
    ) -> ImportedRecipe:
        """Return the config in the file or checkpoint `name`, or else that of the recipe `name` of the installed
        package, with `overrides` such as `train.global_batch_size=512`. Raises SpecError, UsageError.
        """
        config, file, added = read_recipe(directory / name, name, overrides)
        data, notes = translate(config, file, name, chips, added)
        return ImportedRecipe(data=data, notes=notes, file=file)


IMPORTER: Importer = Bridge()


RUN_CONFIG = "run_config.yaml"
PROGRAM = """
import sys
from megatron.bridge import recipes
getattr(recipes, sys.argv[1])().to_yaml(sys.argv[2])
"""
"""Writes the config of a recipe to a file. It runs as a process, because the package imports torch."""
TIMEOUT_SECONDS = 600.0
_TARGETS = ("_target_", "_call_", "_args_", "_name_")


def _items(loader: yaml.SafeLoader, node: yaml.MappingNode) -> list[Any]:
    return list(loader.construct_mapping(node))


class _Loader(yaml.SafeLoader):
    """Reads sets as lists."""


_Loader.add_constructor("tag:yaml.org,2002:set", _items)
_NAME = re.compile(r"[A-Za-z_]\w*")


def read_recipe(path: Path, name: str, overrides: Sequence[str]) -> tuple[dict[str, Any], str, list[str]]:
    """Return the config at `path`, or else of the recipe `name`, as plain values, its file for messages, and the keys
    of overrides `a.b=c` that the config does not have.

    A directory is a checkpoint, or contains the checkpoints of iterations. An override is `a.b=c`, or a YAML file of
    changes. Raises SpecError, UsageError.
    """
    if path.is_dir():
        found = [path / RUN_CONFIG, *sorted(path.glob(f"iter_*/{RUN_CONFIG}"), reverse=True)]
        path = next((each for each in found if each.is_file()), found[0])
    if path.is_file() or path.suffix in (".yaml", ".yml") or not _NAME.fullmatch(name):
        config, file = _read(path, str(path)), str(path)
    else:
        config, file = _config_of_recipe(name), name
    config, added = _sections(config), list[str]()
    for override in overrides:
        if "=" not in override and override.endswith((".yaml", ".yml")):
            _merge(config, _sections(_read(Path(override), override)))
        elif _override(config, override, file) and not override.startswith(("+", "~")):
            added.append(override.partition("=")[0])
    return config, file, added


def _config_of_recipe(name: str) -> dict[str, Any]:
    """Return the config that the function `name` of the installed package creates. Raises UsageError, SpecError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        command = [sys.executable, "-c", PROGRAM, name, str(file)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise UsageError(_("the recipe {name} did not return within {n} s", name=name, n=TIMEOUT_SECONDS)) from None
        if file.is_file():
            return _read(file, name)
    reason = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
    fix = _("give a file that `ConfigContainer.to_yaml` or a checkpoint has, or install megatron-bridge")
    raise UsageError(
        _("{name} is no file, and no recipe that runs here ({reason}); {fix}", name=name, reason=reason, fix=fix)
    )


def _read(path: Path, file: str) -> dict[str, Any]:
    """Return the mapping in a file of YAML 1.1, as PyYAML writes it, also with sets. Raises SpecError."""
    text = read_text(path, file=file, key="file")
    try:
        data = plain(yaml.load(text, _Loader), file=file)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise spec_error("the document", _("cannot be read as YAML: {why}", why=why), file=file) from None
    if not isinstance(data, dict):
        raise spec_error((), _("must be a mapping of keys and values"), value=data, file=file)
    return data


def _sections(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(each) for key, each in config.items() if key not in _TARGETS}


def _plain(value: Any) -> Any:
    """Return a value with the names of enums, types and functions in place of their targets."""
    if isinstance(value, Mapping):
        name = value.get("_name_") or (value.get("_target_") if value.get("_call_") is False else None)
        if isinstance(name, str):
            return name.rpartition(".")[2]
        if isinstance(arguments := value.get("_args_"), list):
            return _plain(arguments[-1]) if arguments else None
        return _sections(value)
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _merge(config: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), dict):
            _merge(config[key], value)
        else:
            config[key] = value


def _override(config: dict[str, Any], override: str, file: str) -> bool:
    """Set a value as the command line of Megatron-Bridge does: a.b=c, +a.b=c, ++a.b=c or ~a.b. Return whether the key
    is new. Raises SpecError.
    """
    key, equals, text = override.partition("=")
    removes, key = key.startswith("~"), key.lstrip("+~")
    *parents, name = key.split(".")
    if not name or not (equals or removes):
        raise spec_error(override, _("is not an override"), fix=_("use a.b=c, or a YAML file"), file=file)
    section = config
    for parent in parents:
        if not isinstance(section.setdefault(parent, {}), dict):
            section[parent] = {}
        section = section[parent]
    is_new = name not in section
    section.pop(name, None)
    if not removes:
        section[name] = plain(parse_yaml(text, file=file), file=file)
    return is_new
