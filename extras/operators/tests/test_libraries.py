"""The shipped libraries (choices, defects, published times), and one with planted costs, whose best choice is found.
Managers of operators: calls are recorded and made again with each implementation, and what runs is reported."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from flagcore_operators import flaggems
from flagcore_operators.contract import OperatorLibrary, find_library
from flagcore_operators.dispatched import Dispatcher
from flagcore_operators.flaggems import FlagGems, VllmFl
from flagcore_operators.measuring import _of_orders, avoided, calibrate_operators, choose
from flagcore_operators.start import RECORD, SET, effective
from flagcore_vendorkit.choices import CALIBRATED

from extras.operators.tests.planted import BEST, MS, VARIABLE
from flagcore import api
from flagcore.errors import FlagError, UsageError

BLACK, WHITE, PER_OP = "VLLM_FL_FLAGOS_BLACKLIST", "VLLM_FL_FLAGOS_WHITELIST", "VLLM_FL_PER_OP"
ORDER = "vendor:metax|reference"


@pytest.mark.parametrize(
    ("library", "choice"),
    [
        ("torch", {"mm_nt": "onednn", "attention": "math"}),
        ("flaggems", {"mm": "native", "copy_": "native"}),
        ("te_fl", {"generic_gemm": "reference", "rmsnorm_fwd": ORDER}),
        ("vllm_fl", {"mm": "native", "rms_norm": ORDER}),
    ],
)
def test_a_choice_is_read_back_as_it_was_set(library: str, choice: dict[str, str]) -> None:
    found = find_library(library)
    assert found.in_effect(found.environment(choice), "metax") == choice


def test_files_have_the_keys_of_the_libraries() -> None:
    choice = {"mm": "native", "rms_norm": ORDER}
    assert yaml.safe_load(flaggems.FLAGGEMS.file(choice)) == {"exclude": ["mm"]}
    orders = {"rms_norm": ["vendor:metax", "reference"]}
    config = {"prefer": "flagos", "op_backends": orders, "flagos_blacklist": ["mm"]}
    assert yaml.safe_load(flaggems.VLLM_FL.file(choice)) == config


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"index": "native", "rms_norm": "vendor"}),
        ({BLACK: "mm"}, {"mm": "native", "rms_norm": "vendor"}),
        ({WHITE: "mm"}, {"*": "native", "mm": "flagos", "rms_norm": "vendor"}),
        ({PER_OP: "silu=flagos|vendor; bad"}, {"index": "native", "silu": "flagos|vendor"}),
        ({"USE_FLAGGEMS": "0"}, {"*": "native", "rms_norm": "vendor"}),
        ({"VLLM_FL_PREFER": "vendor"}, {"*": "native", "rms_norm": "vendor"}),
        ({"VLLM_FL_CONFIG": "own.yaml", PER_OP: "silu=vendor"}, {"exp": "native", "mul": "reference"}),
        ({"VLLM_FL_CONFIG": "own.yaml", BLACK: "mm"}, {"mm": "native", "mul": "reference"}),
        ({"VLLM_FL_OP_CONFIG": "ops.json", PER_OP: "silu=vendor"}, {"index": "native", "add": "vendor"}),
    ],
)
def test_the_precedence_of_vllm_plugin_fl(
    environment: dict[str, str], expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "vllm_fl" / "dispatch" / "config"
    config.mkdir(parents=True)
    (tmp_path / "vllm_fl" / "__init__.py").touch()
    (config / "ascend.yaml").write_text("op_backends: {rms_norm: [vendor]}\nflagos_blacklist: [index]\n")
    (tmp_path / "own.yaml").write_text("op_backends: {mul: reference}\nflagos_blacklist: [exp]\n")
    (tmp_path / "ops.json").write_text(json.dumps({"add": "Vendor"}))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert flaggems.VLLM_FL.in_effect(environment, "ascend") == expected


def test_lists_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(UsageError, match=WHITE):
        flaggems.VLLM_FL.in_effect({WHITE: "mm", BLACK: "add"}, "nvidia")


@pytest.mark.parametrize(
    ("library", "envs", "words"), [("no", {}, "operator library no"), ("vllm_fl", {WHITE: "mm"}, "unset")]
)
def test_what_prevents_a_calibration_is_said_before_a_run(library: str, envs: dict[str, str], words: str) -> None:
    shape = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 512}
    train = {"engine": "megatron", "seq_length": 32, "global_batch_size": 2, "precision": "fp32"}
    spec = {"model": shape, "cluster": {"chip": "cpu"}, "train": train, "envs": envs}
    with pytest.raises(FlagError, match=words):
        calibrate_operators(spec, library=library)


@pytest.mark.parametrize(
    ("package", "operator", "library"),
    [
        ("flagcore_ascend", "index", flaggems.FLAGGEMS),
        ("flagcore_metax", "masked_fill", flaggems.VLLM_FL),
        ("flagcore_iluvatar", "silu_and_mul", flaggems.VLLM_FL),
        ("flagcore_cambricon", "copy_", flaggems.VLLM_FL),
    ],
)
def test_vendors_name_operators_to_avoid(package: str, operator: str, library: OperatorLibrary) -> None:
    assert avoided(package, library.data)[operator].keys() == {"flagos"}


PUBLISHED = {
    "std": [(16.640, 11.056), (7.456, 6.464), (44.896, 24.896), (59.104, 159.264), (954.560, 9561.136)],
    "div": [(7181.76, 6423.808), (8.352, 27.584), (119.360, 103.232), (7189.12, 6427.488), (24.544, 29.984)],
    "int_mm": [(8.320, 8.480), (14.240, 14.720), (18.400, 21.760), (53.759, 87.360)],
    "laguerre": [(5.088, 5.824), (13.120, 20.352), (12.320, 8.160), (94.272, 72.768)],
    "layer_norm": [(13.312, 10.240), (55.296, 39.936), (101.376, 76.800), (149.504, 112.640)],
    "cat": [(9.68981, 126.279), (55.1608, 128.416), (92.5157, 123.971), (127.123, 126.585), (206.105, 135.192)],
}
"""Microseconds of torch and FlagGems by call: flagos-ai/FlagGems pull requests 999, 4544, 6044, 5782, 218 and 150."""


def test_the_choice_from_published_times_is_the_best_of_each_operator_and_call() -> None:
    for operator, pairs in PUBLISHED.items():
        common = {"operator": operator, "implementations": ["flagos", "native"], "size": 1.0}
        calls = [{**common, "count": 3} for _ in pairs]
        rows = [
            {"call": place, "implementation": name, "seconds": 1e-6 * us}
            for place, pair in enumerate(pairs)
            for name, us in zip(("native", "flagos"), pair, strict=True)
        ]
        for places in (range(len(pairs)), *([place] for place in range(len(pairs)))):
            some = [{**row, "call": list(places).index(row["call"])} for row in rows if row["call"] in places]
            (found,) = choose([calls[place] for place in places], some, {}, {})
            native, gems = (sum(pairs[place][side] for place in places) for side in (0, 1))
            assert found.chosen == ("native" if native <= 0.98 * gems else "flagos")


@pytest.mark.costly
def test_torch_applies_a_choice_and_records_when_it_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = """
import torch
from flagcore_operators.on_cpu import TORCH
left, right = torch.randn(64, 96), torch.randn(80, 96)
with torch.profiler.profile() as run:
    found = torch.mm(left, right.t())
names = {each.key for each in run.key_averages()}
assert ("mkldnn::_linear_pointwise" in names) is True, names
assert torch.backends.cuda.flash_sdp_enabled() is False
torch.testing.assert_close(found, left @ right.t().contiguous())
"""
    variables = {SET: "torch:mm_nt=onednn,attention=math", RECORD: f"torch:{tmp_path}"}
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **variables})
    (file,) = tmp_path.iterdir()
    calls = {each["operator"]: each for each in json.loads(file.read_text())}
    assert (calls["mm_nt"]["count"], {"onednn"} < {*calls["mm_nt"]["implementations"]}) == (1, True)


PROGRAM = Path(__file__).with_name("planted.py")


def spec(tmp_path: Path, **envs: str) -> dict[str, Any]:
    step = r"step (?P<step>\d+) took (?P<ms>[\d.]+) ms"
    return {
        "model": {
            "num_layers": 1,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 512,
        },
        "cluster": {"chip": "auto", "devices_per_node": 1},
        "train": {
            "engine": "command",
            "seq_length": 32,
            "global_batch_size": 1,
            "precision": "fp32",
            "command": [sys.executable, str(PROGRAM), "6"],
            "directory": str(tmp_path),
            "program": {"knobs": {"unused": {"flag": "--unused={}", "values": [1]}}, "log": {"step": step}},
        },
        "auto_tuner": {"control": {"train_iters": 6, "warmup_iters": 1, "max_trials": 2, "repeats": 0}},
        "envs": {"OMP_NUM_THREADS": 1, **envs},
    }


def install(site: Path) -> None:
    """Install the library, as another distribution does."""
    info = site / "planted-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flagcore.operators]\nplanted = planted:PLANTED\n")
    (site / "planted.py").symlink_to(PROGRAM)


@pytest.mark.long
def test_the_planted_optimum_is_found_and_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FLAGCORE_HOME", str(tmp_path / "home"))
    reasons = {"neg": {"avoided": "known to be wrong (a vendor)"}}
    monkeypatch.setattr("flagcore_operators.measuring.avoided", lambda package, names: reasons)

    job = spec(tmp_path)
    choice, file = calibrate_operators(job, library="planted", seconds=60.0)
    rows = {row["operator"]: row for row in choice.rows}
    assert {name: row["chosen"] for name, row in rows.items() if row["chosen"] != row["default"]} == BEST
    assert rows.keys() == MS.keys()
    assert all(row["calls"] == 24 for row in rows.values())
    excluded = {implementation: why for row in rows.values() for implementation, why in row["excluded"].items()}
    assert excluded.keys() == {"wrong", "crashes", "hangs", "spoils", "avoided"}
    assert "wrong result" in excluded["wrong"]
    assert "wrong result" in excluded["spoils"]
    usual, best = (sum(MS[name][chosen.get(name, "usual")] for name in MS) for chosen in ({}, BEST))
    assert choice.time[0] == pytest.approx(best / usual, rel=0.15)
    assert find_library("planted").in_effect(choice.environment, "") == BEST
    assert file.with_suffix(".yaml").read_text() == choice.file
    assert not list((tmp_path / "home").glob("experience/*"))

    outcome = api.tune(api.changed_spec(job, {"auto_tuner.space.planted_operators": "auto"}), run_dir=tmp_path / "run")
    trials = outcome.data["trials"]
    assert [each["candidate"]["planted_operators"] for each in trials] == [None, CALIBRATED]
    assert outcome.data["best"]["candidate"]["planted_operators"] == CALIBRATED
    launch = json.loads((tmp_path / "run" / "trials" / "1" / "launch.json").read_text())
    assert launch["environment"][VARIABLE] == choice.environment[VARIABLE]
    assert choice.environment[VARIABLE] in (tmp_path / "run" / "best.sh").read_text()
    seconds = [each["measured"]["step_time_s"]["median"] for each in trials]
    assert seconds[1] / seconds[0] == pytest.approx(best / usual, rel=0.15)


torch = pytest.importorskip("torch")
bench = pytest.importorskip("flagcore_operators.bench")
ACME_ORDER = "vendor:acme|reference"


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
    assert library.implementations("norm") == ["flagos|reference", ACME_ORDER, "reference"]
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
    monkeypatch.setattr(library, "_applied", {"norm": ACME_ORDER})
    monkeypatch.setenv(SET, library.environment({"norm": ACME_ORDER})[SET])
    library.register(manager.registry)  # type: ignore[attr-defined]
    manager.registry.register_impl(manager.registry.later)
    arguments = (torch.ones(2), torch.zeros(2, dtype=torch.uint8))
    with library.using("norm", ACME_ORDER):
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
    call = {"operator": "norm", "implementations": ["flagos|reference", ACME_ORDER, "reference"]}
    assert _of_orders({"norm": {"flagos": "slow"}, "other": {"flagos": "wrong"}}, [call]) == {
        "norm": {"flagos|reference": "slow"}
    }


@pytest.mark.parametrize(("vendor", "is_off"), [("ascend", True), ("nvidia", False)])
def test_operators_that_flaggems_leaves_out_have_one_implementation(
    monkeypatch: pytest.MonkeyPatch, vendor: str, is_off: bool
) -> None:
    """5.0.2 leaves `copy_` out on Ascend regardless of the arguments of `enable`, and nothing on NVIDIA's chips."""
    gems = ModuleType("flag_gems")
    gems.__spec__ = ModuleSpec("flag_gems", None)
    backend = SimpleNamespace(get_unused_ops=lambda _vendor: ["copy_"])
    vars(gems).update(runtime=SimpleNamespace(backend=backend), vendor_name=vendor)
    monkeypatch.setitem(sys.modules, "flag_gems", gems)
    found = [FlagGems().implementations(name) for name in ("copy_", "mm")]
    assert found == [("native",) if is_off else ("flagos", "native"), ("flagos", "native")]


def test_own_operators_of_vllm_plugin_fl_and_those_of_flaggems() -> None:
    library = VllmFl()
    library._known = {"norm": ["flagos|reference", "reference"]}
    assert [library.reference_of(library.implementations(name)) for name in ("norm", "mm")] == ["reference", "native"]
    choice = {"norm": ACME_ORDER, "silu": "reference", "mm": "native"}
    assert library.in_effect(library.environment(choice), "") == choice
