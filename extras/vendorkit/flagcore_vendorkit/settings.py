"""Classes of settings: which flags, environment variables and keys change the time or memory of a job.

The file `settings.yaml` of a package states the class of each setting of an engine, or of a vendor's software.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain

from flagcore.domain.engine import UNKNOWN, Unmodelled
from flagcore.domain.spec import Spec, Task
from flagcore.i18n import Message, closest
from flagcore_vendorkit.fields import read_as

UNKNOWN_TIME = (0.8, 1.25)
"""The bounds of the time factor of a setting that is in no class. Chosen by hand."""
UNCHANGED = ("", "none", "false", "0", "no", "off", "auto", "default", "[]")
"""Values with which a setting usually changes nothing, in lower case."""
OTHER = "another value"
"""Stands for a value that is not the one that predictions assume."""
SWITCHES = {**dict.fromkeys(("true", "yes", "on"), "1"), **dict.fromkeys(("false", "no", "off"), "0")}
"""Other words for 1 and 0, in lower case."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """How a setting that predictions do not model changes the cost of a job.

    - `why`: what it changes, in which direction, and by how much if a source gives a size, as a phrase.
    - `time`: the bounds of the factor by which it may change step times.
    - `source`: where `why` comes from. Empty if it follows from the setting's description.
    - `unless`: the values that change nothing.
    - `several_nodes`: whether it changes nothing on one node.
    """

    why: str
    time: tuple[float, float] = (1.0, 1.0)
    source: str = ""
    unless: tuple[str, ...] = UNCHANGED
    several_nodes: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.time[0] <= 1 <= self.time[1]:
            raise ValueError("`time` must be two factors around 1")

    def applies(self, value: object, nodes: int) -> bool:
        """Return whether the setting changes the cost of a job on `nodes` nodes if it has this value."""
        is_off = value is None or value is False or _value(value) in map(_value, self.unless)
        return not is_off and not (self.several_nodes and nodes == 1)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The content of a `settings.yaml`. Names are separated by spaces, and may end with `*`, for any ending.

    A dash and an underscore are the same in names. A name also stands for its keys after a dot. In `costs`,
    `NAME=VALUE` gives the default of a name: VALUE changes nothing, and off does. `NAME.VALUE` is the effect of VALUE.

    - `prefixes`: the starts of environment variables that are listed. Other variables have no class, and no effect.
    - `modelled`: settings that predictions include.
    - `harmless`: settings that change neither time nor memory.
    - `costs`: settings that change one of them, and that predictions do not include. A key may have several names.
    """

    prefixes: str = ""
    modelled: str = ""
    harmless: str = ""
    costs: Mapping[str, Cost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        costs = [(each.partition("="), cost) for names, cost in self.costs.items() for each in names.split()]
        object.__setattr__(self, "costs", {name: _unless(default, cost) for (name, _, default), cost in costs})

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all settings with a class, without those that end with `*`."""
        return frozenset(name for name in self._classes if not name.endswith("*"))

    @cached_property
    def _classes(self) -> Mapping[str, Cost | None]:
        return {**dict.fromkeys((*self.modelled.split(), *self.harmless.split())), **self.costs}

    @cached_property
    def _by_key(self) -> Mapping[str, Cost | None]:
        return {_key(name): cost for name, cost in self._classes.items()}

    def unclassed(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are in no class."""
        return [name for name in names if not (self._find(name) or self._find(name.removeprefix("no-")))]

    def is_listed(self, name: str) -> bool:
        """Return whether a setting itself is in a class, or its section has an effect."""
        found = self._find(name) or self._find(name.removeprefix("no-"))
        names = (_key(name), _key(name.removeprefix("no-")))
        return found is not None and (found in names or found.endswith("*") or self._by_key[found] is not None)

    def unmodelled(self, name: str, value: object = True, shown: str = "", *, nodes: int = 2) -> Unmodelled | None:
        """Return the effect of a setting that predictions do not include, or None.

        `shown`: the name for users, by default `name`. `nodes`: the number of nodes of the job. A setting that is in no
        class has an unknown effect. A name that starts with `no-` and has no class turns the rest of the name off.
        """
        if value is False and self._by_key.get(_key(f"no-{name}")):
            name, value = f"no-{name}", True
        of_value = _key(f"{name}.{value}".lower())
        key = of_value if of_value in self._by_key else self._find(name)
        if key is None and name.startswith("no-"):
            return self.unmodelled(name.removeprefix("no-"), False, shown or name)
        if key is None:
            return self.unknown(name, shown or name)
        cost = self._by_key[key]
        if cost is None or not cost.applies(value, nodes):
            return None
        why = Message(cost.why)
        if cost.source:
            why = Message("{why} ({source})", why=why, source=cost.source)
        return Unmodelled(name=shown or name, why=why, time=cost.time)

    def unknown(self, name: str, shown: str) -> Unmodelled:
        """Return the effect of a setting that is in no class, with the most similar one that is in a class."""
        close = closest(name, self.names, 0.8)
        why = Message("{why}; did you mean {name}?", why=UNKNOWN, name=close) if close else UNKNOWN
        return Unmodelled(name=shown, why=why, time=UNKNOWN_TIME)

    def of_environment(self, spec: Spec, usual: Mapping[str, str] | None = None) -> Iterator[Unmodelled]:
        """Yield the effects of environment variables in a spec that predictions do not include.

        `usual`: the values that predictions assume. Others have an effect, even if they are the default elsewhere.
        """
        variables = chain.from_iterable(each.items() for each in spec.variables)
        return self.of_variables(variables, nodes=spec.cluster.nodes, usual=usual)

    def of_variables(
        self, variables: Iterable[tuple[str, str]], *, nodes: int = 2, usual: Mapping[str, str] | None = None
    ) -> Iterator[Unmodelled]:
        """Yield the effects of environment variables, given with their values, that predictions do not include."""
        prefixes, usual = tuple(self.prefixes.split()), usual or {}
        for name, value in variables:
            is_listed = name in self.names or name.startswith(prefixes)
            value = value if usual.get(name, value) == value else OTHER
            if is_listed and (found := self.unmodelled(name, value, nodes=nodes)):
                yield found

    def harmless_in(self, spec: Spec, usual: Mapping[str, str]) -> tuple[str, ...]:
        """Return the environment variables of a spec that are in a class and change nothing, or that are as `usual`."""
        variables = {item for each in spec.variables for item in each.items()}
        named = {each.name for each in self.of_environment(spec, usual)}
        return tuple(
            name for name, value in variables if usual.get(name) == value or (name not in named and self._find(name))
        )

    def _find(self, name: str) -> str | None:
        """Return the key of a setting's class, or None."""
        key = _key(name)
        while key:
            if key in self._by_key:
                return key
            if pattern := next((each for each in self._patterns if key.startswith(each[:-1])), ""):
                return pattern
            key = key.rpartition(".")[0]
        return None

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(sorted((key for key in self._by_key if key.endswith("*")), key=len, reverse=True))


def _key(name: str) -> str:
    return name.replace("-", "_")


def _unless(default: str, cost: Cost) -> Cost:
    """Return `cost` with a default that replaces the words for off, or as it is without one."""
    others = (each for each in cost.unless if _value(each) != "0.0")
    return replace(cost, unless=(*others, default)) if default else cost


def _value(value: object) -> str:
    """Return the text by which values are compared: numbers are equal in all forms, and words for a switch as well."""
    word = str(value).lower()
    try:
        return str(float(SWITCHES.get(word, word)))
    except ValueError:
        return word


@cache
def read_settings(package: str, file: str = "settings.yaml") -> Settings:
    """Return the classes in a file of a package, or none without a file. Raises SpecError."""
    return read_as(Settings, package, file)


def unmodelled_on_all_engines(task: Task) -> Iterator[Unmodelled]:
    """Yield the settings of a task that change its cost on all engines and that predictions do not include.

    These are keys of the model's config.json, and environment variables of torch and of other common software.
    """
    model, trains = task.spec.model, task.spec.work.has_steps
    for name, value in model.unread:
        classes = read_settings(__package__, "config_keys.yaml")
        found = classes.unmodelled(name.removeprefix("text_config."), value, f"model.{name}")
        of_training = name.endswith(("dropout", "pdrop")) or (model.vision and name == "vision_config")
        if found and (trains or not of_training):
            yield found
    if any(task.spec.variables):
        yield from read_settings(__package__).of_environment(task.spec)
