"""Libraries of FlagOS whose manager selects an implementation of each operator when it is called: TransformerEngine-FL.

vllm-plugin-FL has the same manager. An implementation is of the kind `flagos` (FlagGems), `vendor:NAME` or `reference`
(torch), and a policy has an order of them for each operator. The first one that is available runs; if it fails, the
next one.

Facts: flagos-ai/TransformerEngine-FL, in transformer_engine/plugin/core manager.py, policy.py, discovery.py,
registry.py and types.py @fd5f657a, ops.py @08ef78fa; flagos-ai/vllm-plugin-FL, in vllm_fl/dispatch manager.py
@14ba742e, __init__.py @1e774398 and builtin_ops.py @4bf23a2c.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flagcore_operators.contract import OperatorLibrary
from flagcore_operators.start import SET

Function = Callable[..., Any]
FLAGOS, REFERENCE = "flagos", "reference"


class Dispatcher(OperatorLibrary):
    """TransformerEngine-FL, and the base of libraries with the same manager.

    A choice is an order such as `vendor:metax|reference`, so that calls that the chosen implementation refuses, such as
    those with another format than the recorded ones, still run. `package`: that of the modules `manager` and `policy`.
    `variable`: the one with orders, `OPERATOR=ORDER;...`; it has precedence over those with a kind for all operators.
    """

    name, reference, data = "te_fl", REFERENCE, ["te_fl"]
    package, variable = "transformer_engine.plugin.core", "TE_FL_PER_OP"

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}
        self._wrap: Callable[[str, Function], Function] | None = None
        self._applied: Mapping[str, str] = {}
        self._ran: dict[str, str] = {}

    def serves(self, device_type: str, engine: str) -> bool:
        top, _, path = self.package.partition(".")
        spec = find_spec(top)  # not that of the package, which imports torch
        folders = spec.submodule_search_locations or [] if spec else []
        is_there = any(Path(each, *path.split(".")).is_dir() for each in folders)
        return is_there and device_type != "cpu" and engine != "vllm"

    def environment(self, choice: Mapping[str, str]) -> Mapping[str, str]:
        pairs = [f"{name}={order}" for name, order in sorted(choice.items())]
        return {self.variable: ";".join(pairs), SET: f"{self.name}:{','.join(pairs)}"}

    def in_effect(self, environment: Mapping[str, str], vendor: str) -> Mapping[str, str]:
        return read_orders(environment.get(self.variable, ""))

    def operator(self, function: str, arguments: Sequence[Any]) -> str:
        library, _, name = function.rpartition(".")
        return name if library == self.name and len(self._orders(name)) > 1 else ""

    def implementations(self, operator: str) -> Sequence[str]:
        return self._orders(operator)

    def _orders(self, operator: str) -> Sequence[str]:
        if operator not in self._known:
            manager, policy = self._module("manager").get_default_manager(), self._module("policy").get_policy()
            default = manager.get_selected_impl_id(operator)
            usable = [
                each
                for each in manager.registry.get_implementations(operator)
                if each.is_available() and (not each.vendor or policy.is_vendor_allowed(each.vendor))
            ]
            usable.sort(key=lambda each: (each.impl_id != default, -each.priority))
            self._known[operator] = list(dict.fromkeys(order(token(each)) for each in usable))
        return self._known[operator]

    def using(self, operator: str, implementation: str) -> AbstractContextManager[Any]:
        policy, first = self._module("policy"), implementation.partition("|")[0]
        only = replace(policy.get_policy(), per_op_order=((operator, (first,)),), strict=True)
        return policy.policy_context(only)  # type: ignore[no-any-return]

    def function(self, name: str) -> Function:
        """Return the function of an operator. Each process has its own scratch memory, whose content is no result."""
        manager, scratch = self._module("manager").get_default_manager(), dict[int, Any]()

        def called(*arguments: Any, **named: Any) -> Any:
            arguments, named = (_with_scratch(each, scratch) for each in (arguments, named))
            return manager.call(name.rpartition(".")[2], *arguments, **named)

        return called

    def record(self, wrap: Callable[[str, Function], Function]) -> None:
        self._wrap = wrap

    def apply(self, choice: Mapping[str, str]) -> None:
        self._applied = choice

    def others(self) -> Mapping[str, str]:
        return self._ran

    def register(self, registry: Any) -> None:
        """Wrap all implementations, when the manager of a job collects them from entry points."""
        if self._wrap or self._applied:
            for name in registry.list_operators():
                for each in registry.get_implementations(name):
                    self._wrap_function(each)
            add = registry.register_impl
            registry.register_impl = lambda each: add(self._wrap_function(each))  # of entry points that follow

    def _wrap_function(self, implementation: Any) -> Any:
        function = implementation.fn
        if self._wrap:
            function = self._wrap(f"{self.name}.{implementation.op_name}", function)
        if implementation.op_name in self._applied:
            function = self._reported(implementation, function)
        object.__setattr__(implementation, "fn", function)  # its class is frozen
        return implementation

    def _reported(self, implementation: Any, function: Function) -> Function:
        """Return a function that reports its first call if it is not the choice: another one failed, or is not set.

        The line has the form of Megatron's arguments, so that a trial of a user's command reads it too.
        """
        name, own = implementation.op_name, token(implementation)
        if self._applied[name].partition("|")[0] in (own, own.partition(":")[0]):
            return function

        @wraps(function)
        def reported(*arguments: Any, **named: Any) -> Any:
            if self._ran.get(name) != own:
                self._ran[name] = own
                print(f"  {self.name}_operators {'.' * 20} {name}={own}", file=sys.stderr, flush=True)
            return function(*arguments, **named)

        return reported

    def _module(self, name: str) -> Any:
        return import_module(f"{self.package}.{name}")


def token(implementation: Any) -> str:
    """Return the word of orders for an implementation of a manager."""
    kind = str(implementation.kind.value)
    return f"{kind}:{implementation.vendor}" if implementation.vendor else kind


def order(first: str) -> str:
    """Return an order in which an implementation is the first one, and the reference runs if it fails."""
    return first if first == REFERENCE else f"{first}|{REFERENCE}"


def read_orders(text: str) -> dict[str, str]:
    """Return the orders in `OPERATOR=ORDER;...`. Entries of another form are ignored, as the managers do."""
    pairs = (each.partition("=") for each in text.split(";") if "=" in each)
    return {name.strip(): found for name, _, value in pairs if name.strip() and (found := as_order(value))}


def as_order(value: Any) -> str:
    """Return an order, which files may contain as a list."""
    words = value if isinstance(value, list) else str(value).split("|")
    return "|".join(str(each).strip() for each in words if each and str(each).strip())


def _with_scratch(value: Any, scratch: dict[int, Any]) -> Any:
    """Return arguments with other memory for tensors of bytes, which are workspaces."""
    if isinstance(value, dict):
        return {name: _with_scratch(each, scratch) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_scratch(each, scratch) for each in value)
    if str(getattr(value, "dtype", "")) != "torch.uint8":
        return value
    return scratch.setdefault(id(value), value.clone())


TE_FL = Dispatcher()
