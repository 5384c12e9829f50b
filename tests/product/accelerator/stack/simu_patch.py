"""Redirects calls of torch.cuda to the device `simu`, for Megatron, which names the device "cuda" in many functions.

Vendors distribute such a module: Moore Threads' musa_patch, Ascend's torch_npu.contrib.transfer_to_npu. Import it after
torch_simu and before Megatron.
"""

import functools

import torch
from torch_simu import runtime

for _name in dir(runtime):
    if not _name.startswith("__") and hasattr(torch.cuda, _name):
        setattr(torch.cuda, _name, getattr(runtime, _name))


def _device(value):
    """Return `value` with the device simu in place of cuda."""
    if isinstance(value, str) and value.startswith("cuda"):
        return value.replace("cuda", "simu", 1)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("simu", *(() if value.index is None else (value.index,)))
    return value


def _on_simu(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = _device(kwargs["device"])
        return function(*map(_device, args), **kwargs)

    return call


for _name in ("arange", "as_tensor", "empty", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"):
    setattr(torch, _name, _on_simu(getattr(torch, _name)))
for _name in ("scalar_tensor", "tensor", "zeros", "empty_like", "full_like", "ones_like", "rand_like", "zeros_like"):
    setattr(torch, _name, _on_simu(getattr(torch, _name)))
for _name in ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "type"):
    setattr(torch.Tensor, _name, _on_simu(getattr(torch.Tensor, _name)))
torch.nn.Module.to = _on_simu(torch.nn.Module.to)

torch.Tensor.cuda = torch.Tensor.simu
torch.nn.Module.cuda = torch.nn.Module.simu
torch.Tensor.is_cuda = property(lambda tensor: tensor.device.type == "simu")

_plain_type = torch.Tensor.type


def _type(tensor, *args, **kwargs):
    """Return names such as torch.cuda.FloatTensor, by which Megatron's optimizers sort parameters."""
    result = _plain_type(tensor, *args, **kwargs)
    return result.replace("torch.simu.", "torch.cuda.") if isinstance(result, str) else result


torch.Tensor.type = _type
