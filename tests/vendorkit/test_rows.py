import pytest

from flagcore.vendorkit.rows import parse_memory, parse_power

MIB = 2**20


@pytest.mark.parametrize(
    ("cell", "watts"),
    [
        ("P0   70W / 700W", ("70", "700")),
        ("61 / 450 W", ("61", "450")),
        ("61/450W", ("61", "450")),
        ("P0 / 450W", ("450", None)),
        ("N/A / 450W", (None, "450")),
        ("45C  61W", ("61", None)),
        ("826/65536 MiB", (None, None)),
    ],
)
def test_the_unit_of_power_may_be_reported_once_for_use_and_limit(
    cell: str, watts: tuple[str | None, str | None]
) -> None:
    assert parse_power(cell) == watts


@pytest.mark.parametrize("cell", ["826/65536 MiB", "826MiB / 65536MiB", "826 / 65536MiB"])
def test_the_unit_of_memory_may_be_reported_once_for_used_and_total(cell: str) -> None:
    assert parse_memory(cell) == (826 * MIB, 65536 * MIB)
