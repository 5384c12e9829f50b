"""Variables of a vendor's stack: for which task and release they are given."""

from dataclasses import replace

import pytest

from flagcore.domain.chip import Source
from flagcore.domain.knob import in_versions
from flagcore.vendorkit.engines import Variable
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
