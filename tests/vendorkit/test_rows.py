import pytest

from flagcore.domain.chip import Device
from flagcore.vendorkit.rows import Row, parse_memory, parse_power, read_table, reading

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


@pytest.mark.parametrize(
    ("watts", "figures"), [("61.5", {"power_watts": 61.5}), ("65535", {}), ("N/A", {}), (None, {})]
)
def test_a_sensor_that_the_driver_cannot_read_has_no_figure(watts: str | None, figures: dict[str, float]) -> None:
    assert reading(watts=watts) == figures


@pytest.mark.parametrize("cell", ["826/65536 MiB", "826MiB / 65536MiB", "826 / 65536MiB"])
def test_the_unit_of_memory_may_be_reported_once_for_used_and_total(cell: str) -> None:
    assert parse_memory(cell) == (826 * MIB, 65536 * MIB)


def test_the_lines_below_a_device_are_no_unknown_devices() -> None:
    def head(parts: list[str]) -> str | None:
        return parts[0] if parts[0].startswith("GPU") else None

    table = "| GPU 0 | on |\n| 0 more | 0000:03:00.0 | 1 |\n| 1 more | 0000:05:00.0 | 1 |\n"
    row = Row(device=Device(index=0, chip="A1"))
    assert read_table(table, head, lambda *_: row, lines_per_device=3).left_out == ()
    assert len(read_table(table, head, lambda *_: row).left_out) == 1
