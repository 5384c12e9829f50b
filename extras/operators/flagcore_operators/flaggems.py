"""FlagGems in training programs, and in vLLM by vllm-plugin-FL.

Facts: flagos-ai/FlagGems src/flag_gems/__init__.py, config.py and runtime/op_registrar.py @ed2508bc; flagos-ai/
vllm-plugin-FL vllm_fl/utils.py @075f1e0e, and in vllm_fl/dispatch policy.py @20440a9b, config/utils.py
@05ad7f7d and README.md @07dba3b4.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from flagcore.errors import UsageError
from flagcore.i18n import _
from flagcore.spec.plain_data import parse_yaml, read_mapping, read_text
from flagcore_operators.contract import OperatorLibrary
from flagcore_operators.dispatched import FLAGOS, REFERENCE, Dispatcher, as_order, read_orders

UNUSED = "FLAGCORE_FLAGGEMS_UNUSED"
"""The operators for which a training program does not use FlagGems, separated by commas. The program passes them:
`flag_gems.enable(unused=os.environ.get("FLAGCORE_FLAGGEMS_UNUSED", "").split(","))`."""
NATIVE = "native"


class FlagGems(OperatorLibrary):
    """Triton kernels for operators of torch's dispatcher. `native` is the implementation of the vendor's torch."""

    name, reference, data = "flaggems", NATIVE, ["flaggems"]

    def serves(self, device_type: str, engine: str) -> bool:
        return find_spec("flag_gems") is not None and device_type != "cpu" and engine != "vllm"

    def environment(self, choice: Mapping[str, str]) -> Mapping[str, str]:
        return {UNUSED: ",".join(_native(choice))}

    def in_effect(self, environment: Mapping[str, str], vendor: str) -> Mapping[str, str]:
        return dict.fromkeys(_words(environment.get(UNUSED, "")), NATIVE)

    def file(self, choice: Mapping[str, str]) -> str:
        """Return the YAML file for `flag_gems.enable(unused=FILE)`."""
        return yaml.safe_dump({"exclude": _native(choice)})

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """FlagGems' names of its operators, by torch's name and overload."""
        import flag_gems

        return {entry[0]: entry[1].__name__ for entry in flag_gems._FULL_CONFIG}

    def operator(self, function: str, arguments: Sequence[Any]) -> str:
        if not function.startswith("aten."):
            return ""
        return self._names.get(function.removeprefix("aten.").removesuffix(".default"), "")

    @cached_property
    def _off(self) -> Sequence[str]:
        """The operators that `flag_gems.enable` leaves out on this vendor's chips, whatever its arguments are.

        5.0.2 (`runtime/register.py`) leaves none out on NVIDIA's, @08052e70 (`runtime/op_registrar.py`) also there.
        """
        if find_spec("flag_gems") is None:
            return ()
        import flag_gems

        runtime, vendor = flag_gems.runtime, flag_gems.vendor_name
        has_off = vendor != "nvidia" or hasattr(runtime, "op_registrar")
        return tuple(runtime.backend.get_unused_ops(vendor)) if has_off else ()

    def implementations(self, operator: str) -> Sequence[str]:
        return (NATIVE,) if operator in self._off else (FLAGOS, NATIVE)

    def using(self, operator: str, implementation: str) -> AbstractContextManager[Any]:
        if implementation == NATIVE:
            return nullcontext()
        import flag_gems

        return flag_gems.use_gems(include=[operator])  # type: ignore[no-any-return]


class VllmFl(Dispatcher, FlagGems):
    """vllm-plugin-FL: FlagGems in vLLM, and the plugin's own operators such as `rms_norm`, each with an order."""

    name, reference, data = "vllm_fl", NATIVE, ["flaggems", "vllm_fl"]
    package, variable = "vllm_fl.dispatch", "VLLM_FL_PER_OP"

    def serves(self, device_type: str, engine: str) -> bool:
        return find_spec("vllm_fl") is not None and engine == "vllm"

    def environment(self, choice: Mapping[str, str]) -> Mapping[str, str]:
        orders = ";".join(f"{name}={value}" for name, value in sorted(choice.items()) if _is_order(value))
        found = {"VLLM_FL_FLAGOS_BLACKLIST": ",".join(_native(choice)), self.variable: orders}
        return {name: value for name, value in found.items() if value}

    def file(self, choice: Mapping[str, str]) -> str:
        """Return the YAML file for VLLM_FL_CONFIG."""
        orders = {name: value.split("|") for name, value in sorted(choice.items()) if _is_order(value)}
        return yaml.safe_dump({"prefer": "flagos", "op_backends": orders, "flagos_blacklist": _native(choice)})

    def in_effect(self, environment: Mapping[str, str], vendor: str) -> Mapping[str, str]:
        """Return the choice by the plugin's precedence.

        For FlagGems: a white list, a black list, VLLM_FL_CONFIG or else the platform's file. For the orders:
        VLLM_FL_CONFIG alone if the file exists; otherwise VLLM_FL_OP_CONFIG, VLLM_FL_PER_OP, the platform's file.
        """
        white, black = _lists(environment)
        own = environment.get("VLLM_FL_CONFIG", "").strip()
        config = _read(Path(own) if own else _platform_file(environment, vendor))
        of_config = {str(name): as_order(value) for name, value in (config.get("op_backends") or {}).items()}
        orders = of_config if own and Path(own).is_file() else self._orders_of_variables(environment, of_config)
        orders = {name: value for name, value in orders.items() if value}
        if not _is_preferred(environment):
            return {**orders, "*": NATIVE}
        white = white or ([] if black else config.get("flagos_whitelist") or [])
        if white:
            return {**orders, "*": NATIVE, **dict.fromkeys(white, FLAGOS)}
        return {**orders, **dict.fromkeys(black or config.get("flagos_blacklist") or (), NATIVE)}

    def _orders_of_variables(self, environment: Mapping[str, str], default: dict[str, str]) -> dict[str, str]:
        """Return the orders that variables set, or `default`."""
        if file := environment.get("VLLM_FL_OP_CONFIG", "").strip():
            orders = read_mapping(Path(file), file=file, key="VLLM_FL_OP_CONFIG")
            return {name: str(value).strip().lower() for name, value in orders.items()}
        return read_orders(text) if (text := environment.get(self.variable, "")) else default

    def operator(self, function: str, arguments: Sequence[Any]) -> str:
        gems = FlagGems.operator(self, function, arguments)
        return Dispatcher.operator(self, function, arguments) or (gems if gems not in self._known else "")

    def implementations(self, operator: str) -> Sequence[str]:
        return self._known.get(operator) or FlagGems.implementations(self, operator)

    def reference_of(self, implementations: Sequence[str]) -> str:
        return NATIVE if NATIVE in implementations else REFERENCE

    def using(self, operator: str, implementation: str) -> AbstractContextManager[Any]:
        own = implementation not in (FLAGOS, NATIVE)
        return (Dispatcher if own else FlagGems).using(self, operator, implementation)

    def function(self, name: str) -> Callable[..., Any]:
        return (Dispatcher if name.startswith(f"{self.name}.") else OperatorLibrary).function(self, name)


def _lists(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the white list and the black list of variables. Raises UsageError if both are set."""
    white, black = (_words(environment.get(f"VLLM_FL_FLAGOS_{each}LIST", "")) for each in ("WHITE", "BLACK"))
    if white and black:
        text = "VLLM_FL_FLAGOS_WHITELIST and VLLM_FL_FLAGOS_BLACKLIST exclude each other; unset one of them"
        raise UsageError(_(text))
    return white, black


def _is_preferred(environment: Mapping[str, str]) -> bool:
    """Return whether FlagGems is the first choice for operators without an order."""
    switches = (environment.get(name, "true").lower() for name in ("VLLM_FL_PREFER_ENABLED", "USE_FLAGGEMS"))
    prefers = environment.get("VLLM_FL_PREFER", "").strip().lower() or FLAGOS
    return prefers == FLAGOS and all(each in ("true", "1") for each in switches)


def _platform_file(environment: Mapping[str, str], vendor: str) -> Path:
    """Return the file of the installed plugin with the defaults of a vendor's chips."""
    spec = find_spec("vllm_fl")
    folder = Path(spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else "")
    name = environment.get("VLLM_FL_PLATFORM", "").strip().lower() or {"mthreads": "musa"}.get(vendor, vendor)
    return folder / "dispatch" / "config" / f"{name}.yaml"


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a YAML file, empty if there is none. Raises UsageError if it is not valid."""
    if not file.is_file():
        return {}
    found = parse_yaml(read_text(file, file=str(file), key="file"), file=str(file))
    return found if isinstance(found, dict) else {}


def _native(choice: Mapping[str, str]) -> list[str]:
    return sorted(name for name, value in choice.items() if value == NATIVE and name != "*")


def _is_order(value: str) -> bool:
    return value not in (FLAGOS, NATIVE) or "|" in value


def _words(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


FLAGGEMS: OperatorLibrary = FlagGems()
VLLM_FL = VllmFl()
