"""The vendor's extension of torch: the device `simu`, the module `torch.simu`, and the collective backend `simuccl`."""

import os

import torch
import torch.distributed as dist

from torch_simu import runtime
from torch_simu.extension import extension

__version__ = "1.0"

torch.utils.rename_privateuse1_backend("simu")
torch._register_device_module("simu", runtime)
torch.utils.generate_methods_for_privateuse1_backend()


def _simuccl(store, rank, size, timeout):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo resolves the name of this host
    return extension.collectives(dist.ProcessGroupGloo(store, rank, size, timeout))


dist.Backend.register_backend("simuccl", _simuccl, devices=["simu"])
