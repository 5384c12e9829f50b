"""What the catalogues of all vendors say of chips: sources, plausible figures, and what stays empty.

Plans with no setting typed: against what was published of the runs, and one spec on several chips.
`flag doctor` on machines with a vendor's management tool and a stack that fits it or does not.
"""

import functools
import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flagcore_testing import fakes
from flagcore_testing.checks.sources import WAIVED
from flagcore_testing.examples import task_on

from flagcore import api
from flagcore.domain.chip import Chip, Fact
from flagcore.domain.engine import RefusedValues
from flagcore.plugins import LoadedPlugins
from tests.product.vendors.test_simulated_nodes import CAMBRICON, METAX
from tests.product.vendors.test_visible_devices import VENDORS_WITH_TOOLS

VENDORS = (
    *("nvidia", "amd", "metax", "iluvatar", "cambricon", "ascend", "mthreads", "hygon", "kunlunxin", "enflame"),
    "thead",
)
PLUGINS = LoadedPlugins.of({name: importlib.import_module(f"flagcore_{name}.hooks").plugin for name in VENDORS})
CHIPS = PLUGINS.chips()
BY_NAME = {chip.name: chip for chip in CHIPS}


def facts(chip: Chip) -> Iterator[Fact]:
    yield from chip.dense_flops_per_second.values()
    others = (chip.memory_bytes, chip.memory_bandwidth_bytes_per_second, chip.host_bytes_per_second)
    link = chip.link.bytes_per_second if chip.link else None
    yield from (fact for fact in (*others, chip.nic_bytes_per_second, link) if fact is not None)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_only_own_measurements_are_marked_as_measured(chip: Chip) -> None:
    if any(fact.source.kind == "measured" for fact in facts(chip)):
        assert chip.name == "H200"


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        *(("BI-V150", 32), ("BI-V150S", 32), ("MR-V100-DUO", 32), ("MLU370-X8", 32)),
        *(("910C", 64), ("310P3", 48), ("MI250", 64), ("MI250X", 64)),
    ],
)
def test_a_card_of_two_devices_is_reported_and_its_figures_are_of_one(name: str, gib: int) -> None:
    assert BY_NAME[name].devices_per_card == 2
    memory = BY_NAME[name].memory_bytes
    assert memory is not None
    assert memory.value <= gib * 2**30


@pytest.mark.parametrize(
    ("name", "precision", "reached"),
    [
        # products that others published: zzc0721/torch-performance-test-data issue 155 (C500), leliyliu/TileStack
        # docs/metax_c550_integration.md 3.3, FlagOpen/FlagPerf computation-* of BI150 (a card, halved), and
        # ywh555hhh/llaisys iluvatar-mrv100-corex-hardware-research.md
        ("C500", "fp16", 226.28e12),
        ("C500", "bf16", 226.69e12),
        ("C500", "tf32", 107.57e12),
        ("C550", "fp16", 275.03e12),
        ("C550", "bf16", 269.34e12),
        ("BI-V150", "bf16", 196.77e12 / 2),
        ("BI-V150", "fp16", 196.47e12 / 2),
        ("MR-V100", "fp16", 96.1e12),
        ("MR-V100", "bf16", 96.1e12),
        # wangzy0327/hblas-bench DCU-bench.md, and public measurements of an MTT S5000 of 2026-07-13
        ("BW1000", "fp16", 456.4e12),
        ("BW1000", "fp32", 58.0e12),
        ("MTT-S5000", "fp8", 899.4e12),
    ],
)
def test_no_peak_is_below_a_measured_rate(name: str, precision: str, reached: float) -> None:
    peak = BY_NAME[name].dense_flops_per_second[precision].value
    assert 0.85 * peak < reached < 1.002 * peak


@pytest.mark.parametrize(
    ("name", "engine", "refused", "works"),
    [
        ("MI250X", "vllm", {"fp8"}, set()),
        ("MI300X", "vllm", {"mxfp8"}, {"fp8"}),
        ("MI355X", "vllm", set(), {"fp8"}),
        ("910B3", "vllm", {"fp8", "mxfp8"}, set()),
        ("MTT-S4000", "megatron", {"fp8"}, set()),
        ("MTT-S5000", "megatron", set(), {"fp8"}),
    ],
)
def test_formats_without_units_are_refused(name: str, engine: str, refused: set[str], works: set[str]) -> None:
    rules = PLUGINS.check_task(task_on(BY_NAME[name], engine)).rules
    values = {value for rule in rules if isinstance(rule, RefusedValues) for value in rule.values}
    assert refused <= values
    assert not works & values


ADDRESS = re.compile(r"\w\.[a-z]{2,4}/|[\w-]+/[\w.-]+ (\S*\w[/.]\w\S*|issues? \d+|pull requests? \d+)|arXiv|on PyPI")


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_each_source_can_be_opened_or_says_that_it_was_not_checked(chip: Chip) -> None:
    for source in {fact.source for fact in facts(chip) if fact.source.kind in ("datasheet", "published")}:
        assert ADDRESS.search(source.detail) or WAIVED.search(source.detail), source.detail


@pytest.mark.parametrize("vendor", VENDORS[:-1])  # the variable is T-Head's
def test_a_variable_that_hides_another_is_noted_where_it_is_set(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_on(next(chip for chip in CHIPS if chip.vendor == vendor))
    assert "GEMS_VENDOR" in PLUGINS.environment(task.cluster.groups[0].chip, "megatron", None, task)
    counts = []
    for value in (None, ""):  # the software asks whether it is set, not for its value
        if value is not None:
            monkeypatch.setenv("PPU_SDK", value)
        counts.append(sum("PPU_SDK" in note for note in PLUGINS.check_task(task, None).notes))
    assert counts == [0, 1]


FEW: dict[str, Any] = {
    "data_parallel_size": [64, 128],
    "micro_batch_size": 1,
    "context_parallel_size": [1, 2],
    "num_layers_per_virtual_pipeline_stage": [None, 1, 2],
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""A part of the space in which both searches end within seconds; the best of the whole space lies in it."""


def spec(model: str | dict[str, Any], chip: str, nodes: int, space: dict[str, Any] | None = None, **train: Any) -> Any:
    cluster = {"chip": chip, "nodes": nodes, "devices_per_node": 8}
    return {
        "model": model,
        "cluster": cluster,
        "train": {"engine": "megatron", **train},
        "auto_tuner": {"space": space or {}},
    }


@pytest.mark.parametrize("space", [FEW, pytest.param({}, marks=pytest.mark.long)], ids=["few", "all"])
def test_deepseek_v3_is_planned_within_a_quarter_of_its_report(space: dict[str, Any]) -> None:
    """14.8T tokens in 2.664M hours of H800 (arXiv 2412.19437)."""
    job = spec("deepseek-ai/DeepSeek-V3", "H800", 256, space, seq_length=4096, global_batch_size=15360, precision="fp8")
    best = api.estimate(job, top=1).candidates[0]
    assert best["tokens_per_second_per_device"]["value"] == pytest.approx(14.8e12 / (2.664e6 * 3600), rel=0.25)


@pytest.mark.parametrize("space", [FEW, pytest.param({}, marks=pytest.mark.long)], ids=["few", "all"])
def test_llama_3_405b_is_planned_within_15_percent_of_its_report(space: dict[str, Any]) -> None:
    """41% of the peak on 16,384 H100 at 8,192 tokens (arXiv 2407.21783, table 4)."""
    job = spec(
        "meta-llama/Meta-Llama-3.1-405B",
        "H100-SXM",
        2048,
        space,
        seq_length=8192,
        global_batch_size=2048,
        precision="bf16",
    )
    assert api.estimate(job, top=1).candidates[0]["mfu"] == pytest.approx(0.41, rel=0.15)


SMALL = {"num_layers": 4, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 8, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("chip", "implementation"),
    [
        ("H100-SXM", "transformer_engine"),
        ("A100-40GB", "transformer_engine"),
        ("V100-32GB", None),
        ("C500", "transformer_engine"),
    ],
)
def test_a_plan_lists_the_assumptions_of_the_vendor(chip: str, implementation: str | None) -> None:
    found = api.estimate(spec(SMALL, chip, 2, seq_length=2048, global_batch_size=64, precision="fp16"), top=1)
    assert found.assumed.get("implementation") == implementation
    assert ("assumed" in found.candidates[0]) is (implementation is not None)


ROOT = Path(__file__).resolve().parents[3]
SPEC = ROOT / "examples" / "portability.yaml"


def exchange(chip: str, tensor: int) -> float:
    account = api.explain_candidate(SPEC, f"tp={tensor}, mbs=1, sp", chip=chip)
    assert account.predicted is not None
    return float(account.predicted.time_s["tp_comm_s"])


def test_tensor_parallelism_over_both_islands_of_a_c500_costs_more_than_on_a_full_mesh() -> None:
    assert exchange("C500", 8) > 2.5 * exchange("C500", 4)
    assert exchange("C550", 8) < 2.5 * exchange("C550", 4)


def test_a_c500_may_run_tensor_parallelism_over_both_islands() -> None:
    assert api.explain_candidate(SPEC, "tp=8, mbs=1, sp", chip="C500").state != "removed"


@pytest.mark.parametrize(("chip", "has_memory"), [("C588", True), ("BI-V150S", True), ("MLU580", False)])
def test_with_an_unpublished_rate_the_estimate_suggests_calibration(chip: str, has_memory: bool) -> None:
    found = api.estimate(SPEC, chip=chip, top=1)
    assert found.candidates[0].get("step_time_s", {}).get("value") is None
    assert found.untimed == found.counts.untried
    assert f"peak rate of {chip} in bf16" in found.no_time
    assert "`flag calibrate`" in found.no_time
    assert ("give cluster.memory_per_device" in found.no_time) == (not has_memory)


def test_hosts_of_some_releases_need_a_time_for_each_layer_of_a_server() -> None:
    load = {"input_len": 512, "output_len": 64, "concurrency": 1, "num_prompts": 4}
    job = {"kind": "serve", "model": "Qwen/Qwen3-4B", "cluster": {"chip": "910B3", "devices": 4, "devices_per_node": 4}}
    job["candidate"] = {"tensor_model_parallel_size": 4}
    serve = [{"engine": "vllm", "precision": "bf16", **load, **each} for each in ({"engine_version": "0.11.0"}, {})]
    older, newer = api.estimate_jobs([{**job, "id": "1", "serve": each} for each in serve])
    assert older["tpot_s"]["mean"] > 2.0 * newer["tpot_s"]["mean"]
    assert older["tpot_s"]["mean"] == pytest.approx(
        36 * 0.75e-3, rel=0.1
    )  # Qwen3-4B has 36 layers, each captured in pieces


@dataclass(frozen=True)
class Stack:
    """A vendor's tool, what it prints, and the chip."""

    tool: str
    printed: str
    chip: str


STACKS = {"metax": Stack("mx-smi", METAX, "C500"), "cambricon": Stack("cnmon", CAMBRICON, "MLU370-X8")}
BUILDS = {vendor.name: vendor for vendor in VENDORS_WITH_TOOLS}


@functools.cache
def records(name: str, modules: Path) -> list[dict[str, Any]]:
    """Return what `flag doctor` reports with the modules in a folder in front of the installed ones."""
    stack = STACKS[name]
    # other folders on the path may hold a sitecustomize that changes torch, which fails for a stand-in
    own = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(each).is_relative_to(ROOT)]
    path = os.pathsep.join([str(modules), *own])
    with fakes.machine({stack.tool: fakes.prints(stack.printed)}, PYTHONPATH=path):
        return api.doctor()


def of_stack(found: list[dict[str, Any]], chip: str) -> list[dict[str, Any]]:
    return [each for each in found if each["name"] == chip and not each["ok"]]


@pytest.fixture(scope="module")
def of_nvidia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stand-in for NVIDIA's torch."""
    folder = tmp_path_factory.mktemp("nvidia")
    (folder / "torch.py").write_text(BUILDS["nvidia"].torch)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_the_public_wheel_of_vllm_is_not_advised_on_a_vendors_chip(name: str, of_nvidia: Path) -> None:
    found = {each["for"]: each for each in records(name, of_nvidia)}
    for engine in ("vllm", "sglang", "lmdeploy"):
        assert "pip install 'flagcore[" not in found[f"engine {engine} ({engine})"]["fix"]
    words = "`pip install --no-deps`" if name == "cambricon" else "the public wheel"
    assert words in found["engine vllm (vllm)"]["fix"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_a_torch_of_another_vendor_is_reported(name: str, of_nvidia: Path) -> None:
    problems = of_stack(records(name, of_nvidia), STACKS[name].chip)
    assert any(each["fix"].startswith("torch ") and each["fix"].endswith("vendor's build") for each in problems)
    assert any("torch_mlu" in each["fix"] for each in problems) == (name == "cambricon")


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_a_stack_that_fits_has_no_problem(name: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(BUILDS[name].torch)
    migration = tmp_path / "torch_mlu/utils/gpu_migration"
    migration.mkdir(parents=True)
    for folder in (migration, migration.parent, migration.parent.parent):
        (folder / "__init__.py").touch()
    assert of_stack(records(name, tmp_path), STACKS[name].chip) == []
