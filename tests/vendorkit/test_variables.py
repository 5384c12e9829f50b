"""Variables of a vendor's stack: for which task and release they are given, and what they say of this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flagcore.domain.chip import Source
from flagcore.domain.knob import in_versions
from flagcore.vendorkit.variables import Variable, adapters, fill, interface
from tests import small

VARIABLE = Variable(
    name="X",
    value="1",
    meaning="?",
    source=Source(kind="published", detail="?"),
)


def test_multi_node_variables_are_not_set_on_one_node() -> None:
    one = small.task()
    two = replace(one, cluster=replace(one.cluster, groups=(replace(one.cluster.groups[0], nodes=2),)))
    several = replace(VARIABLE, several_nodes=True)
    assert [several.applies_to(task) for task in (None, one, two)] == [False, False, True]


def test_a_variable_is_left_out_with_a_conflicting_setting() -> None:
    limited = replace(VARIABLE, unless="use_megatron_fsdp")
    assert limited.applies_to(small.task())
    assert not limited.applies_to(small.task(settings={"use_megatron_fsdp": True}))


@pytest.mark.parametrize(
    ("versions", "release", "holds"),
    [("", "0.1", True), (">=0.11,<0.13", "0.12.0+corex", True), (">=0.11,<0.13", "0.13", False), ("<1", None, True)],
)
def test_a_release_range_matches_a_release_inside_it_or_unknown(
    versions: str, release: str | None, holds: bool
) -> None:
    assert in_versions(versions, release) == holds


def test_the_machines_network_is_filled_in_or_the_variable_is_unset(tmp_path: Path) -> None:
    assert fill("{interface}", tmp_path) == ""
    route = tmp_path / "proc/net/route"
    route.parent.mkdir(parents=True)
    route.write_text("Iface\tDestination\tGateway\nib0\t0000A8C0\t0\nbond0\t00000000\t01\n")
    for name, state in (("mlx5_10", "4: ACTIVE"), ("mlx5_2", "4: ACTIVE"), ("mlx5_3", "1: DOWN")):
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    assert interface(tmp_path) == "bond0"
    assert adapters(tmp_path) == "mlx5_2,mlx5_10"
    assert fill("{interface}", tmp_path) == "bond0"
