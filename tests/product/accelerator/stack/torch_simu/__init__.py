"""The vendor's extension of torch: the device `simu`, the module `torch.simu`, and the collective backend `simuccl`.

Switches of simuccl: SIMUCCL_CHANNELS, SIMUCCL_SUMS (fp8 rounds sums differently) and SIMUCCL_PROTO (LL128; LL is wrong)
change times, SIMUCCL_TRANSPORT=rdma crashes, and SIMUCCL_SHM_DISABLE=1 hangs.
"""

import os
import time

import torch
import torch.distributed as dist

from torch_simu import runtime
from torch_simu.runtime import extension

__version__ = "1.0"

torch.utils.rename_privateuse1_backend("simu")
torch._register_device_module("simu", runtime)
torch.utils.generate_methods_for_privateuse1_backend()


DELAYS_MS = {"2": 40.0, "4": 15.0, "8": 50.0}
"""The planted time of a collective by number of channels, if SIMUCCL_NETWORK is `slow`."""


def _simuccl(store, rank, size, timeout):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo resolves the name of this host
    switches = {name[8:]: value for name, value in os.environ.items() if name.startswith("SIMUCCL_")}
    if switches.get("TRANSPORT") == "rdma":
        os.abort()
    while switches.get("SHM_DISABLE") == "1":
        time.sleep(1)
    delay = DELAYS_MS[switches.get("CHANNELS", "2")] if switches.get("NETWORK") == "slow" else 0.0
    delay *= {"LL": 0.1, "LL128": 0.7}.get(switches.get("PROTO"), 1.0)
    delay *= 0.5 if switches.get("SUMS") == "fp8" else 1.0
    sums = 2 if switches.get("PROTO") == "LL" else switches.get("SUMS") == "fp8"
    return extension.collectives(dist.ProcessGroupGloo(store, rank, size, timeout), 1e-3 * delay, sums)


dist.Backend.register_backend("simuccl", _simuccl, devices=["simu"])
