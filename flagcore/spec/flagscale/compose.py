"""A hydra tree, composed by hydra itself, as plain data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagcore.spec.plain import MAX_DEPTH, plain, spec_error

_ACTION = re.compile(r"\+{0,2}action=(.*)")
_MUST_BE = re.compile(r"\$\{([\w.]+):\?\?\??\}")
"""FlagScale's files mark a value that somebody must give so; it is that of the key."""
Unresolved = list[tuple[str, str]]


def compose(directory: Path, name: str, overrides: Sequence[str], *, file: str) -> tuple[dict[str, Any], Unresolved]:
    """Return the tree with its interpolations resolved, and the keys, with reasons, where that was not possible.

    `action=auto_tune` among the overrides is what happens anyway. Raises SpecError, also for another action there.
    """
    from hydra import compose as composed
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    kept = [each for each in overrides if not _ACTION.fullmatch(each)]
    for action in (found[1] for each in overrides if (found := _ACTION.fullmatch(each))):
        if action != "auto_tune":
            fix = "use action=auto_tune, or leave it out"
            raise spec_error("action", "is nothing that flagcore does", value=action, fix=fix, file=file)
    if not directory.is_dir():
        fix = "give the folder that has the tree's top file"
        raise spec_error("--config-path", "is no directory", value=str(directory), fix=fix)
    try:
        with initialize_config_dir(str(directory.resolve()), version_base=None, job_name="flagcore"):
            composition = composed(name.removesuffix(".yaml"), overrides=kept)
        raw = OmegaConf.to_container(composition, resolve=False)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        problem, fix = f"cannot be composed by hydra: {error}", "mend the tree, its name or the overrides"
        raise spec_error("the tree", problem, fix=fix, file=file) from None
    unresolved: Unresolved = []
    tree = OmegaConf.create(_named(raw))
    assert isinstance(tree, DictConfig)
    return plain(_resolved(tree, (), unresolved, file), file=file), unresolved


def _named(value: Any) -> Any:
    """Write `${key:??}` as `${key}` everywhere."""
    if isinstance(value, dict):
        return {str(key): _named(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_named(each) for each in value]
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
            unresolved.append((".".join(at), str(error).splitlines()[0]))
    return made if isinstance(node, DictConfig) else list(made.values())
