"""Output of mx-smi in addition to the kit's checks: of real machines (tests/smi), and layouts derived from them."""

import json
from pathlib import Path

import pytest
import yaml
from flagcore_metax import smi
from flagcore_metax.discover import DETECTOR
from flagcore_metax.hooks import plugin
from flagcore_metax.islands import ISLAND
from flagcore_testing import fakes
from flagcore_testing.package import saved_outputs
from flagcore_vendorkit.rows import devices_per_adapter, islands, near_adapters, read_matrix

from tests.checks import given

TEXTS = saved_outputs(Path(__file__).parent / "smi")


def test_another_vendors_mx_smi_is_distinguished() -> None:
    assert not smi.is_metax(TEXTS["moffett-mx-smi-1.txt"])


def test_a_rebranded_device_stays_unknown() -> None:
    (row,) = smi.read(TEXTS["ht-smi-1.txt"]).rows
    assert not any(chip.has_name(row.device.chip) for chip in plugin.flagcore_chips())


def test_the_board_number_is_not_the_gpu_index() -> None:
    table = TEXTS["mx-smi-1.txt"].replace("| 1     MetaX C500 | 1 ", "| 0     MetaX C500 | 1 ")
    assert [row.device.index for row in smi.read(table).rows] == list(range(8))


def test_a_banner_another_locale_and_carriage_returns_do_not_matter() -> None:
    table = "欢迎使用 MACA\n" + TEXTS["mx-smi-1.txt"].replace("Wed Feb 11", "2026年 2月11日 星期三").replace(
        "\n", "\r\n"
    )
    assert smi.read(table).rows == smi.read(TEXTS["mx-smi-1.txt"]).rows


def test_a_list_reports_names_without_memory() -> None:
    (row,) = smi.read(TEXTS["mx-smi-8.txt"]).rows
    assert (row.device.chip, row.device.memory_bytes, row.device.uuid) == ("MXC550", None, "GPU-abc-123")
    assert smi.read(TEXTS["mx-smi-8.txt"].replace("Available", "Not Available(5)")).rows == ()


def test_output_that_counts_devices_but_lists_none_is_reported() -> None:
    title = "=================== MetaX System Management Interface Log ===================\n"
    count = "Attached GPUs                                     : 2\nGPU#0  MXC500  0000:08:00.0\n"
    assert smi.read(title + count).left_out == ("it counts 2 devices, but lists 0",)


def test_uuids_are_listed_by_index() -> None:
    assert smi.uuids(TEXTS["mx-smi-8.txt"]) == {0: "GPU-abc-123"}


@pytest.mark.parametrize("name", ["mx-smi-2.txt", "mx-smi-3.txt", "mx-smi-7.txt"])
def test_a_c500_node_has_two_islands_of_four(name: str) -> None:
    matrix = given(read_matrix(TEXTS[name]))
    assert islands(matrix, "MX") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert matrix.links[0, 4] == ("SYS" if name == "mx-smi-7.txt" else "NODE")


def test_four_devices_share_two_adapters_and_the_storage_adapters_are_unassigned() -> None:
    matrix = given(read_matrix(TEXTS["mx-smi-3.txt"]))
    assert near_adapters(matrix)[0] == ("NIC0", "NIC1")
    assert near_adapters(matrix)[7] == ("NIC2", "NIC3")
    assert devices_per_adapter(matrix) == {"NIC0": 4, "NIC1": 4, "NIC2": 4, "NIC3": 4}


def test_devices_of_another_detector_match_the_catalogue() -> None:
    found = json.loads(TEXTS["detect-gpustack-1.json"])
    (chip,) = {chip.name for each in found for chip in plugin.flagcore_chips() if chip.has_name(each["name"])}
    assert chip == "C500"
    assert {each["memory"] for each in found} == {65536}
    (topology,) = json.loads(TEXTS["topology-gpustack-1.json"])
    assert {sum(distance <= 5 for distance in row) for row in topology["devices_distances"]} == {ISLAND}


def test_the_shipped_all_reduce_matches_the_log() -> None:
    (curve,) = yaml.safe_load((Path(smi.__file__).parent / "costs/c500/collectives.yaml").read_text())["curves"]
    logged = [line.split()[1:] for line in TEXTS["mccl-allreduce-1.txt"].splitlines() if "bfloat16" in line]
    assert [int(words[0]) for words in logged] == curve["payload_bytes"]
    assert [float(words[5]) for words in logged] == pytest.approx([each * 1e6 for each in curve["seconds"]], rel=1e-4)


def test_uuids_are_queried_if_visible_devices_use_them() -> None:
    table = fakes.prints(TEXTS["mx-smi-1.txt"])
    lines = "\n".join(f"GPU#{index}  MXC500  0000:2b:00.0  Available (UUID: GPU-{index}abc)" for index in range(8))
    script = f'if [ "$1" = -L ]; then\n{fakes.prints(lines)}\nelse\n{table}\nfi'
    with fakes.machine({"mx-smi": script}, CUDA_VISIBLE_DEVICES="GPU-5abc,GPU-1abc"):
        assert [device.index for device in DETECTOR.devices()] == [5, 1]


TABLE = TEXTS["mx-smi-1.txt"]
OLD = TEXTS["mx-smi-4.txt"]
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
