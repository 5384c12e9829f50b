"""The contract of operator libraries, which are registered in the entry point group `flagcore.operators`.

An operator is what a user can choose an implementation for. Calls are recorded by the function that a program calls:
an operator of torch's dispatcher, such as `aten.mm.default`, or a function of torch that the library names.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any

from flagcore.errors import NoDevice
from flagcore.loading.entry_points import installed, instance_of, load_checked

LOG = logging.getLogger(__name__)
GROUP = "flagcore.operators"


class OperatorLibrary(ABC):
    """A library with several implementations of its operators.

    The methods up to `in_effect` run in flagcore, without torch; the others run in the job's processes and in the
    benchmark, which import what they need.

    `name`: the name of the entry point. `reference`: the implementation with which results are compared.
    `data`: the names of libraries in the `operators.yaml` of vendors that also apply to this one.
    `functions`: functions of torch's modules that are recorded as a whole, with their gradients. The dispatcher's
    operators that they call are not recorded.
    `group`: the entry points of its objects, for `flag doctor`.
    """

    group = GROUP
    name: str
    reference: str
    data: Sequence[str] = ()
    functions: Sequence[str] = ()

    @abstractmethod
    def serves(self, device_type: str, engine: str) -> bool:
        """Return whether jobs of an engine on devices of torch's type `device_type` can use the library."""

    @abstractmethod
    def environment(self, choice: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables that set a choice, the implementation by operator, in addition to what is in effect."""

    @abstractmethod
    def in_effect(self, environment: Mapping[str, str], vendor: str) -> Mapping[str, str]:
        """Return the implementation by operator that variables, and files that they name, select on a vendor's chips.

        The key `*` stands for all other operators. Raises UsageError if the variables exclude a choice.
        """

    def file(self, choice: Mapping[str, str]) -> str:
        """Return the choice as a file in the library's own format, or an empty string if it has none."""
        return ""

    @abstractmethod
    def operator(self, function: str, arguments: Sequence[Any]) -> str:
        """Return the operator of a call, or an empty string if the library has no choice for it."""

    @abstractmethod
    def implementations(self, operator: str) -> Sequence[str]:
        """Return the implementations of an operator here, the library's default first."""

    def reference_of(self, implementations: Sequence[str]) -> str:
        """Return the reference of an operator with these implementations."""
        return self.reference

    @abstractmethod
    def using(self, operator: str, implementation: str) -> AbstractContextManager[Any]:
        """Return a context in which calls of the operator run this implementation."""

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function of a recorded call: one of torch, or of its dispatcher such as `aten.mm.default`."""
        found: Any = import_module("torch")
        for part in name.removeprefix("torch.").split(".") if name.startswith("torch.") else ("ops", *name.split(".")):
            found = getattr(found, part)
        function: Callable[..., Any] = found
        return function

    def record(self, wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace functions by `wrap(NAME, FUNCTION)`, which records their calls under this name for `function`."""
        for name in self.functions:  # not by a mode of torch, which is off where recompute runs in the backward pass
            path, _, last = name.rpartition(".")
            module = import_module(path)
            setattr(module, last, wrap(name, getattr(module, last)))

    def apply(self, choice: Mapping[str, str]) -> None:
        """Apply a choice in this program, for a library whose `environment` returns `start.SET`."""
        raise NotImplementedError

    def others(self) -> Mapping[str, str]:
        """Return the implementations that this program ran instead of those of the applied choice, by operator."""
        return {}


def read_choice(text: str) -> dict[str, str]:
    """Return the choice in OPERATOR=IMPLEMENTATION,... Entries of another form are ignored."""
    pairs = (each.partition("=") for each in text.split(",") if "=" in each)
    return {operator.strip(): implementation.strip() for operator, _, implementation in pairs}


def libraries() -> list[OperatorLibrary]:
    """Return all installed libraries. Warns of those that cannot be loaded."""
    found = list[OperatorLibrary]()
    for _name, points in sorted(installed(GROUP).items()):
        try:
            found.append(_load(points))
        except NoDevice as error:
            LOG.warning("%s", error)
    return found


def find_library(name: str) -> OperatorLibrary:
    """Return the library `name`. Raises NoDevice if it is not installed, or cannot be loaded."""
    if points := installed(GROUP).get(name):
        return _load(points)
    raise NoDevice(f"the operator library {name} is not installed")


def _load(points: Sequence[EntryPoint]) -> OperatorLibrary:
    return load_checked("operator library", points, partial(instance_of, OperatorLibrary))  # type: ignore[type-abstract]
