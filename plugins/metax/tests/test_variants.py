"""Other layouts and errors of mx-smi, derived from transcripts of real machines."""

from pathlib import Path

import pytest
from flagcore_metax import smi

TABLE = (Path(__file__).parent / "smi/mx-smi-1.txt").read_text("utf-8")
OLD = (Path(__file__).parent / "smi/mx-smi-4.txt").read_text("utf-8")
FIRST = "| 57W / 350W       | 35C          P0 | 826/65536 MiB       | Available            |"


def test_a_dead_device_is_left_out_and_reported() -> None:
    dead = "| NA / NA          | NA           NA | NA/NA               | Not Available(3)     |"
    known = "| 57W / 350W       | 35C          P0 | 826/65536 MiB       | Not Available(3)     |"
    for line in (dead, known):
        listing = smi.read(TABLE.replace(FIRST, line))
        assert [row.device.index for row in listing.rows] == list(range(1, 8))
        assert listing.left_out == ("GPU 0 (MetaX C500) is not usable: Not Available(3)",)


def test_an_unknown_line_is_reported_in_full() -> None:
    listing = smi.read(TABLE.replace("826/65536 MiB ", "much of it    ", 1))
    assert len(listing.rows) == 7
    (message,) = listing.left_out
    assert "0000:0e:00.0" in message
    assert "much of it" in message


def test_a_truncated_table_is_detected_by_its_device_count() -> None:
    listing = smi.read("\n".join(TABLE.splitlines()[:19]))
    assert 0 < len(listing.rows) < 8
    assert listing.left_out == (f"it counts 8 devices, but lists {len(listing.rows)}",)


@pytest.mark.parametrize("cap", ["97W / NA", "97W / N/A"])
def test_an_unreported_power_cap_is_none(cap: str) -> None:
    reading = smi.read(OLD.replace("31C         44W     ", f"34C         {cap}")).rows[0].reading
    assert (reading["power_watts"], reading["temperature_celsius"]) == (97, 34)
    assert "power_limit_watts" not in reading


@pytest.mark.parametrize("name", ["MetaX C550-PL", "MetaX C500 VF", "MXC600-A", "MetaX X1 Ultra..."])
def test_new_names_are_unchanged(name: str) -> None:
    assert smi.read(TABLE.replace("| 0     MetaX C500 |", f"| 0  {name} |")).rows[0].device.chip == name


def test_persistence_mode_may_follow_the_name() -> None:
    (row,) = smi.read(
        "=================== MetaX System Management Interface Log ===================\n"
        "| 0       MetaX N260             Off | 0000:01:00.0        | 0%            Native |\n"
        "| 37C     29W / 225W              P0 | 666/65536 MiB       | Available            |\n"
    ).rows
    assert (row.device.chip, row.device.memory_bytes) == ("MetaX N260", 65536 << 20)
    assert row.reading["power_limit_watts"] == 225


def test_memory_in_other_units_is_read_in_them() -> None:
    assert smi.read(TABLE.replace("826/65536 MiB ", "0.8/64 GiB    ")).rows[0].device.memory_bytes == 64 << 30
