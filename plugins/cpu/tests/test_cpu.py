"""The cores of this machine as devices, and the load beside trials."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from flagcore_cpu import hooks, load, rates
from flagcore_cpu.costs import ServerCosts
from flagcore_cpu.hooks import plugin
from flagcore_cpu.machine import Processor, this_machine
from flagcore_cpu.machine import devices as devices_here
from flagcore_testing import PluginConformance
from flagcore_vendorkit.chip_file import load_chips

from flagcore.domain import host
from flagcore.domain.chip import Chip
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.trial import TrialState
from flagcore.physics.roofline import Curve
from tests.checks import given


class TestCpu(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin

    @pytest.fixture
    def failure_examples(self) -> Sequence[tuple[str, TrialState]]:
        return (
            (
                "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8589934592 bytes",
                TrialState.OUT_OF_MEMORY,
            ),
            ("what():  std::bad_alloc", TrialState.OUT_OF_MEMORY),
            ("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:5512", TrialState.FAILED),
        )


CPUINFO = """\
processor\t: {row}
vendor_id\t: {vendor}
cpu family\t: {family}
model\t\t: {model}
model name\t: Example CPU
cpu MHz\t\t: 2000.000
physical id\t: 0
core id\t\t: {core}
flags\t\t: fpu sse {flags}

"""

ARM = """\
processor\t: {row}
BogoMIPS\t: 50.00
Features\t: {features}
CPU implementer\t: 0x41
CPU part\t: 0xd0c

"""


def test_each_available_core_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5}, raising=False)
    assert [device.index for device in devices_here()] == list(range(host.cores()))
    monkeypatch.setattr(host, "quota_cores", lambda: 2.5)
    assert host.cores() == 2
    monkeypatch.setattr(host, "quota_cores", lambda: 0.3)
    assert host.cores() == 1


def test_devices_share_less_memory_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "allowed_memory_bytes", lambda: 2**30)
    assert 0 < sum(device.memory_bytes or 0 for device in devices_here()) <= 0.75 * 2**30


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"proc/self/cgroup": "0::/box/inner\n", "sys/fs/cgroup/box/inner/cpu.max": "max 100000"}, None, None),
        (
            {
                "proc/self/cgroup": "0::/box/inner\n",
                "sys/fs/cgroup/box/inner/cpu.max": "400000 100000",
                "sys/fs/cgroup/box/cpu.max": "150000 100000",
                "sys/fs/cgroup/box/memory.max": "1000000",
            },
            1.5,
            1000000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "5000000",
            },
            2.0,
            5000000,
        ),
        ({}, None, None),
    ],
)
def test_the_tightest_limit_of_a_container_counts(
    tmp_path: Path, files: dict[str, str], cores: float | None, memory: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host.quota_cores(tmp_path) == cores
    assert host.allowed_memory_bytes(tmp_path) == memory


AVX2 = "sse2 avx avx2 fma"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(
    ("vendor", "family", "model", "flags", "rates"),
    [
        pytest.param("AuthenticAMD", 23, 1, AVX2, (16, 0.5, 0.5), id="Zen 1"),
        pytest.param("AuthenticAMD", 23, 0x31, AVX2, (32, 0.5, 0.5), id="Zen 2"),
        pytest.param("AuthenticAMD", 25, 17, f"{AVX512} avx512_bf16", (32, 64, 0.5), id="Zen 4"),
        pytest.param("AuthenticAMD", 26, 2, f"{AVX512} avx512_bf16", (64, 128, 0.5), id="Zen 5"),
        pytest.param("GenuineIntel", 6, 85, AVX512, (64, 32, 0.5), id="Skylake"),
        pytest.param(
            "GenuineIntel", 6, 143, f"{AVX512} avx512_bf16 amx_bf16 avx512_fp16", (64, 1024, 128), id="Xeon with AMX"
        ),
        pytest.param("GenuineIntel", 6, 183, f"{AVX2} avx_vnni", (32, 0.5, 0.5), id="AVX2 only"),
        pytest.param("GenuineIntel", 6, 42, "sse2 avx", (16, 0.5, 0.5), id="AVX only"),
        pytest.param("GenuineIntel", 6, 23, "sse2", (8, 0.5, 0.5), id="no AVX"),
    ],
)
def test_estimates_follow_the_instruction_set(
    tmp_path: Path, vendor: str, family: int, model: int, flags: str, rates: tuple[float, float, float]
) -> None:
    text = CPUINFO.format(row=0, core=0, vendor=vendor, family=family, model=model, flags=flags)
    processor = given(read(tmp_path, [text]))
    assert tuple(processor.flops_per_cycle().values()) == rates
    chip = this_machine(file_chip(), processor)
    for name, rate in zip(("fp32", "bf16", "fp16"), rates, strict=True):
        fact = chip.dense_flops_per_second[name]
        assert fact.value == pytest.approx(rate * 2e9 * 1.4)
        assert fact.source.kind == "estimated"
    assert chip.has_name("example cpu")
    assert ("emulated" in chip.notes) == (min(rates) < rates[0])


@pytest.mark.parametrize(
    ("features", "kilohertz", "rates", "hertz"),
    [
        ("fp asimd asimdhp", None, (16, 0.5, 32), 2.5e9),
        ("fp asimd sve i8mm bf16 asimdhp", "3000000", (16, 32, 32), 3e9),
    ],
)
def test_arm_has_no_clock_and_no_name(
    tmp_path: Path, features: str, kilohertz: str | None, rates: tuple[float, ...], hertz: float
) -> None:
    if kilohertz:
        clock = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq"
        clock.parent.mkdir(parents=True)
        clock.write_text(kilohertz)
    processor = read(tmp_path, [ARM.format(row=row, features=features) for row in range(2)] + ["Hardware\t: board\n"])
    assert processor is not None
    assert (processor.model, processor.clock_hz, processor.threads_per_core) == ("ARM 0x41 0xd0c", hertz, 1)
    assert tuple(processor.flops_per_cycle().values()) == rates
    assert processor.clock_from == ("cpufreq's maximum" if kilohertz else "assumed")


def test_threads_of_a_core_share_its_peak(tmp_path: Path) -> None:
    rows = [
        CPUINFO.format(row=row, core=row // 2, vendor="GenuineIntel", family=6, model=63, flags=AVX2)
        for row in range(4)
    ]
    processor = given(read(tmp_path, rows))
    assert processor.threads_per_core == 2
    chip = this_machine(file_chip(), processor)
    assert chip.dense_flops_per_second["fp32"].value == pytest.approx(32 * 2e9 * 1.4 / 2)


def test_figures_of_another_processor_are_estimates(tmp_path: Path) -> None:
    assert Processor.read(tmp_path) is None
    chip = this_machine(file_chip(), None)
    figures = {key: fact for key, fact in chip.figures.items() if key != "memory_bytes"}
    assert {"dense_flops_per_second.fp32", "link.bytes_per_second"} <= figures.keys()
    assert {fact.source.kind for fact in figures.values()} == {"estimated"}


def test_more_ranks_than_cores_share_the_memory() -> None:
    chip = known_chip()
    models = [
        plugin.flagcore_memory_model(
            NodeGroup(chip=chip, nodes=1, devices_per_node=chip.devices_per_node * times), "megatron", "train"
        )
        for times in (1, 4)
    ]
    one, four = (model.capacity_bytes() for model in models if model is not None)
    assert one == pytest.approx(4 * four)  # type: ignore[operator]


def test_megatron_runs_on_gloo_with_one_thread_per_rank() -> None:
    chip = known_chip()
    support = plugin.flagcore_engine_support(chip, "megatron", None, "train")
    environment = plugin.flagcore_environment(chip, "megatron", None, None, "train")
    assert support is not None
    assert (support.device_type, support.distributed_backend, support.shared_devices) == ("cpu", "gloo", True)
    assert given(environment)["OMP_NUM_THREADS"] == "1"


def test_a_reading_of_the_machine_has_memory_and_load() -> None:
    telemetry = given(plugin.flagcore_telemetry(devices_here()[0]))
    reading = telemetry.sample()
    assert reading["memory_used_bytes"] > 2**20
    assert reading["load_average"] >= 0


@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "sglang"])
def test_a_server_runs_on_cores_that_instances_share_and_chooses_its_threads_itself(engine: str) -> None:
    chip = known_chip()
    support = given(plugin.flagcore_engine_support(chip, engine, None, "serve"))
    assert support.shared_devices
    assert support.visible_devices == ()
    assert "OMP_NUM_THREADS" not in (plugin.flagcore_environment(chip, engine, None, None, "serve") or {})


def read(folder: Path, blocks: list[str]) -> Processor | None:
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text("".join(blocks))
    return Processor.read(folder)


def known_chip() -> Chip:
    (chip,) = plugin.flagcore_chips("")
    return chip


def file_chip() -> Chip:
    (chip,) = load_chips("flagcore_cpu")
    return chip


def test_a_server_with_kernels_of_its_own_computes_all_formats_as_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "rates_here", lambda processor, *, measure: None)
    costs = plugin.flagcore_kernel_costs(file_chip(), engine="llamacpp", kind="serve")  # type: ignore[call-arg]
    rows, side = np.array([4.0, 8.0, 256.0]), np.full(3, 1024.0)
    seconds = {name: costs.gemm_seconds(rows, side, side, name) for name in ("fp32", "bf16", "fp16")}
    assert seconds["bf16"] == pytest.approx(seconds["fp32"])
    assert seconds["fp16"] == pytest.approx(seconds["fp32"])
    first, second, third = seconds["bf16"]
    assert (third - second) / (second - first) == pytest.approx(62)


def test_a_server_with_kernels_of_its_own_does_not_use_wide_vector_units() -> None:
    narrow = Processor("", frozenset({"avx2", "fma"}), 2e9, "", 512, 1.0)
    wide = replace(narrow, flags=narrow.flags | {"avx512f"})
    rows, side = np.array([16.0, 32.0]), np.full(2, 1024.0)
    row_s = [
        float(np.diff(ServerCosts.of(file_chip(), Curve(), each).gemm_seconds(rows, side, side, "fp32"))[0])
        for each in (narrow, wide, replace(wide, width=256))
    ]
    assert row_s[1] == pytest.approx(2 * row_s[0])
    assert row_s[2] == pytest.approx(row_s[0])


def test_the_load_of_other_programs_excludes_this_process_and_those_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times, own, now = {"user": 10.0, "idle": 90.0, "iowait": 0.0}, {1: 2.0, 2: 3.0}, [0.0]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [Times(**times), Times(user=now[0], idle=0.0, iowait=0.0)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(sin=now[0] * 1e6, sout=0))
    monkeypatch.setattr(load, "_own_seconds", lambda: dict(own))
    monkeypatch.setattr(load.time, "monotonic", lambda: 100.0 + now[0])
    machine = load.MachineLoad()
    assert "cores" not in machine.read()
    now[0], times["user"], times["idle"], times["iowait"] = 10.0, 40.0, 96.0, 4.0
    own.update({1: 6.0, 3: 6.0})
    del own[2]
    reading = machine.read()
    assert reading["cores"] == 1.0
    assert reading["cores_used_by_others"] == pytest.approx((30.0 - 10.0) / 10.0)
    assert reading["disk_wait"] == pytest.approx(4.0 / 10.0)
    assert reading["swapped_bytes_per_second"] == pytest.approx(1e6)
    assert machine.read() is reading
    now[0], times["user"], times["idle"] = 20.0, 50.0, 116.0
    assert machine.read()["cores_used_by_others"] == 0.0


class Times(SimpleNamespace):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(vars(self).values())
