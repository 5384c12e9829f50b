"""Each check is tried against a plugin that breaks exactly it: it fails, with place and advice, and no other does."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagcore.testing.checks import CHECKS
from flagcore.testing.kit import Check, run_all
from tests.testing.faults import FAULTS
from tests.testing.faulty import HOOKS, Fault, broken, healthy, imported

WITH_TOOLS = {"detection", "transcripts", "telemetry", "engines"}
"""Modules of checks that start faked tools: tried where they, or one of them, are to fail."""
SLOW = {"importing", "asking"}
"""Modules of checks that start a process of their own."""


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return healthy(tmp_path_factory.mktemp("healthy"))


def test_a_healthy_plugin_with_everything_passes_all_checks_but_those_that_have_nothing_to_look_at(acme: Path) -> None:
    with imported(acme) as plugin:
        results = list(run_all(CHECKS, plugin))
    assert [result for result in results if result.state == "failed"] == []
    assert {result.check for result in results if result.state == "skipped"} == {
        "given_log_lines_are_recognised",
        "what_was_measured_is_said_to_have_run_on_hardware",
        "nothing_is_left_to_fill_in",
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.check)
def test_a_fault_fails_the_check_that_is_for_it(
    tmp_path: Path, acme: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with imported(broken(tmp_path, acme, fault)) as plugin:
        failed = {result.check: result for result in run_all(_near(fault), plugin) if result.state == "failed"}
    assert fault.check in failed
    if "*" not in fault.also:
        assert set(failed) == {fault.check, *fault.also}, failed
    found = failed[fault.check]
    assert fault.says in found.message
    assert fault.fix in found.fix
    assert found.fix


def _near(fault: Fault) -> list[Check]:
    """Return the checks that are tried: all but slow ones that look at something else."""
    room = {check.__name__: check.__module__.rpartition(".")[2] for check in CHECKS}
    tools = room[fault.check] in WITH_TOOLS
    return [
        check
        for check in CHECKS
        if check.__name__ == fault.check
        or (
            room[check.__name__] not in {*SLOW} - {room[fault.check]}
            and (tools or room[check.__name__] not in ("detection", "transcripts"))
        )
    ]


def test_the_network_may_be_faster_than_a_bridge_within_the_node(tmp_path: Path, acme: Path) -> None:
    bridged = Fault(
        "an_outer_level_is_not_faster_than_the_innermost_one",
        HOOKS,
        "    return topology_of(group) if",
        "    from dataclasses import replace\n"
        "    from flagcore.domain.cluster import Topology\n"
        "    if _mine(group.chip) and (group.nodes, group.devices_per_node) == (4, 8):\n"
        "        node, network = topology_of(group).levels\n"
        "        bridge = replace(node, name='bridge', bytes_per_second=0.96 * network.bytes_per_second)\n"
        "        return Topology(levels=(replace(node, name='island', devices=4), bridge, network))\n"
        "    return topology_of(group) if",
        "",
    )
    (check,) = (each for each in CHECKS if each.__name__ == bridged.check)
    with imported(broken(tmp_path, acme, bridged)) as plugin:
        (group,) = (each for each in plugin.groups() if each.devices == 32)
        found = plugin.loaded.topology(group)
        assert found is not None
        assert [level.name for level in found.levels][:2] == ["island", "bridge"]
        assert [result.state for result in run_all([check], plugin)] == ["passed"]
