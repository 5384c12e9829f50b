"""Other layouts and errors of cnmon, derived from transcripts, public notes on version 6, and other parsers."""

from flagcore_cambricon import smi

TABLE = """\
Mon Sep 22 10:11:12 2026
+------------------------------------------------------------------------------+
| CNMON v6.2.29                                                 Driver v6.2.29 |
+-------------------------------+----------------------+-----------------------+
| Card  VF  Name       Firmware |               Bus-Id | Util        Ecc-Error |
| Fan   Temp      Pwr:Usage/Cap |         Memory-Usage | Mode     Compute-Mode |
|===============================+======================+=======================|
| 0     /   MLU590-M9    v1.5.0 |         0000:0F:00.0 | 0%                  0 |
| N/A   35C        105 W/ 550 W | 33654 MiB/ 98304 MiB | FULL          Default |
+-------------------------------+----------------------+-----------------------+
| 1     /   MLU590-M9DG  v1.1.1 |         0000:13:00.0 | N/A               N/A |
| N/A   N/A            N/A/ N/A |     0 MiB/ 81920 MiB | FULL          Default |
+-------------------------------+----------------------+-----------------------+
| 2     0   MLU590-M9    v1.5.0 |         0000:14:00.0 | 0%                  0 |
| N/A   34C        100 W/ 550 W |     0 MiB/ 12288 MiB | MIM           Default |
+-------------------------------+----------------------+-----------------------+
"""


def test_the_table_of_version_6_is_read_completely() -> None:
    listing = smi.read(TABLE)
    assert [(row.device.chip, row.device.memory_bytes) for row in listing.rows] == [
        ("MLU590-M9", 98304 << 20),
        ("MLU590-M9DG", 81920 << 20),
    ]
    assert listing.rows[0].reading["power_limit_watts"] == 550
    assert listing.rows[1].reading == {"memory_used_bytes": 0}
    assert listing.left_out == ("card 2 (MLU590-M9) is virtual function 0 of another",)


def test_another_tools_table_is_ignored() -> None:
    assert smi.read(TABLE.replace("CNMON v6", "OTHER v6")).rows == ()


def test_a_card_with_unreadable_memory_is_reported() -> None:
    listing = smi.read(TABLE.replace("98304 MiB", "xxxxx MiB"))
    assert [row.device.index for row in listing.rows] == [1]
    assert any("xxxxx MiB" in line for line in listing.left_out)
    assert smi.read(TABLE.replace("33654 MiB/ 98304 MiB", "N/A")).rows == listing.rows, "power is not memory"


def test_information_as_json_is_read() -> None:
    card = '{"CardNum": 0, "ProductName": "MLU590-M9", "PhysicalMemUsage": {"Total": "98304", "Used": "0"}}'
    listing = smi.read(f'{{"CnmonInfo": [{card}, {{"CardNum": 1}}]}}')
    assert [(row.device.chip, row.device.memory_bytes) for row in listing.rows] == [("MLU590-M9", 98304 << 20)]
    assert len(listing.left_out) == 1
    assert smi.read('{"CnmonInfo": 3}') == smi.read("{") == smi.read("")
