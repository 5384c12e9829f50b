"""A hydra tree as plain data, composed by hydra itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagcore.importers.flagscale.compose_errors import Request, compose_error
from flagcore.spec.plain_data import MAX_DEPTH, plain, spec_error

_MUST_BE = re.compile(r"\$\{([\w.]+):\?\?\??\}")
"""FlagScale's notation for the value of another key that must be given."""
_RAISED = re.compile(r"^\w+ raised while resolving interpolation: ")
Unresolved = list[tuple[str, str]]


def compose(directory: Path, name: str, overrides: Sequence[str], *, file: str) -> tuple[dict[str, Any], Unresolved]:
    """Return the tree with its interpolations resolved, and the keys, with reasons, where that was not possible.

    Settings of hydra itself in the top file and the overrides are under `hydra`. Raises SpecError, also for an override
    of the action other than auto_tune.
    """
    try:
        from hydra import compose as composed
        from hydra import initialize_config_dir
    except ImportError as error:
        fix = 'pip install "flagcore[flagscale]"'
        raise spec_error("--config-path", f"needs hydra to be read ({error})", value=str(directory), fix=fix) from None
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not directory.is_dir():
        fix = "give the folder that has the tree's top file"
        raise spec_error("--config-path", "is not a directory", value=str(directory), fix=fix)
    if "/" in name:
        fix = "give the folder to --config-path"
        raise spec_error("--config-name", "contains a folder", value=name, fix=fix)
    name = name.removesuffix(".yaml")
    request = Request(directory=directory, name=name, overrides=overrides, file=file)
    try:
        with initialize_config_dir(str(directory.resolve()), version_base=None, job_name="flagcore"):
            composition = composed(name, overrides=_without_action(overrides, file))
        raw = OmegaConf.to_container(composition, resolve=False)
        own = OmegaConf.to_container(OmegaConf.load(directory / f"{name}.yaml"), resolve=False)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError) as error:
        raise compose_error(error, request) from None
    assert isinstance(raw, dict)
    if hydras := _of_hydra(own, overrides):
        raw["hydra"] = hydras
    unresolved: Unresolved = []
    tree = OmegaConf.create(_plain_references(raw))
    assert isinstance(tree, DictConfig)
    return plain(_resolved(tree, (), unresolved, file), file=file), unresolved


def _without_action(overrides: Sequence[str], file: str) -> list[str]:
    """Return the overrides but for the action, which must be auto_tune. Raises SpecError for another one."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser, others = OverridesParser.create(), []
    for each, found in zip(overrides, parser.parse_overrides(list(overrides)), strict=True):
        if found.key_or_group != "action" or found.is_delete():
            others.append(each)
        elif found.is_sweep_override() or found.value() != "auto_tune":
            fix, value = "use action=auto_tune, or leave it out", each.partition("=")[2]
            raise spec_error("action", "is not supported", value=value, fix=fix, file=file)
    return others


def _of_hydra(own: object, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of hydra itself: the section of that name in the top file, and overrides of it."""
    section = own.get("hydra") if isinstance(own, dict) else None
    found = dict(section) if isinstance(section, dict) else {}
    for each in overrides:
        key, _, value = each.lstrip("+~").partition("=")
        if key.startswith(("hydra.", "hydra/")):
            found[key[len("hydra.") :]] = value or "gone"
    return found


def _plain_references(value: Any) -> Any:
    """Write `${key:??}` as `${key}` everywhere."""
    if isinstance(value, dict):
        return {str(key): _plain_references(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain_references(each) for each in value]
    return _MUST_BE.sub(r"${\1}", value) if isinstance(value, str) else value


def _resolved(node: Any, path: tuple[str, ...], unresolved: Unresolved, file: str) -> Any:
    from omegaconf import DictConfig, ListConfig
    from omegaconf.errors import OmegaConfBaseException

    if len(path) > MAX_DEPTH:
        raise spec_error(path, "is nested too deep, or contains itself", fix="flatten it", file=file)
    if not isinstance(node, (DictConfig, ListConfig)):
        return node
    if node._is_none():
        return None
    keys = list(node) if isinstance(node, DictConfig) else list(range(len(node)))
    made: dict[Any, Any] = {}
    for key in keys:
        at = (*path, str(key))
        try:
            made[key] = _resolved(node[key], at, unresolved, file)
        except OmegaConfBaseException as error:
            message = _RAISED.sub("", str(error).splitlines()[0]).strip('"')
            unresolved.append((".".join(at), message))
    return made if isinstance(node, DictConfig) else list(made.values())
