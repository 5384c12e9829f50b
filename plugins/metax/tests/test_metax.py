import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from flagcore_metax import discover, hooks
from flagcore_metax.discover import DETECTOR
from flagcore_metax.hooks import ISLAND, c500_topology, island_size, peer_memory_problem, plugin
from flagcore_testing import PluginConformance, fakes
from flagcore_testing.examples import task_on
from flagcore_testing.package import saved_outputs
from flagcore_vendorkit.rows import adapter_share, devices_per_adapter, islands, near_adapters, read_matrix

from flagcore.domain.chip import Chip, with_network
from flagcore.domain.cluster import Cluster, NodeGroup
from tests.checks import collective_seconds, collectives, given


class TestMetax(PluginConformance):
    @pytest.fixture
    def plugin(self) -> object:
        return hooks.plugin


@pytest.mark.parametrize(("nodes", "devices", "sizes"), [(1, 8, [4, 8]), (2, 8, [4, 8, 16]), (1, 4, [4]), (1, 2, [2])])
def test_a_c500_node_has_islands_of_four(nodes: int, devices: int, sizes: list[int]) -> None:
    topology = given(plugin.flagcore_topology(NodeGroup(chip=chip("C500"), nodes=nodes, devices_per_node=devices)))
    assert [level.devices for level in topology.levels] == sizes


PAIRS = """\
        GPU0    GPU1    GPU2    GPU3
GPU0    X       MX      NODE    NODE
GPU1    MX      X       NODE    NODE
GPU2    NODE    NODE    X       MX
GPU3    NODE    NODE    MX      X
"""


def test_islands_come_from_this_machine_if_its_tool_works() -> None:
    groups = (NodeGroup(chip=chip("C500"), nodes=1, devices_per_node=devices) for devices in (4, 8))
    with fakes.machine({"mx-smi": fakes.prints(PAIRS)}):
        four, eight = map(plugin.flagcore_topology, groups)
    assert [level.devices for level in given(four).levels] == [2, 4]
    assert [level.devices for level in given(eight).levels] == [4, 8]  # another node than this one


@pytest.mark.parametrize(
    "matrix", ["", PAIRS.replace("MX", "SYS"), PAIRS.replace("NODE    MX      X", "NODE    ??      X")]
)
def test_without_islands_in_the_matrix_the_published_ones_are_used(matrix: str) -> None:
    assert island_size(NodeGroup(chip=chip("C500"), nodes=1, devices_per_node=4), matrix) == 4


def test_network_adapters_come_from_the_user_then_the_machine_then_published(tmp_path: Path) -> None:
    text = saved_outputs(Path(__file__).parent / "smi")["mx-smi-3.txt"]
    matrix = given(read_matrix(text))
    assert adapter_share(matrix, text, tmp_path) is None
    for adapter in range(6):
        rate = tmp_path / f"sys/class/infiniband/mlx5_{adapter}/ports/1/rate"
        rate.parent.mkdir(parents=True)
        rate.write_text("400 Gb/sec (4X NDR)\n")
    here = adapter_share(matrix, text, tmp_path)
    assert here == 2 * 50e9 / 4  # two adapters for the four devices of an island
    shares = []
    for known in (chip("C500"), with_network(chip("C500"), 5e10)):
        topology = given(c500_topology(NodeGroup(chip=known, nodes=2, devices_per_node=8), adapters=here))
        shares.append(topology.levels[-1].bytes_per_second)
    assert shares == [25e9, 5e10]


def test_missing_peer_memory_is_reported_only_with_devices(tmp_path: Path) -> None:
    assert not peer_memory_problem(tmp_path / "another machine")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/mxcd").touch()
    assert "GPUDirect RDMA of MetaX is off" in peer_memory_problem(tmp_path)
    (tmp_path / "fine/dev").mkdir(parents=True)
    (tmp_path / "fine/dev/mxcd").touch()
    (tmp_path / "fine/sys/kernel/mm/memory_peers/mxcd").mkdir(parents=True)
    (tmp_path / "fine/sys/kernel/mm/memory_peers/mxcd/version").touch()
    assert not peer_memory_problem(tmp_path / "fine")


@pytest.mark.parametrize(("nodes", "count"), [(1, 0), (2, 1)])
def test_missing_peer_memory_is_noted_for_tasks_on_several_nodes(
    nodes: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flagcore_metax.hooks.peer_memory_problem", lambda: "it is off")
    task = task_on(chip("C500"))
    cluster = Cluster(groups=(replace(task.cluster.groups[0], nodes=nodes),))
    advice = plugin.flagcore_check_task(replace(task, cluster=cluster), None)
    assert (advice.notes if advice else ()).count("it is off") == count


def test_a_c550_node_is_flat() -> None:
    assert plugin.flagcore_topology(NodeGroup(chip=chip("C550"), nodes=1, devices_per_node=8)) is None


@pytest.mark.parametrize(
    ("name", "nodes", "ranks", "payload", "measured", "within"),
    [
        ("C500", 1, 8, 2**26, 1944.65e-6, 0.001),
        ("C500", 1, 8, 2**30, 28874.52e-6, 0.001),
        ("C500", 2, 16, 2**24, 837.04e-6, 0.2),  # two nodes: not in the table
        ("C500", 2, 16, 2**28, 7489.42e-6, 0.2),
        ("C550", 1, 8, 64_000_000, 64e6 / 135e9, 0.01),
    ],
)
def test_published_all_reduce_times_are_predicted(
    name: str, nodes: int, ranks: int, payload: int, measured: float, within: float
) -> None:
    found = collective_seconds(collectives(plugin, name, nodes), "all_reduce", payload, ranks)
    assert found == pytest.approx(measured, rel=within)


def test_a_pair_across_the_islands_of_a_c500_is_slower_than_a_pair_inside() -> None:
    inside, across = (collective_seconds(collectives(plugin, "C500"), "all_gather", 1e9, 2, each) for each in (1, 4))
    assert across > 1.5 * inside


def chip(name: str) -> Chip:
    return next(chip for chip in plugin.flagcore_chips("") if chip.name == name)


TEXTS = saved_outputs(Path(__file__).parent / "smi")


def test_another_vendors_mx_smi_is_distinguished() -> None:
    assert not discover.is_metax(TEXTS["moffett-mx-smi-1.txt"])


def test_a_rebranded_device_stays_unknown() -> None:
    (row,) = discover.read(TEXTS["ht-smi-1.txt"]).rows
    assert not any(chip.has_name(row.device.chip) for chip in plugin.flagcore_chips(""))


def test_the_board_number_is_not_the_gpu_index() -> None:
    table = TEXTS["mx-smi-1.txt"].replace("| 1     MetaX C500 | 1 ", "| 0     MetaX C500 | 1 ")
    assert [row.device.index for row in discover.read(table).rows] == list(range(8))


def test_a_banner_another_locale_and_carriage_returns_do_not_matter() -> None:
    table = "欢迎使用 MACA\n" + TEXTS["mx-smi-1.txt"].replace("Wed Feb 11", "2026年 2月11日 星期三").replace(
        "\n", "\r\n"
    )
    assert discover.read(table).rows == discover.read(TEXTS["mx-smi-1.txt"]).rows


def test_a_list_reports_names_without_memory() -> None:
    (row,) = discover.read(TEXTS["mx-smi-8.txt"]).rows
    assert (row.device.chip, row.device.memory_bytes, row.device.uuid) == ("MXC550", None, "GPU-abc-123")
    assert discover.read(TEXTS["mx-smi-8.txt"].replace("Available", "Not Available(5)")).rows == ()


def test_output_that_counts_devices_but_lists_none_is_reported() -> None:
    title = "=================== MetaX System Management Interface Log ===================\n"
    count = "Attached GPUs                                     : 2\nGPU#0  MXC500  0000:08:00.0\n"
    assert discover.read(title + count).left_out == ("it counts 2 devices, but lists 0",)


def test_uuids_are_listed_by_index() -> None:
    assert discover.uuids(TEXTS["mx-smi-8.txt"]) == {0: "GPU-abc-123"}


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
    (chip,) = {chip.name for each in found for chip in plugin.flagcore_chips("") if chip.has_name(each["name"])}
    assert chip == "C500"
    assert {each["memory"] for each in found} == {65536}
    (topology,) = json.loads(TEXTS["topology-gpustack-1.json"])
    assert {sum(distance <= 5 for distance in row) for row in topology["devices_distances"]} == {ISLAND}


def test_the_shipped_all_reduce_matches_the_log() -> None:
    (curve,) = yaml.safe_load((Path(discover.__file__).parent / "costs/c500/collectives.yaml").read_text())["curves"]
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
        listing = discover.read(TABLE.replace(FIRST, line))
        assert [row.device.index for row in listing.rows] == list(range(1, 8))
        assert listing.left_out == ("GPU 0 (MetaX C500) is not usable: Not Available(3)",)


def test_an_unknown_line_is_reported_in_full() -> None:
    listing = discover.read(TABLE.replace("826/65536 MiB ", "much of it    ", 1))
    assert len(listing.rows) == 7
    (message,) = listing.left_out
    assert "0000:0e:00.0" in message
    assert "much of it" in message


def test_a_truncated_table_is_detected_by_its_device_count() -> None:
    listing = discover.read("\n".join(TABLE.splitlines()[:19]))
    assert 0 < len(listing.rows) < 8
    assert listing.left_out == (f"it counts 8 devices, but lists {len(listing.rows)}",)


@pytest.mark.parametrize("cap", ["97W / NA", "97W / N/A"])
def test_an_unreported_power_cap_is_none(cap: str) -> None:
    reading = discover.read(OLD.replace("31C         44W     ", f"34C         {cap}")).rows[0].reading
    assert (reading["power_watts"], reading["temperature_celsius"]) == (97, 34)
    assert "power_limit_watts" not in reading


@pytest.mark.parametrize("name", ["MetaX C550-PL", "MetaX C500 VF", "MXC600-A", "MetaX X1 Ultra..."])
def test_new_names_are_unchanged(name: str) -> None:
    assert discover.read(TABLE.replace("| 0     MetaX C500 |", f"| 0  {name} |")).rows[0].device.chip == name


def test_persistence_mode_may_follow_the_name() -> None:
    (row,) = discover.read(
        "=================== MetaX System Management Interface Log ===================\n"
        "| 0       MetaX N260             Off | 0000:01:00.0        | 0%            Native |\n"
        "| 37C     29W / 225W              P0 | 666/65536 MiB       | Available            |\n"
    ).rows
    assert (row.device.chip, row.device.memory_bytes) == ("MetaX N260", 65536 << 20)
    assert row.reading["power_limit_watts"] == 225


def test_memory_in_other_units_is_read_in_them() -> None:
    assert discover.read(TABLE.replace("826/65536 MiB ", "0.8/64 GiB    ")).rows[0].device.memory_bytes == 64 << 30
