"""What the catalogues of all vendors say of chips: sources, plausible figures, and what stays empty."""

import importlib
import re
from collections.abc import Iterator

import pytest
from flagcore_testing.checks.sources import WAIVED
from flagcore_testing.examples import task_on

from flagcore.domain.chip import Chip, Fact
from flagcore.domain.engine import RefusedValues
from flagcore.plugins import LoadedPlugins

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
