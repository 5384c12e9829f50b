"""The arguments and variables of a job that change its time or memory, and that predictions do not include."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from flagcore_models.layers import other_mixers
from flagcore_training.knobs import joined
from flagcore_vendorkit.settings import UNCHANGED, read_settings

from flagcore.domain.engine import Unmodelled
from flagcore.domain.spec import Spec
from flagcore.spec.plain_data import package_yaml
from flagcore_megatron.program.arguments import FORK, known_releases, release_table
from flagcore_megatron.program.user_command import program_arguments, readable_command

SETTINGS = read_settings("flagcore_megatron")
"""The classes of all arguments and variables."""
TABLES: Mapping[str, Mapping[str, list[str]]] = package_yaml(__package__, "unmodelled.yaml")
Given = Mapping[str, tuple[str, Any]]
"""For each argument without its dashes and with hyphens: how the user writes it, and its value."""


def unmodelled(spec: Spec) -> list[Unmodelled]:
    """Return the arguments, settings and variables of a spec that predictions do not include."""
    train, command = spec.train, readable_command(spec)
    arguments, problems = release_table(None).parse([*program_arguments(spec), *train.flags])
    sizes = {"num-experts": spec.model.experts, "lengths": train.lengths is not None}
    sizes |= {"linear-attention-freq": len(other_mixers(spec.model))}
    given: dict[str, tuple[str, Any]] = {name: ("", size) for name, size in sizes.items()}
    given |= {_name(key): (f"train.settings.{key}", value) for key, value in train.settings.items()}
    given = {name: each for name, each in given.items() if not SETTINGS.unclassed([name])}  # others are modelled
    if command is not None or train.command is None:  # otherwise the arguments are those of another program
        given |= {_name(each.flag): (each.flag, each.value or True) for each in problems if each.flag.startswith("--")}
    given |= {_name(each.flag): (each.flag, " ".join(each.values) or True) for each in arguments}
    script = replace(spec, envs={**(command.environment if command else {}), **spec.envs})
    on = _turned_on(given)
    variables = (each for each in SETTINGS.of_environment(script) if not _is_idle(each.name, on))
    return [*not_predicted(given), *joined(variables)]


def not_predicted(given: Given) -> list[Unmodelled]:
    """Return the effects of arguments that predictions do not include. Those with the same effect are one."""
    on = _turned_on(given)
    in_use = ((name, *given[name]) for name in given if name in on and not _is_idle(name, on))
    effects = (SETTINGS.unmodelled(name, _text(value), shown) for name, shown, value in in_use)
    return joined(filter(None, effects))


def _turned_on(given: Given) -> set[str]:
    return {name for name, (_, value) in given.items() if is_on(name, value)}


def is_on(name: str, value: object) -> bool:
    """Return whether an argument has another value than Megatron's default, and is not off."""
    found = next((spec for each in _TABLES if (spec := each.find(f"--{name}"))), None)
    default = None if found is None or found.values == 0 else found.default
    return _text(value).lower() not in UNCHANGED and _text(value) != _text(default)


def knows(name: str) -> bool:
    """Return whether an argument is in a class, or one of a known release or of FlagScale's fork."""
    name = _name(name)
    return not SETTINGS.unclassed([name]) or any(table.find(f"--{name}") for table in _TABLES)


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


_TABLES = (release_table(None), release_table(f"{known_releases()[0]}+{FORK}"))


def _is_idle(name: str, on: Set[str]) -> bool:
    """Return whether an argument does nothing, as others are missing that it needs, or are `on` that replace it."""
    needed = (others.split() for others, names in TABLES["needs"].items() if _is_listed(name, names))
    replaced = (others.split() for others, names in TABLES["without"].items() if _is_listed(name, names))
    return any(on.isdisjoint(others) for others in needed) or not all(on.isdisjoint(others) for others in replaced)


def _is_listed(name: str, patterns: Iterable[str]) -> bool:
    return any(name.startswith(each[:-1]) if each.endswith("*") else name == each for each in patterns)


def _name(key: str) -> str:
    return key.lstrip("-").replace("_", "-")
