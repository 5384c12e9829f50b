"""Forms of `topo -m` that tools print beside those of the plugins' transcripts."""

import pytest

from flagcore.vendorkit.matrix import islands, near_adapters, read_matrix

PLAIN = """\
        GPU0    GPU1    NIC0    NIC1    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV4     PIX     SYS     0-31,64-95      0               N/A
GPU1    NV4      X      SYS     PXB     32-63,96-127    1               N/A
NIC0    PIX     SYS      X      SYS
NIC1    SYS     PXB     SYS      X

Legend:
"""


def test_an_underlined_header_and_carriage_returns_do_not_matter() -> None:
    lines = PLAIN.splitlines()
    underlined = "\r\n".join([f"\t\x1b[4m{lines[0].strip()}\x1b[0m", *lines[1:]])
    assert read_matrix(underlined) == read_matrix(PLAIN) is not None


@pytest.mark.parametrize(
    "names", [("mlx5_0", "mlx5_bond_0"), ("bnxt_re0", "bnxt_re1"), ("roceo1", "irdma0"), ("ib0", "NIC9")]
)
def test_adapters_may_have_custom_names(names: tuple[str, str]) -> None:
    matrix = read_matrix(PLAIN.replace("NIC0", names[0]).replace("NIC1", names[1]))
    assert matrix is not None
    assert near_adapters(matrix) == {0: (names[0],), 1: (names[1],)}


def test_one_device_alone_is_a_matrix_with_no_links() -> None:
    matrix = read_matrix("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n")
    assert matrix is not None
    assert (matrix.devices, dict(matrix.links)) == ((0,), {})


def test_devices_called_mlu_are_joined_by_their_own_links() -> None:
    matrix = read_matrix(
        "        MLU0  MLU1  MLU2  MLU3  CPU Affinity\n"
        "MLU0    X     MLK   CPU   CPU   0-31\nMLU1    MLK   X     CPU   CPU   0-31\n"
        "MLU2    CPU   CPU   X     MLK   0-31\nMLU3    CPU   CPU   MLK   X     0-31\n"
    )
    assert matrix is not None
    assert islands(matrix, "MLK") == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "text",
    [
        "",
        PLAIN.replace("GPU1    NV4", "GPU1    SYS"),
        PLAIN.replace("GPU1", "MLU1"),
        PLAIN.replace("GPU1    NV4      X ", "GPU2    NV4      X "),
        "No devices were found\n",
        "GPU0\tGPU0\n",
    ],
)
def test_an_inconsistent_matrix_is_refused(text: str) -> None:
    assert read_matrix(text) is None
