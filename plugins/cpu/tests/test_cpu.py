from pathlib import Path

import pytest
from flagcore_cpu import discover
from flagcore_cpu.hooks import plugin
from flagcore_cpu.machine import Processor, this_machine

from flagcore.domain.chip import Chip
from flagcore.domain.cluster import NodeGroup
from flagcore.vendorkit import cgroup
from flagcore.vendorkit.chip_file import load_chips

CPUINFO = """\
processor\t: {row}
vendor_id\t: {vendor}
cpu family\t: {family}
model name\t: Example CPU
cpu MHz\t\t: 2000.000
physical id\t: 0
core id\t\t: {core}
flags\t\t: fpu sse {flags}

"""


def test_each_available_core_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5}, raising=False)
    assert [device.index for device in discover.devices()] == list(range(cgroup.cores()))
    monkeypatch.setattr(cgroup, "quota_cores", lambda: 2.5)
    assert cgroup.cores() == 2
    monkeypatch.setattr(cgroup, "quota_cores", lambda: 0.3)
    assert cgroup.cores() == 1


def test_devices_share_less_memory_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "memory_bytes", lambda: 2**30)
    devices = discover.devices()
    assert 0 < sum(device.memory_bytes or 0 for device in devices) <= 0.75 * 2**30


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
    assert cgroup.quota_cores(tmp_path) == cores
    assert cgroup.memory_bytes(tmp_path) == memory


@pytest.mark.parametrize(
    ("flags", "vendor", "family", "fp32", "bf16"),
    [
        ("avx2 fma", "GenuineIntel", 6, 32, 16),
        ("avx2 fma avx512f", "GenuineIntel", 6, 64, 32),
        ("avx2 fma avx512f avx512_bf16 amx_bf16", "GenuineIntel", 6, 64, 1024),
        ("avx2 fma avx512f avx512_bf16", "AuthenticAMD", 25, 32, 64),
        ("avx2 fma avx512f avx512_bf16", "AuthenticAMD", 26, 64, 128),
        ("", "GenuineIntel", 6, 8, 4),
    ],
)
def test_peak_follows_the_instruction_set(
    tmp_path: Path, flags: str, vendor: str, family: int, fp32: int, bf16: float
) -> None:
    processor = read(tmp_path, [CPUINFO.format(row=0, core=0, vendor=vendor, family=family, flags=flags)])
    assert processor is not None
    assert (processor.fp32_flops_per_cycle(), processor.bf16_flops_per_cycle()) == (fp32, bf16)
    chip = this_machine(known_chip(), processor)
    assert chip.dense_flops_per_second["fp32"].value == pytest.approx(fp32 * 2e9 * 1.4)
    assert chip.dense_flops_per_second["fp32"].source.kind == "estimated"
    assert chip.has_name("example cpu")
    assert ("emulated" in chip.notes) == (bf16 < fp32)


def test_threads_of_a_core_share_its_peak(tmp_path: Path) -> None:
    rows = [
        CPUINFO.format(row=row, core=row // 2, vendor="GenuineIntel", family=6, flags="avx2 fma") for row in range(4)
    ]
    processor = read(tmp_path, rows)
    assert processor is not None
    assert processor.threads_per_core == 2
    chip = this_machine(known_chip(), processor)
    assert chip.dense_flops_per_second["fp32"].value == pytest.approx(32 * 2e9 * 1.4 / 2)


def test_without_cpuinfo_the_figures_of_the_catalogue_are_used(tmp_path: Path) -> None:
    assert Processor.read(tmp_path) is None
    (chip,) = load_chips("flagcore_cpu")
    assert this_machine(chip, None).dense_flops_per_second["fp32"].source.kind == "measured"


def test_more_ranks_than_cores_share_the_memory() -> None:
    chip = known_chip()
    models = [
        plugin.flagcore_memory_model(
            NodeGroup(chip=chip, nodes=1, devices_per_node=chip.devices_per_node * times), "megatron"
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
    assert environment is not None
    assert environment["OMP_NUM_THREADS"] == "1"


def test_a_reading_of_the_machine_has_memory_and_load() -> None:
    telemetry = plugin.flagcore_telemetry(discover.devices()[0])
    assert telemetry is not None
    reading = telemetry.sample()
    assert reading["memory_used_bytes"] > 2**20
    assert reading["load_average"] >= 0


@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "sglang"])
def test_a_server_runs_on_cores_that_instances_share_and_chooses_its_threads_itself(engine: str) -> None:
    chip = known_chip()
    support = plugin.flagcore_engine_support(chip, engine, None, "serve")
    assert support is not None
    assert support.shared_devices
    assert support.visible_devices is None
    assert "OMP_NUM_THREADS" not in (plugin.flagcore_environment(chip, engine, None, None, "serve") or {})


def read(folder: Path, blocks: list[str]) -> Processor | None:
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text("".join(blocks))
    return Processor.read(folder)


def known_chip() -> Chip:
    (chip,) = plugin.flagcore_chips()
    return chip
