"""Classes of settings: which flags, environment variables and keys change the time or memory of a job.

The file `settings.yaml` of a package states the class of each setting of an engine, or of a vendor's software.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain

from flagcore.domain.engine import Unmodelled
from flagcore.domain.spec import Spec
from flagcore.vendorkit.fields import read_as

UNKNOWN_TIME = (0.8, 1.25)
"""The bounds of the time factor of a setting that is in no class. Chosen by hand."""
UNCHANGED = ("", "none", "false", "0", "no", "off", "auto", "default")
"""Values with which a setting usually changes nothing, in lower case."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """How a setting that predictions do not model changes the cost of a job.

    - `why`: what it changes, in which direction, and by how much if a source gives a size, as a phrase.
    - `time`: the bounds of the factor by which it may change step times.
    - `source`: where `why` comes from. Empty if it follows from the setting's description.
    - `unless`: the values that change nothing, in lower case.
    """

    why: str
    time: tuple[float, float] = (1.0, 1.0)
    source: str = ""
    unless: tuple[str, ...] = UNCHANGED

    def __post_init__(self) -> None:
        if not 0 < self.time[0] <= 1 <= self.time[1]:
            raise ValueError("`time` must be two factors around 1")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The content of a `settings.yaml`. Names are separated by spaces, and may end with `*`, for any ending.

    A dash and an underscore are the same in names. A name also stands for its keys after a dot.

    - `prefixes`: the starts of environment variables that are listed. Other variables have no class, and no effect.
    - `modelled`: settings that predictions include.
    - `harmless`: settings that change neither time nor memory.
    - `costs`: settings that change one of them, and that predictions do not include.
    """

    prefixes: str = ""
    modelled: str = ""
    harmless: str = ""
    costs: Mapping[str, Cost] = field(default_factory=dict)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all settings with a class, without those that end with `*`."""
        return frozenset(name for name in self._classes if not name.endswith("*"))

    @cached_property
    def _classes(self) -> Mapping[str, Cost | None]:
        known = dict.fromkeys((*self.modelled.split(), *self.harmless.split()))
        return {**known, **self.costs}

    @cached_property
    def _by_key(self) -> Mapping[str, Cost | None]:
        return {_key(name): cost for name, cost in self._classes.items()}

    def unclassed(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are in no class."""
        return [name for name in names if self._find(name) is None]

    def unmodelled(self, name: str, value: object = True, shown: str = "") -> Unmodelled | None:
        """Return the effect of a setting that predictions do not include, or None.

        `shown`: the name for users, by default `name`. A setting that is in no class has an unknown effect.
        """
        if value is False and self.costs.get(f"no-{name}"):
            name, value = f"no-{name}", True
        key = self._find(name)
        if key is None:
            return Unmodelled(name=shown or name, why="its effect is not known to flagcore", time=UNKNOWN_TIME)
        cost = self._by_key[key]
        if cost is None or ("" if value is None else str(value).lower()) in cost.unless:
            return None
        return Unmodelled(
            name=shown or name, why=f"{cost.why} ({cost.source})" if cost.source else cost.why, time=cost.time
        )

    def of_environment(self, spec: Spec) -> Iterator[Unmodelled]:
        """Yield the effects of environment variables in a spec that predictions do not include."""
        prefixes = tuple(self.prefixes.split())
        for name, value in chain.from_iterable(each.items() for each in spec.variables):
            is_listed = name in self.names or name.startswith(prefixes)
            if is_listed and (found := self.unmodelled(name, value)):
                yield found

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


@cache
def read_settings(package: str, file: str = "settings.yaml") -> Settings:
    """Return the classes in a file of a package, or none without the file. Raises SpecError."""
    return read_as(Settings, package, file)
