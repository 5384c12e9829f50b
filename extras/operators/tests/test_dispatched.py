"""Managers of operators: calls are recorded and made again with each implementation, and what runs is reported."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from flagcore_operators.contract import find_library
from flagcore_operators.dispatched import Dispatcher
from flagcore_operators.flaggems import VllmFl
from flagcore_operators.measuring import _of_orders
from flagcore_operators.start import SET, effective

torch = pytest.importorskip("torch")
bench = pytest.importorskip("flagcore_operators.bench")
ORDER = "vendor:acme|reference"


@dataclass(frozen=True)
class Implementation:
    impl_id: str
    kind: SimpleNamespace
    vendor: str | None
    priority: int
    fn: Callable[..., Any]
    op_name: str = "norm"
    is_available: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Policy:
    per_op_order: tuple[tuple[str, tuple[str, ...]], ...] = ()
    strict: bool = False

    def is_vendor_allowed(self, name: str) -> bool:
        return name != "denied"


@dataclass
class Manager:
    """Calls the implementation of an operator that the policy names first, or the one with the highest priority."""

    known: list[Implementation]
    policies: list[Policy] = field(default_factory=lambda: [Policy()])
    registry: Any = None

    def __post_init__(self) -> None:
        self.registry = SimpleNamespace(
            list_operators=lambda: ["norm"],
            get_implementations=lambda name: list(self.known),
            register_impl=self.known.append,
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.policies.pop()

    def selected(self) -> Implementation:
        first = dict(self.policies[-1].per_op_order).get("norm", ("",))[0]
        return max(self.known, key=lambda each: (each.impl_id == first.replace("vendor:", "vendor."), each.priority))

    def get_selected_impl_id(self, name: str) -> str:
        return self.selected().impl_id

    def call(self, name: str, *arguments: Any) -> Any:
        return self.selected().fn(*arguments)

    def policy_context(self, policy: Policy) -> "Manager":
        self.policies.append(policy)
        return self


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    def made(impl_id: str, vendor: str | None, priority: int, factor: float) -> Implementation:
        def run(value: Any, workspace: Any) -> Any:
            workspace.fill_(priority)
            return factor * value

        return Implementation(impl_id, SimpleNamespace(value=impl_id.partition(".")[0]), vendor, priority, run)

    found = Manager(
        [made("flagos", None, 150, 1), made("reference", None, 50, 2), made("vendor.denied", "denied", 99, 3)]
    )
    modules = {"manager": {"get_default_manager": lambda: found}}
    modules["policy"] = {"get_policy": lambda: found.policies[-1], "policy_context": found.policy_context}
    for name in ("transformer_engine", "transformer_engine.plugin", "transformer_engine.plugin.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, f"transformer_engine.plugin.core.{name}", module)
    found.registry.later = made("vendor.acme", "acme", 100, 4)
    return found


def test_calls_are_recorded_and_made_again_with_each_implementation(manager: Manager) -> None:
    library, names = Dispatcher(), list[str]()

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (names.append(name), function(*arguments))[1]

    library.record(wrap)
    library.register(manager.registry)
    manager.registry.register_impl(manager.registry.later)
    assert library.operator("te_fl.norm", ()) == "norm"
    assert library.operator("aten.norm.default", ()) == ""
    assert library.implementations("norm") == ["flagos|reference", ORDER, "reference"]
    value, workspace = torch.ones(2), torch.zeros(2, dtype=torch.uint8)
    function = library.function("te_fl.norm")
    for implementation, factor in zip(library.implementations("norm"), (1, 4, 2), strict=True):
        with library.using("norm", implementation):
            assert function(value, workspace).tolist() == [factor, factor]
    assert workspace.tolist() == [0, 0]
    assert names == ["te_fl.norm"] * 3


def test_another_implementation_than_the_choice_is_reported(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = find_library("te_fl")
    monkeypatch.setattr(library, "_ran", {})
    monkeypatch.setattr(library, "_applied", {"norm": ORDER})
    monkeypatch.setenv(SET, library.environment({"norm": ORDER})[SET])
    library.register(manager.registry)  # type: ignore[attr-defined]
    manager.registry.register_impl(manager.registry.later)
    arguments = (torch.ones(2), torch.zeros(2, dtype=torch.uint8))
    with library.using("norm", ORDER):
        manager.call("norm", *arguments)
    assert effective() == {"te_fl_operators": "calibrated"}
    for _ in range(2):
        manager.call("norm", *arguments)
    assert effective() == {"te_fl_operators": "norm=flagos"}
    assert capsys.readouterr().err.split() == ["te_fl_operators", "." * 20, "norm=flagos"]


def test_layers_are_arguments_with_their_numbers_and_tensors() -> None:
    from flagcore_operators.arguments import decode, encode

    layer = torch.nn.RMSNorm(4, eps=1e-3)
    layer.limit = None
    made = decode(encode([layer]), torch.device("cpu"), torch.Generator())[0]
    assert (made.eps, made.limit, made.weight.shape) == (1e-3, None, (4,))
    assert not hasattr(made, "normalized_shape")


def test_tensors_without_negative_values_stay_so() -> None:
    from flagcore_operators.arguments import decode, encode, with_range

    values = [torch.rand(64), torch.randn(64), torch.tensor([3, 9])]
    made = decode(with_range(encode(values), values), torch.device("cpu"), torch.Generator().manual_seed(1))
    assert [bool((each < 0).any()) for each in made] == [False, True, False]
    assert made[0].std() > 0.1
    assert 3 <= int(made[2].min()) <= int(made[2].max()) <= 9


def test_right_implementations_are_timed_in_turn_and_the_shortest_time_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((3.0, 2.0, 1.0, 4.0, 5.0, 6.0))

    class Bench:
        device = torch.device("cpu")

        def __init__(self, *_: object, **__: object) -> None:
            self.synchronize = lambda: None

        def time(self, run: Callable[[], Any], seconds: float) -> SimpleNamespace:
            return SimpleNamespace(seconds=next(times))

    class Library(Dispatcher):
        def using(self, operator: str, implementation: str) -> Any:
            used.append(implementation)
            return nullcontext()

        def function(self, name: str) -> Callable[..., Any]:
            return lambda value: value * (2.0 if used[-1] == "wrong" else 1.0)

    used = list[str]()
    monkeypatch.setattr(bench, "Bench", Bench)
    monkeypatch.setattr(bench, "find_library", lambda name: Library())
    implementations = ["reference", "wrong", "other"]
    call = {"operator": "norm", "function": "te_fl.norm", "implementations": implementations, "named": {}}
    job = {"preload": [], "threads": 0, "device_type": "cpu", "library": "te_fl", "output": str(tmp_path / "found")}
    calls = [{**call, "arguments": [{"tensor": [4], "strides": [1], "dtype": "float32"}]}]
    (tmp_path / "job").write_text(json.dumps({**job, "calls": calls, "todo": [[0, implementations]]}))
    bench.main(str(tmp_path / "job"))
    rows = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    found = {row["implementation"]: row.get("seconds") for row in rows if row.get("done")}
    assert found == {"reference": 1.0, "wrong": None, "other": 2.0}


def test_an_order_is_avoided_like_its_first_implementation() -> None:
    call = {"operator": "norm", "implementations": ["flagos|reference", ORDER, "reference"]}
    assert _of_orders({"norm": {"flagos": "slow"}, "other": {"flagos": "wrong"}}, [call]) == {
        "norm": {"flagos|reference": "slow"}
    }


def test_own_operators_of_vllm_plugin_fl_and_those_of_flaggems() -> None:
    library = VllmFl()
    library._known = {"norm": ["flagos|reference", "reference"]}
    assert [library.reference_of(library.implementations(name)) for name in ("norm", "mm")] == ["reference", "native"]
    choice = {"norm": ORDER, "silu": "reference", "mm": "native"}
    assert library.in_effect(library.environment(choice), "") == choice
