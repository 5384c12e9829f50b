"""Which chip a task runs on, and what plugins say of it."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flagcore_testing.toy import ENGINE

from flagcore.contracts import Platform
from flagcore.domain.chip import Chip, Device, Fact, Support
from flagcore.domain.engine import EngineSupport, ForcedSetting, PreferredSetting, RefusedValues, TaskAdvice, ValueRule
from flagcore.domain.launch import Launch
from flagcore.domain.spec import ClusterSpec, Spec, Task
from flagcore.errors import NoDevice
from flagcore.hooks import hookimpl
from flagcore.plugins import LoadedPlugins
from flagcore.tuner.devices import require_devices
from flagcore.tuner.stages.complete import complete_by_plugins
from flagcore.tuner.stages.launch import prepared_launch
from tests import tasks

SHARED = EngineSupport(support=Support.YES, device_type="cpu", distributed_backend="gloo", shared_devices=True)
CPU = replace(tasks.CHIP, name="plain-cpu", aliases=(), devices_per_node=2)


def plugin(chip: Chip, count: int = 0, *, called: str = "", support: object = None, **hooks: Any) -> SimpleNamespace:
    """A plugin for one chip of which `count` devices are here, under the name `called`."""
    answer = support or replace(SHARED, device_type="xpu", shared_devices=False)
    found = [Device(index=n, chip=called or chip.name, memory_bytes=(40 + n) << 30) for n in range(count)]
    usual = {"chips": lambda: [chip], "devices": lambda: found}
    known = chip.name
    return tasks.plugin(**usual, engine_support=lambda chip, engine: answer if chip.name == known else None, **hooks)


def spec(**cluster: Any) -> Spec:
    return replace(tasks.task().spec, cluster=ClusterSpec(**cluster))


def completed(spec: Spec, plugins: LoadedPlugins) -> Platform:
    return complete_by_plugins(spec, plugins, ENGINE)


def loaded(**plugins: object) -> LoadedPlugins:
    found = LoadedPlugins.of(plugins)
    assert found.failures == ()
    return found


def test_a_named_chip_asks_only_its_plugin_for_devices() -> None:
    other, asked = replace(tasks.CHIP, name="other-chip", aliases=()), list[str]()
    plugins = loaded(x=plugin(tasks.CHIP, 4), y=tasks.plugin(chips=lambda: [other], devices=lambda: asked.append("y")))
    assert completed(spec(chip="test-chip"), plugins).task.cluster.groups[0].devices == 4
    assert asked == []
    assert completed(spec(), plugins).task.cluster.groups[0].devices == 4
    assert asked == ["y"]


def test_local_devices_are_the_default_cluster() -> None:
    platform = completed(spec(), loaded(x=plugin(tasks.CHIP, 4, called="TEST accelerator 9000")))
    group = platform.task.cluster.groups[0]
    assert (group.chip.name, group.devices) == ("test-chip", 4)
    assert group.memory_bytes == 40 << 30
    assert platform.support.device_type == "xpu"


def test_a_chip_can_be_planned_for_without_the_hardware() -> None:
    platform = completed(spec(chip="TEST-CHIP", nodes=2), loaded(x=plugin(tasks.CHIP)))
    assert platform.task.cluster.groups[0].devices == 16
    assert platform.costs.memory.capacity_bytes() == 80e9
    with pytest.raises(NoDevice, match=r"no test-chip on this machine.*`flag tune --fidelity estimate`"):
        require_devices(platform, ())


SECOND = replace(tasks.CHIP, name="other", aliases=())


@pytest.mark.parametrize(
    ("cluster", "plugins", "name", "devices", "memory"),
    [
        ({"devices_per_node": 2, "memory_bytes_per_device": 1 << 30}, [plugin(tasks.CHIP, 4)], "test-chip", 2, 1 << 30),
        ({}, [plugin(CPU, 64, support=SHARED), plugin(tasks.CHIP, 1)], "test-chip", 1, 40 << 30),
        ({}, [plugin(SECOND, 2), plugin(tasks.CHIP, 3)], "test-chip", 3, 40 << 30),
        ({"chip": "other"}, [plugin(SECOND, 2), plugin(tasks.CHIP, 3)], "other", 2, 40 << 30),
    ],
    ids=["the cluster of the spec", "a CPU comes last", "more devices", "a chip of the spec"],
)
def test_the_chip_is_that_of_the_spec_or_the_accelerator_with_most_devices(
    cluster: dict[str, Any], plugins: list[SimpleNamespace], name: str, devices: int, memory: int
) -> None:
    found = loaded(**{f"p{place}": each for place, each in enumerate(plugins)})
    group = completed(spec(**cluster), found).task.cluster.groups[0]
    assert (group.chip.name, group.devices, group.memory_bytes) == (name, devices, memory)


@pytest.mark.parametrize(
    ("cluster", "plugins", "words"),
    [
        ({"chip": "nosuch"}, [plugin(tasks.CHIP), plugin(CPU, 2)], "'nosuch' .* known chips: plain-cpu, test-chip"),
        ({"groups": (ClusterSpec(chip="test-chip"), ClusterSpec(chip="nosuch"))}, [plugin(tasks.CHIP)], r"groups\[1\]"),
        ({}, [plugin(tasks.CHIP)], "no device at all"),
        ({}, [], "no device at all"),
        ({}, [plugin(tasks.CHIP, 1, called="Strange 1")], "found Strange 1"),
        *(
            ({}, [plugin(tasks.CHIP, 1, support=EngineSupport(support=each, reason="no send"))], "toy.*no send")
            for each in (Support.IMPOSSIBLE, Support.NOT_YET)
        ),
    ],
)
def test_a_chip_that_is_missing_or_unsupported_is_refused_with_the_reason(
    cluster: dict[str, Any], plugins: list[SimpleNamespace], words: str
) -> None:
    with pytest.raises(NoDevice, match=words):
        completed(spec(**cluster), loaded(**{f"p{place}": each for place, each in enumerate(plugins)}))


def test_the_cpu_is_not_used_if_a_vendors_tool_failed() -> None:
    def failing() -> list[Device]:
        logging.getLogger("flagcore_x").warning("x-smi failed with exit status 9")
        return []

    vendor, cpu = plugin(tasks.CHIP), plugin(CPU, 64, support=SHARED)
    vendor.flagcore_devices = hookimpl(failing)
    with pytest.raises(NoDevice, match=r"only plain-cpu is left.*x-smi failed with exit status 9.*chip: plain-cpu"):
        completed(spec(), loaded(a=cpu, z=vendor))
    for requested, plugins in ((spec(chip="plain-cpu"), loaded(a=cpu, z=vendor)), (spec(), loaded(a=cpu))):
        assert completed(requested, plugins).task.cluster.groups[0].chip.name == "plain-cpu"
    assert completed(spec(), loaded(a=cpu, b=plugin(SECOND, 1), z=vendor)).task.cluster.groups[0].chip.name == "other"


def test_more_devices_than_available_can_be_planned_but_not_run() -> None:
    plugins = loaded(x=plugin(tasks.CHIP, 2))
    platform = completed(spec(devices_per_node=8), plugins)
    with pytest.raises(NoDevice, match="devices_per_node = 8, but this machine has 2"):
        require_devices(platform, plugins.devices())


def test_processes_may_outnumber_the_cores_of_a_shared_machine() -> None:
    plugins = loaded(x=plugin(replace(CPU, devices_per_node=2), 2, support=SHARED))
    crowded, each_one = (completed(spec(devices_per_node=count), plugins) for count in (8, 2))
    require_devices(crowded, plugins.devices())
    seconds = [float(each.costs.kernels.memory_seconds(np.array([1e9]))[0]) for each in (crowded, each_one)]
    assert seconds[0] == pytest.approx(4 * seconds[1])


def test_unknown_support_allows_planning_only() -> None:
    silent = SimpleNamespace(**{k: v for k, v in vars(plugin(tasks.CHIP, 1)).items() if "support" not in k})
    platform = completed(spec(), loaded(x=silent))
    assert platform.support.support is Support.UNKNOWN
    with pytest.raises(NoDevice, match="no installed plugin defines how toy runs on test-chip"):
        require_devices(platform, (Device(index=0, chip="test-chip"),) * 8)


OTHER = replace(
    tasks.CHIP,
    name="other",
    aliases=(),
    memory_bytes=Fact(value=32e9, source=tasks.SOURCE),
    nic_bytes_per_second=Fact(value=10e9, source=tasks.SOURCE),
)
GROUPS = (ClusterSpec(chip="test-chip", nodes=2, nic_bytes_per_second=50e9), ClusterSpec(chip="other"))
SEND = np.array([2.0**26]), np.array([2]), np.array([1])


def test_each_node_group_has_its_own_chip_and_costs() -> None:
    platform = completed(spec(groups=GROUPS), loaded(x=plugin(tasks.CHIP), y=plugin(OTHER)))
    cluster, costs = platform.task.cluster, platform.costs
    assert (cluster.chips, cluster.devices) == ("16 x test-chip + 8 x other", 24)
    assert list(costs.further) == [16]
    assert [each.memory.capacity_bytes() for each in costs.groups] == [80e9, 32e9]


def test_messages_between_node_groups_take_the_slower_network() -> None:
    plugins = loaded(x=plugin(tasks.CHIP), y=plugin(OTHER))
    costs = completed(spec(groups=GROUPS), plugins).costs
    both = completed(spec(groups=(GROUPS[1], GROUPS[1])), plugins).costs
    single = completed(spec(chip="other", nodes=2), plugins).costs
    slow = single.collectives.seconds("send", SEND[0], SEND[1], np.array([8]))
    assert costs.between.seconds("send", *SEND) == both.between.seconds("send", *SEND) == slow
    assert single.between is None
    unknown = replace(GROUPS[0], nic_bytes_per_second=None)
    for groups in ((unknown, GROUPS[1]), (GROUPS[1], unknown)):
        between = completed(spec(groups=groups), plugins).costs.between
        assert between.seconds("send", *SEND) == slow  # the assumed rate is above that of the other group


def test_messages_between_vendors_without_a_common_library_go_through_the_hosts() -> None:
    foreign = replace(OTHER, vendor="elsewhere")
    found = {}
    for names in ((), ("a-lib",), ("a-lib", "b-lib")):
        support = EngineSupport(support=Support.YES, cross_vendor_libraries=names)
        own = EngineSupport(support=Support.YES, cross_vendor_libraries=("b-lib",))
        plugins = loaded(x=plugin(tasks.CHIP, support=own), y=plugin(foreign, support=support))
        platform = completed(spec(groups=GROUPS), plugins)
        found[names] = platform.costs.between.seconds("send", *SEND), len(platform.support.notes)
        costs = platform.costs
    direct = completed(spec(groups=GROUPS), loaded(x=plugin(tasks.CHIP), y=plugin(OTHER))).costs.between
    assert found["a-lib", "b-lib"] == (direct.seconds("send", *SEND), 0)
    copies = sum(each.kernels.host_copy_seconds(SEND[0]) for each in costs.groups)
    for names in ((), ("a-lib",)):
        assert found[names][0] == pytest.approx(direct.seconds("send", *SEND) + copies, rel=0.05)
        assert found[names][1] == 1


def test_a_link_that_joins_many_nodes_does_not_reach_other_groups() -> None:
    rack = replace(OTHER, link=replace(tasks.CHIP.link, domain_size=64))  # type: ignore[type-var]
    plugins = loaded(x=plugin(tasks.CHIP), y=plugin(rack))
    found = [completed(spec(groups=(GROUPS[0], each)), plugins).costs.between for each in GROUPS[1:]]
    plain = completed(spec(groups=GROUPS), loaded(x=plugin(tasks.CHIP), y=plugin(OTHER))).costs.between
    assert found[0].seconds("send", *SEND) == plain.seconds("send", *SEND)


def test_values_refused_by_one_chip_are_refused_on_a_mixed_cluster() -> None:
    refused = RefusedValues(name="no_cp", knob="context_parallel_size", values=(2,), reason="it cannot")
    plugins = loaded(x=plugin(tasks.CHIP), y=plugin(OTHER, check_task=refusing(refused)))
    assert completed(spec(groups=GROUPS), plugins).value_rules == (refused,)
    stopped_early = EngineSupport(support=Support.IMPOSSIBLE)
    with pytest.raises(NoDevice, match="toy does not run on other"):
        completed(spec(groups=GROUPS), loaded(x=plugin(tasks.CHIP), y=plugin(OTHER, support=stopped_early)))


def test_a_mixed_cluster_runs_only_the_users_command() -> None:
    plugins = loaded(x=plugin(tasks.CHIP, 8), y=plugin(OTHER))
    platform = completed(spec(groups=GROUPS), plugins)
    with pytest.raises(NoDevice, match=r"16 x test-chip \+ 8 x other; give a train.command"):
        require_devices(platform, plugins.devices())
    own = replace(platform.task.spec, work=replace(platform.task.spec.train, command=("run",)))
    with_command = replace(platform, task=replace(platform.task, spec=own))
    require_devices(with_command, plugins.devices())
    with pytest.raises(NoDevice, match="on this machine"):
        require_devices(with_command, ())


def test_two_groups_of_one_chip_are_predicted_as_one_cluster() -> None:
    plugins = loaded(y=plugin(OTHER))
    one = completed(spec(chip="other", nodes=2), plugins)
    two = completed(spec(groups=(GROUPS[1], GROUPS[1])), plugins)
    layouts = ((8, 1, 2, 0), (4, 2, 2, 0), (8, 1, 2, 1))
    rows = [
        {
            "data_parallel_size": data,
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "num_layers_per_virtual_pipeline_stage": each or None,
        }
        for data, tensor, pipeline, each in layouts
    ]
    for row in rows:
        figures = [ENGINE.predict(each.task, ENGINE.columns(each.task, row), each.costs).row(0) for each in (one, two)]
        assert figures[0] == figures[1]
        assert figures[0].step_time_s is not None


def test_the_users_variables_win_and_conflicts_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(chip: Chip, engine: str, task: Task) -> Mapping[str, str]:
        nodes = {"NODES": str(task.cluster.groups[0].nodes)}
        return {"OF_SHELL": "plugin", "OF_SPEC": "plugin", "SAME": "1", **nodes}

    monkeypatch.setenv("OF_SHELL", "mine")
    monkeypatch.setenv("OF_SPEC", "shell's")
    monkeypatch.setenv("SAME", "1")
    mine = replace(spec(), envs={"OF_SPEC": "spec's"})
    platform = completed(mine, loaded(x=plugin(tasks.CHIP, 2, environment=environment)))
    assert platform.conflicts == (
        "OF_SHELL: mine from this shell overrides plugin from a plugin",
        "OF_SPEC: spec's from envs of the spec overrides plugin from a plugin",
    )
    launched = prepared_launch(platform, Launch(argv=("train",), folder="/x")).environment
    assert launched == {"OF_SHELL": "mine", "OF_SPEC": "spec's", "SAME": "1", "NODES": "1"}


def refusing(*rules: ValueRule) -> Any:
    """A hook that returns these rules for any task."""
    return lambda task: TaskAdvice(rules=rules)


def advising(advice: TaskAdvice) -> SimpleNamespace:
    """A plugin that gives this advice on tasks of more than one node."""
    return tasks.plugin(check_task=lambda task: advice if task.cluster.groups[0].nodes > 1 else None)


def test_a_plugin_can_refuse_several_devices_and_mixed_chips() -> None:
    def check_task(task: Task) -> TaskAdvice | None:
        kinds = len({group.chip.name for group in task.cluster.groups})
        reason = f"{kinds} kinds, {task.cluster.devices} devices"
        return TaskAdvice(impossible=reason if task.cluster.devices > 1 else "")

    plugins = loaded(a=tasks.plugin(check_task=check_task), x=plugin(tasks.CHIP), y=plugin(CPU))
    assert completed(spec(chip="test-chip", devices_per_node=1), plugins).task.cluster.devices == 1
    with pytest.raises(NoDevice, match="1 kinds, 2 devices"):
        completed(spec(chip="test-chip", devices_per_node=2), plugins)
    groups = tuple(ClusterSpec(chip=name, devices_per_node=1) for name in ("test-chip", "plain-cpu"))
    mixed = replace(spec(chip="test-chip"), cluster=ClusterSpec(groups=groups))
    with pytest.raises(NoDevice, match="2 kinds, 2 devices"):
        completed(mixed, plugins)


def test_a_plugin_can_leave_out_the_first_steps() -> None:
    plugins = loaded(a=advising(TaskAdvice(warmup=3)), x=plugin(tasks.CHIP))
    job = spec(chip="test-chip", nodes=2)
    control = completed(job, plugins).task.spec.control
    assert (control.warmup_iters, control.train_iters) == (3, job.control.train_iters + 2)


def test_a_plugin_can_set_missing_settings_of_a_task() -> None:
    stored = PreferredSetting(setting="settings.fp8_margin", value=1, reason="kept")
    set_ = PreferredSetting(setting="settings.attention_softmax_in_fp32", value=True, reason="sums are in bf16")
    forced = ForcedSetting(name="must", setting="settings.sequence_parallel", value=True, reason="nothing else works")
    worst = RefusedValues(name="no_pipelines", knob="pipeline_model_parallel_size", values=(8,), reason="no links")
    advice = TaskAdvice(preferred=(stored, set_), notes=("nodes are far apart",))
    chip = plugin(tasks.CHIP, check_task=refusing(worst, forced))
    requested = spec(chip="test-chip", nodes=2)
    work = replace(requested.work, command=("train.py",), settings={"fp8_margin": 2})
    platform = completed(replace(requested, work=work), loaded(a=advising(advice), x=chip))
    expected = {"fp8_margin": 2, "attention_softmax_in_fp32": True, "sequence_parallel": True}
    assert platform.task.spec.work.settings == expected  # type: ignore[union-attr]
    (note, further) = platform.support.notes
    assert note == "settings.attention_softmax_in_fp32 = True: sums are in bf16"
    assert further == "nodes are far apart"
    assert platform.value_rules == (worst, forced)


def test_cpus_are_those_of_the_host_with_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flagcore.domain.host.quota_cores", lambda: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)

    def cpus(devices: int, **cluster: Any) -> int | None:
        with_chip = loaded(vendor=plugin(tasks.CHIP, devices))
        return completed(spec(chip=tasks.CHIP.name, **cluster), with_chip).task.cluster.groups[0].cpus_per_node

    assert cpus(devices=2) == 3
    assert cpus(devices=2, cpus_per_node=64) == 64
    assert cpus(devices=0) is None


def rates(**flops: float) -> dict[str, Any]:
    source = tasks.CHIP.dense_flops_per_second["bf16"].source
    return {name: Fact(value=value, source=source) for name, value in flops.items()}


@pytest.mark.parametrize(
    ("flops", "support", "precision"),
    [
        (rates(fp32=1e13, fp16=2e14, bf16=2e14, fp8=4e14), {}, "bf16"),
        (rates(fp32=1e13, fp16=2e14), {}, "fp16"),
        (rates(fp32=1e13), {}, "fp32"),
        ({}, {}, "bf16"),
        (rates(fp32=1e11, bf16=2e11, fp16=3e11), {"shared_devices": True}, "bf16"),
        (rates(fp32=3.6e10, bf16=7.5e8, fp16=7e8), {"shared_devices": True}, "fp32"),
        (rates(fp32=1e11, fp16=2e11), {"shared_devices": True}, "fp32"),
        (rates(fp32=1e13, fp16=2e14, bf16=2e14), {"refused": ("bf16",)}, "fp16"),
    ],
)
def test_an_automatic_precision_is_the_fastest_in_which_the_chip_trains(
    flops: dict[str, Any], support: dict[str, Any], precision: str
) -> None:
    chip = replace(tasks.CHIP, dense_flops_per_second=flops)
    refused = RefusedValues(name="no", knob="precision", values=support.get("refused", ()), reason="none")
    own = replace(SHARED, shared_devices=support.get("shared_devices", False))
    plugins = loaded(acme=plugin(chip, 2, support=own, check_task=refusing(refused)))
    platform = completed(automatic(spec()), plugins)
    assert platform.task.spec.train.precision == precision
    assert f"train.precision = {precision}" in platform.precision_reason
    assert ("48 times" in platform.precision_reason) == (precision == "fp32" and "bf16" in flops)
    assert completed(spec(), plugins).precision_reason == ""


def test_an_automatic_precision_is_one_of_all_chips() -> None:
    new = replace(tasks.CHIP, name="N1", aliases=(), dense_flops_per_second=rates(fp32=1e13, fp16=2e14, bf16=2e14))
    old = replace(tasks.CHIP, name="O1", aliases=(), dense_flops_per_second=rates(fp32=1e13, fp16=1e14))
    groups = (ClusterSpec(chip="N1", devices_per_node=2), ClusterSpec(chip="O1", devices_per_node=2))
    platform = completed(automatic(spec(groups=groups, nodes=2)), loaded(new=plugin(new), old=plugin(old)))
    assert platform.task.spec.train.precision == "fp16"


def automatic(requested: Spec) -> Spec:
    return replace(requested, work=replace(requested.train, precision="auto"))


def test_a_chip_is_predicted_with_figures_that_were_measured_on_this_machine() -> None:
    measured = replace(tasks.CHIP, dense_flops_per_second=rates(bf16=1.5e14))
    own = plugin(tasks.CHIP, 2, measured_chip=lambda chip: measured if chip.name == tasks.CHIP.name else None)
    plugins = loaded(acme=own)
    assert completed(spec(), plugins).task.cluster.groups[0].chip.dense_flops_per_second == rates(bf16=1.5e14)
    assert plugins.measured_chip(CPU) == CPU
