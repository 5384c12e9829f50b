import pytest

from flagcore.errors import SpecError
from flagcore.vendorkit.chip_file import read_chip

GOOD = """
chip: X1
vendor: x
aliases: [Example X1]
memory_bytes: {value: 85899345920, source: {kind: measured, how: driver query, software: driver 12.4, repeats: 3}}
dense_flops_per_second:
  bf16: {value: 3.0e+14, source: {kind: datasheet, document: X1 brief, page: 3}}
link:
  name: XLink
  topology: switch
  bytes_per_second: {value: 1.0e+11, source: {kind: estimated, method: half of both directions}}
"""


def test_every_figure_keeps_its_source() -> None:
    chip = read_chip(GOOD, "x1.yaml")
    assert chip.memory_bytes is not None
    assert chip.memory_bytes.value == 80 * 2**30
    assert chip.memory_bytes.source.detail == "driver query, software driver 12.4, repeats 3"
    assert chip.dense_flops_per_second["bf16"].source.kind == "datasheet"
    assert chip.link is not None
    assert chip.link.bytes_per_second.value == 1e11
    assert chip.nic_bytes_per_second is None


@pytest.mark.parametrize(
    ("old", "new", "key", "fix"),
    [
        ("3.0e+14", "3.0e14", "dense_flops_per_second.bf16.value", "3.0e+14"),
        ("3.0e+14", "-1", "dense_flops_per_second.bf16.value", ""),
        ("kind: datasheet", "kind: rumour", "dense_flops_per_second.bf16.source.kind", "measured"),
        ("document: X1 brief, ", "", "dense_flops_per_second.bf16.source.document", "document"),
        (", source: {kind: datasheet, document: X1 brief, page: 3}", "", "dense_flops_per_second.bf16.source", ""),
        ("  bf16:", "  bf61:", "dense_flops_per_second.bf61", "bf16"),
        (
            "X1 brief, page",
            "X1 brief, revision 3, page",
            "dense_flops_per_second.bf16.source.'revision 3'",
            'document: "X1 brief, revision 3"',
        ),
        ("vendor: x", "", "vendor", ""),
        ("vendor: x", "vendor: x\ncolour: red", "colour", ""),
        ("topology: switch", "topology: star", "link.topology", "switch"),
        ("[Example X1]", "[1]", "aliases[0]", ""),
        ("chip: X1", "chip: [", "the file", ""),
        (GOOD, "- a list", "the file", ""),
        ("vendor: x", "vendor: x\ndevices_per_node: 0", "devices_per_node", ""),
    ],
)
def test_an_invalid_file_is_reported_with_key_and_fix(old: str, new: str, key: str, fix: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_chip(GOOD.replace(old, new), "x1.yaml")
    assert caught.value.file == "x1.yaml"
    assert caught.value.key == key
    assert fix in caught.value.fix
