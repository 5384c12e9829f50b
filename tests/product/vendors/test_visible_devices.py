"""Which devices the processes of trials get where variables restrict them, for each vendor.

`runtime` says what a vendor's runtime does, from its public documentation and source code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

import pytest
from flagcore_serving.launch.start import instances_of
from flagcore_testing import fakes
from flagcore_vllm.profile import ENGINE as VLLM

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
from flagcore.vendorkit.detection import DeviceDetector
from flagcore.vendorkit.rows import Listing, Row
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
        support: EngineSupport = plugin.flagcore_engine_support(plugin.flagcore_chips()[0], engine, None, kind)
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
    servers = instances_of(platform, VLLM, Candidate.of(values))
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
