"""Which devices the processes of trials get where variables restrict them, and which ones are found without a tool."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
from flagcore_testing import fakes
from flagcore_vendorkit import machine
from flagcore_vendorkit.detection import DeviceDetector
from flagcore_vendorkit.rows import Listing, Row
from flagcore_vllm.engine import ENGINE as VLLM

from engines.serving.tests.engines.tasks import serving
from flagcore import plugins
from flagcore.contracts import Platform
from flagcore.domain.chip import Device
from flagcore.domain.engine import EngineSupport, device_variables
from flagcore.domain.space import Candidate
from flagcore.domain.spec import ClusterSpec
from flagcore.plugins.entry_points import capture_warnings
from flagcore.tuner.devices import divide, parallel_probe_ranks, with_selected_devices
from flagcore.tuner.stages.complete import complete_by_plugins
from tests.product import tasks
from tests.product.vendors.test_simulated_nodes import METAX


@dataclass(frozen=True)
class Vendor:
    """The variables that mean the same, the vendor's first; `outer` restricts below them."""

    name: str
    variables: tuple[str, ...]
    outer: str = ""
    has_uuids: bool = False

    @property
    def detector(self) -> DeviceDetector:
        found: DeviceDetector = import_module(f"flagcore_{self.name}.discover").DETECTOR
        return found

    def support(self, engine: str = "vllm", kind: str = "serve") -> EngineSupport:
        plugin = import_module(f"flagcore_{self.name}.hooks").plugin
        support: EngineSupport = plugin.flagcore_engine_support(plugin.flagcore_chips("")[0], engine, None, kind)
        return support

    @property
    def stacks(self) -> list[Vendor]:
        """Software that reads only one of the variables, such as vLLM's plugin of the vendor or FlagGems."""
        return [replace(self, variables=(name,)) for name in self.variables]


HIP = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
ROCR = "ROCR_VISIBLE_DEVICES"
VENDORS = (
    Vendor("nvidia", ("CUDA_VISIBLE_DEVICES",), has_uuids=True),
    Vendor("amd", HIP, ROCR, has_uuids=True),
    Vendor("hygon", HIP, ROCR, has_uuids=True),
    Vendor("metax", ("MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), has_uuids=True),
    Vendor("iluvatar", ("CUDA_VISIBLE_DEVICES", "ILUVATAR_VISIBLE_DEVICES"), has_uuids=True),
    Vendor("cambricon", ("MLU_VISIBLE_DEVICES",)),
    Vendor("ascend", ("ASCEND_RT_VISIBLE_DEVICES",)),
    Vendor("mthreads", ("MUSA_VISIBLE_DEVICES",)),
    Vendor("kunlunxin", ("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    Vendor("enflame", ("TOPS_VISIBLE_DEVICES",)),
    Vendor("thead", ("CUDA_VISIBLE_DEVICES",), has_uuids=True),
)
EACH_VARIABLE = [pytest.param(each, name, id=f"{each.name}-{name}") for each in VENDORS for name in each.variables]
UUIDS = {index: f"GPU-{index}0c0ffee" for index in range(8)}


def runtime(vendor: Vendor, variables: Mapping[str, str], present: Sequence[int]) -> list[int]:
    """Return the devices that a process with `variables` has, by their numbers on the machine."""
    devices = {str(index): index for index in present}

    def chosen(setting: str) -> list[int]:
        found = []
        for word in setting.split(","):
            match = [at for name, at in devices.items() if word in (name, UUIDS[at][: max(5, len(word))])]
            if not match:
                break
            found += match
        return found

    if vendor.outer in variables:  # the layer above counts its devices from 0
        devices = {str(place): index for place, index in enumerate(chosen(variables[vendor.outer]))}
    values = [variables[name] for name in vendor.variables if name in variables]
    values = [value for value in values if value or not vendor.outer]  # HIP ignores empty variables
    return chosen(values[0]) if values else list(devices.values())


def detected(vendor: Vendor, variables: Mapping[str, str], present: Sequence[int] = range(8)) -> tuple[Device, ...]:
    rows = tuple(Row(device=Device(index=index, chip="test-chip")) for index in present)
    known = (lambda: UUIDS) if vendor.has_uuids else None
    detector = replace(vendor.detector, listing=lambda seconds: Listing(rows), uuids=known)
    return detector.devices(environment=variables)


def on(vendor: Vendor, devices: tuple[Device, ...], variables: Mapping[str, str]) -> Platform:
    """Two servers of two devices, or a training job on as many, on detected devices."""
    task = serving("vllm", devices=4)
    task = replace(task, spec=replace(task.spec, envs=dict(variables)))
    return replace(tasks.platform(task), support=vendor.support(), devices=devices)


def check(vendor: Vendor, variables: Mapping[str, str], present: Sequence[int] = range(8)) -> list[int]:
    """Check the processes that start where `variables` are set; return the devices that are listed."""
    devices = detected(vendor, variables, present)
    listed = [device.index for device in devices]
    assert listed == runtime(vendor, variables, present)
    platform = on(vendor, devices, {})
    values = {**VLLM.defaults(platform.task), "instances": 2, "tensor_model_parallel_size": 2}
    servers = VLLM.instances(platform, Candidate.of(values))
    processes = [(each.environment, listed[2 * n : 2 * n + 2]) for n, each in enumerate(servers)]
    processes += [(with_selected_devices(platform).task.spec.envs, listed[:4])]
    processes += [(with_selected_devices(platform, (each,)).task.spec.envs, [each.index]) for each in devices]
    processes += [(device_variables(vendor.support(), devices[:3]), listed[:3])]
    for own, expected in processes:
        child = {**variables, **own}
        assert all(runtime(stack, child, present) == expected for stack in (vendor, *vendor.stacks))
        assert child.get(vendor.outer) == variables.get(vendor.outer)
    assert parallel_probe_ranks(platform) == len(devices)
    return listed


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda vendor: vendor.name)
def test_devices_are_those_of_the_tool_if_nothing_restricts_them(vendor: Vendor) -> None:
    assert check(vendor, {}) == list(range(8))
    assert check(vendor, {}, (0, 1, 2, 4, 7)) == [0, 1, 2, 4, 7]
    supports = [vendor.support(), vendor.support("sglang"), vendor.support("megatron", "train")]
    assert all(set(each.visible_devices) == set(vendor.variables) for each in supports)


@pytest.mark.parametrize(("vendor", "name"), EACH_VARIABLE)
def test_every_variable_that_restricts_devices_counts(vendor: Vendor, name: str) -> None:
    assert check(vendor, {name: "4,5,6,7"}) == [4, 5, 6, 7]
    assert check(vendor, {name: "7,1,4,2,0"}, (0, 1, 2, 4, 7)) == [7, 1, 4, 2, 0]
    assert check(vendor, {name: "5,4,2,1,3,0"}, (0, 1, 2, 4, 5)) == [5, 4, 2, 1]
    if vendor.has_uuids:
        assert check(vendor, {name: "GPU-40c0ffee,GPU-7,GPU-1,GPU-2"}) == [4, 7, 1, 2]


@pytest.mark.parametrize(("vendor", "name"), EACH_VARIABLE)
def test_no_device_is_left_where_the_runtime_leaves_none(vendor: Vendor, name: str) -> None:
    for value in ("", "-1"):
        found = [device.index for device in detected(vendor, {name: value})]
        assert found == runtime(vendor, {name: value}, range(8))


@pytest.mark.parametrize("vendor", [each for each in VENDORS if not each.has_uuids], ids=lambda each: each.name)
def test_a_uuid_that_the_tool_does_not_print_selects_no_device(vendor: Vendor) -> None:
    for name in vendor.variables:
        assert detected(vendor, {name: "GPU-40c0ffee"}) == ()
        assert [each.index for each in detected(vendor, {name: "3,GPU-40c0ffee,1"})] == [3]


@pytest.mark.parametrize("vendor", [each for each in VENDORS if len(each.variables) > 1], ids=lambda each: each.name)
def test_the_vendors_variable_goes_before_that_of_its_other_layers(vendor: Vendor) -> None:
    first, second = vendor.variables
    assert check(vendor, {first: "4,5,6,7", second: "0,1"}) == [4, 5, 6, 7]


@pytest.mark.parametrize("vendor", [each for each in VENDORS if each.outer], ids=lambda each: each.name)
def test_numbers_count_within_the_devices_of_the_layer_below(vendor: Vendor) -> None:
    assert check(vendor, {ROCR: "4,5,6,7"}) == [4, 5, 6, 7]
    assert check(vendor, {ROCR: "7,6,5,4,2", "HIP_VISIBLE_DEVICES": "3,1,2,4"}) == [4, 6, 5, 2]
    assert check(vendor, {ROCR: "0,2,4,5", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (0, 1, 2, 4, 5)) == [0, 2, 4, 5]
    assert check(vendor, {ROCR: "GPU-4,GPU-1,6,7", "HIP_VISIBLE_DEVICES": "GPU-1,0,2,3"}) == [1, 4, 6, 7]
    assert check(vendor, {ROCR: "4,5,6,7", "HIP_VISIBLE_DEVICES": ""}) == [4, 5, 6, 7]
    assert detected(vendor, {ROCR: "4,5", "HIP_VISIBLE_DEVICES": "4,5"}) == ()
    assert detected(vendor, {ROCR: ""}) == ()


def test_a_device_that_is_named_twice_is_listed_once() -> None:
    (nvidia, *_) = VENDORS
    assert [each.index for each in detected(nvidia, {"CUDA_VISIBLE_DEVICES": "3,3,GPU-3,1"})] == [3, 1]


def test_variables_of_the_spec_go_before_those_of_the_shell() -> None:
    servers = serving("vllm", devices=2).spec
    spec = replace(servers, envs={"CUDA_VISIBLE_DEVICES": "3,1"}, cluster=ClusterSpec())
    with fakes.machine({"mx-smi": fakes.prints(METAX)}, CUDA_VISIBLE_DEVICES="0,1"):
        loaded = plugins.load_plugins()
        assert [each.index for each in loaded.devices() if each.chip == "MetaX C500"] == [0, 1]
        engine = tasks.ENGINES[spec.work.engine]
        here, there = (complete_by_plugins(each, loaded, engine) for each in (replace(spec, envs={}), spec))
    assert [each.index for each in here.devices] == [0, 1]
    assert [each.index for each in there.devices] == [each.index for each in there.telemetry] == [3, 1]
    chosen = with_selected_devices(there).task.spec.envs
    assert chosen == dict.fromkeys(("MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "3,1")
    alone = replace(
        there.task.spec, work=replace(servers.serve, cards=1), control=replace(spec.control, parallel_trials="auto")
    )
    groups, _ = divide(replace(there, task=replace(there.task, spec=alone)))
    assert [with_selected_devices(each).task.spec.envs["MACA_VISIBLE_DEVICES"] for each in groups] == ["3", "1"]


@pytest.mark.parametrize(("words", "indices", "warnings"), [("S0,S2", [], 1), ("1,0", [1, 0], 0), ("1,S0", [1], 1)])
def test_a_word_that_is_neither_index_nor_uuid_is_reported(words: str, indices: list[int], warnings: int) -> None:
    detector = Vendor("metax", ("MACA_VISIBLE_DEVICES",)).detector
    with fakes.machine({"mx-smi": fakes.prints(METAX)}), fakes.warnings_enabled(), capture_warnings() as messages:
        found = detector.devices(environment={"MACA_VISIBLE_DEVICES": words})
    assert [device.index for device in found] == indices
    assert len(messages) == warnings


TORCH = """
from types import SimpleNamespace
__version__ = {version!r}
def get_device_properties(index):
    return SimpleNamespace(name={name!r}, total_memory={memory_bytes})
{kind} = SimpleNamespace(device_count=lambda: 2, get_device_properties=get_device_properties)
{attributes}
print("a banner of the image {{with braces}}")
"""
STRANGER = TORCH.format(
    kind="cuda", version="2.10.0+nobody1.0", name="Nobody N-100", memory_bytes=2**36, attributes="nobody = 1"
)


@dataclass(frozen=True)
class Stack:
    """A vendor's machine: the device file, what torch is and reports of a device, and the PCI vendor id."""

    name: str
    device_file: str
    pci_vendor: int
    chip: str
    memory_bytes: int
    version: str
    kind: str = "cuda"
    attributes: tuple[str, ...] = ()

    @property
    def detector(self) -> DeviceDetector:
        found: DeviceDetector = import_module(f"flagcore_{self.name}.discover").DETECTOR
        return found

    @property
    def torch(self) -> str:
        """The source of a module that stands for the vendor's torch."""
        extra = "\n".join(f"{name} = object()" for name in self.attributes if name != self.kind)
        facts = {"version": self.version, "name": self.chip, "memory_bytes": self.memory_bytes}
        return TORCH.format(kind=self.kind, attributes=extra, **facts)


VENDORS_WITH_TOOLS = (
    Stack("nvidia", "dev/nvidia0", 0x10DE, "NVIDIA H200", 143771 << 20, "2.10.0+cu129"),
    Stack("metax", "dev/mxcd", 0x9999, "MetaX C500", 64 << 30, "2.10.0+metax3.8.1.0"),
    Stack("iluvatar", "dev/iluvatar0", 0x1E3E, "Iluvatar BI-V150", 32 << 30, "2.7.1+corex.4.4.0", "cuda", ("corex",)),
    Stack("cambricon", "dev/cambricon_dev0", 0xCABC, "MLU590-M9", 96 << 30, "2.7.1+cpu", "mlu", ("mlu",)),
    Stack("amd", "dev/kfd", 0x1002, "AMD Instinct MI300X", 192 << 30, "2.11.0+rocm7.2"),
    Stack("ascend", "dev/davinci0", 0x19E5, "Ascend910B3", 64 << 30, "2.10.0+cpu", "npu", ("npu",)),
    Stack("mthreads", "dev/mtgpu.0", 0x1ED5, "MTT S5000", 80 << 30, "2.11.0", "musa", ("musa",)),
    Stack("hygon", "dev/kfd", 0x1D94, "BW1000 64G", 64 << 30, "2.9.0+das.opt1.dtk2604"),
    Stack("kunlunxin", "dev/xpu0", 0x1D22, "P800 OAM", 96 << 30, "2.9.0+cu129"),
    Stack("enflame", "dev/gcu0", 0x1E36, "Enflame S60", 42976 << 20, "2.10.0+cpu", "gcu", ("gcu",)),
    Stack("thead", "dev/alixpu_ppu0", 0x1DED, "PPU-ZW810E", 96 << 30, "2.9.0+ppu2.0.0"),
)
vendors = pytest.mark.parametrize("vendor", VENDORS_WITH_TOOLS, ids=lambda vendor: vendor.name)


def listed(root: Path, torch: str, files: Sequence[Stack], **variables: str) -> dict[str, list[tuple[str, int | None]]]:
    """Return the devices that each vendor's plugin finds on a node with a torch of this source and device files."""
    (root / "modules").mkdir(exist_ok=True)
    (root / "modules" / "torch.py").write_text(torch)
    for each in files:
        (root / each.device_file).parent.mkdir(exist_ok=True)
        (root / each.device_file).touch()
    with fakes.machine(PYTHONPATH=str(root / "modules"), **variables):
        found = {each.name: each.detector.devices(root) for each in VENDORS_WITH_TOOLS}
    return {name: [(each.chip, each.memory_bytes) for each in devices] for name, devices in found.items() if devices}


@vendors
def test_torch_identifies_the_vendor_of_devices(vendor: Stack, tmp_path: Path) -> None:
    assert listed(tmp_path, vendor.torch, VENDORS_WITH_TOOLS) == {vendor.name: [(vendor.chip, vendor.memory_bytes)] * 2}


def test_names_of_older_drivers_are_accepted_from_torch(tmp_path: Path) -> None:
    older = replace(VENDORS_WITH_TOOLS[0], chip="Tesla V100-SXM2-32GB")
    assert listed(tmp_path, older.torch, VENDORS_WITH_TOOLS[:1]) == {"nvidia": [(older.chip, older.memory_bytes)] * 2}


@vendors
def test_devices_of_torch_have_the_names_in_the_variable(vendor: Stack, tmp_path: Path) -> None:
    first, *_ = vendor.detector.visible
    names = "MIG-b,MIG-a" if vendor.name == "nvidia" else "4,5"
    said = f"import os\nassert os.environ[{first!r}] == {names!r}\n" + vendor.torch
    assert list(listed(tmp_path, said, [vendor], **{first: names})) == [vendor.name]
    with fakes.machine(PYTHONPATH=str(tmp_path / "modules")):
        found = vendor.detector.devices(tmp_path, {**os.environ, first: names})
    assert [(each.index, each.selector) for each in found] == list(enumerate(names.split(",")))


@pytest.mark.parametrize("torch", ["import os\nos.abort()\n", "raise ImportError\n", STRANGER])
def test_a_torch_that_crashes_is_missing_or_is_of_a_stranger_lists_no_device(tmp_path: Path, torch: str) -> None:
    assert listed(tmp_path, torch, VENDORS_WITH_TOOLS) == {}


@vendors
def test_the_users_choice_of_a_vendor_goes_before_all(vendor: Stack, tmp_path: Path) -> None:
    assert listed(tmp_path, vendor.torch, [vendor], GEMS_VENDOR="somebody_else") == {}
    assert list(listed(tmp_path, vendor.torch, [vendor], GEMS_VENDOR=vendor.name.upper())) == [vendor.name]


@vendors
def test_devices_only_on_the_pci_bus_are_reported_and_not_listed(
    vendor: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:0e:00.0"
    folder.mkdir(parents=True)
    files = {"vendor": f"{vendor.pci_vendor:#06x}", "class": "0x120000", "device": "0x4001"}
    for name, value in (files | {"current_link_width": "8", "max_link_width": "16"}).items():
        (folder / name).write_text(value + "\n")
    assert list(machine.pci_devices(vendor.pci_vendor, tmp_path)) == [folder]
    assert not list(machine.pci_devices(0x1234, tmp_path))
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "torch.py").write_text(STRANGER)
    with fakes.machine(PYTHONPATH=str(tmp_path / "modules")):
        (problem,) = vendor.detector.problems(tmp_path)[-1:]
    assert {"0000:0e:00.0", "8", "16"} <= set(problem.split())
    (folder / "current_link_width").write_text("16\n")
    assert machine.narrow_links(vendor.pci_vendor, tmp_path) == ()
    monkeypatch.setattr(fakes, "quiet", nullcontext)
    assert listed(tmp_path, vendor.torch, []) == {}
    assert ["on the PCI bus" in record.getMessage() for record in caplog.records] == [True]
