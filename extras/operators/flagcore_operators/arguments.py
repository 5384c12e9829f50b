"""Arguments of calls as plain data, tensors like them, and the comparison of results."""

import math
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""The largest difference of a right result, relative to the largest value of the reference. It is about 10 times what
another order of sums changes, and below the differences of the next narrower format. If results have several formats,
it is that of the narrowest."""
FLOATS = tuple(TOLERANCE)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Unsupported(Exception):
    """An argument that cannot be made again."""


def encode(value: Any, *, with_grad: bool = False) -> Any:
    """Return an argument as plain data. Raises Unsupported."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [encode(each, with_grad=with_grad) for each in value]
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        if value.dtype not in (*FLOATS, *INTEGERS, torch.bool):
            raise Unsupported(str(value.dtype))
        found = {"tensor": list(value.shape), "strides": list(value.stride()), "dtype": _name(value.dtype)}
        return found | ({"grad": True} if with_grad and value.requires_grad else {})
    if isinstance(value, torch.nn.Module):
        return {"layer": dict(_of_layer(value))}
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, torch.device):
        return {"device": True}
    if isinstance(value, (torch.layout, torch.memory_format)):
        return {"torch": _name(value)}
    raise Unsupported(type(value).__name__)


def _of_layer(layer: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what an operator may read of its layer: numbers, formats and tensors."""
    own = [*vars(layer).items(), *layer.named_buffers(recurse=False), *layer.named_parameters(recurse=False)]
    for name, value in own:
        if value is None or isinstance(value, (bool, int, float, torch.Tensor, torch.dtype)):
            with suppress(Unsupported):
                yield name, encode(value)


def with_range(encoded: Any, value: Any) -> Any:
    """Return encoded arguments with the range of their integer tensors, which may be indices.

    Other tensors are marked if they have no negative values, for which operators such as logarithms have no result.
    """
    if isinstance(encoded, list):
        return [with_range(*pair) for pair in zip(encoded, value, strict=True)]
    if isinstance(value, torch.Tensor) and value.dtype in INTEGERS and value.numel():
        return {**encoded, "low": int(value.min()), "high": int(value.max())}
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() and float(value.min()) >= 0.0:
        return {**encoded, "positive": True}
    return encoded


def decode(encoded: Any, device: torch.device, generator: torch.Generator) -> Any:
    """Return an argument like the encoded one, with random values."""
    if isinstance(encoded, list):
        return [decode(each, device, generator) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "layer" in encoded:
        return SimpleNamespace(**{name: decode(each, device, generator) for name, each in encoded["layer"].items()})
    if "tensor" in encoded:
        return _tensor(encoded, generator).to(device).requires_grad_(encoded.get("grad", False))
    return device if "device" in encoded else getattr(torch, encoded.get("dtype") or encoded["torch"])


def _tensor(encoded: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
    shape, strides, dtype = encoded["tensor"], encoded["strides"], getattr(torch, encoded["dtype"])
    elements = (
        1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    )
    if dtype in FLOATS:
        storage = torch.randn(elements, generator=generator).to(dtype)
        storage = storage.abs() if "positive" in encoded else storage
    elif dtype is torch.bool:
        storage = torch.rand(elements, generator=generator) > 0.5
    else:
        low, high = encoded.get("low", 0), encoded.get("high", 1)
        storage = torch.randint(low, high + 1, (elements,), generator=generator).to(dtype)
    return storage.as_strided(shape, strides)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def size(encoded: Any) -> float:
    """Return the number of elements of all tensors in encoded arguments."""
    if isinstance(encoded, list):
        return math.fsum(map(size, encoded))
    return float(math.prod(encoded["tensor"])) if isinstance(encoded, dict) and "tensor" in encoded else 0.0


def difference(found: Any, expected: Any) -> str:
    """Return how results differ from the reference beyond TOLERANCE, or an empty string if they do not."""
    ours, right = list(tensors(found)), list(tensors(expected))
    if len(ours) != len(right):
        return f"has {len(ours)} tensors instead of {len(right)}"
    tolerance = max((TOLERANCE.get(each.dtype, 0.0) for each in right), default=0.0)
    return next(filter(None, (_difference(*pair, tolerance) for pair in zip(ours, right, strict=True))), "")


def _difference(ours: torch.Tensor, right: torch.Tensor, tolerance: float) -> str:
    if ours.shape != right.shape or ours.dtype is not right.dtype:
        return f"is {ours.dtype} {list(ours.shape)} instead of {right.dtype} {list(right.shape)}"
    if right.dtype not in TOLERANCE:
        wrong = int((ours != right).sum())
        return f"differs in {wrong} of {right.numel()} values" if wrong else ""
    finite = torch.isfinite(right)
    others = (torch.where(finite, 0.0, each).nan_to_num(nan=1.0) for each in (ours, right))
    if not torch.equal(*others):
        return "has other values that are not finite"
    ours, right = ours[finite].double(), right[finite].double()
    if not right.numel():
        return ""
    error = float((ours - right).abs().max()) / max(float(right.abs().max()), 1e-30)
    return "" if error <= tolerance else f"differs by {error:.2g} of the largest value"


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")
