"""torch's own choices on CPUs: the library of fp32 matrix products, attention, and convolutions."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from flagcore_operators.contract import OperatorLibrary, read_choice
from flagcore_operators.start import SET

ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
IMPLEMENTATIONS = {
    **dict.fromkeys(("mm_nn", "mm_nt", "mm_tn"), ("mkl", "onednn")),
    "attention": ("flash", "math"),
    "convolution": ("onednn", "native"),
}
"""The implementations of each operator, torch's default first. The names of products have the layouts of the operands
(`t`: transposed), as an implementation may be faster only for one of them. A linear layer calls `mm_nt` in the forward
pass, `mm_nn` for the gradient of its input, and `mm_tn` for that of its weight."""


class TorchOnCpu(OperatorLibrary):
    """torch on CPUs. Its products of fp32 matrices run in MKL; oneDNN, which torch contains too, is faster on some."""

    name, reference, functions = "torch", "", (ATTENTION,)
    _applied: AbstractContextManager[None] | None = None

    def serves(self, device_type: str, engine: str) -> bool:
        return device_type == "cpu"

    def environment(self, choice: Mapping[str, str]) -> Mapping[str, str]:
        return {SET: f"{self.name}:" + ",".join(f"{name}={value}" for name, value in sorted(choice.items()))}

    def in_effect(self, environment: Mapping[str, str], vendor: str) -> Mapping[str, str]:
        name, _, text = environment.get(SET, "").partition(":")
        return read_choice(text) if name == self.name else {}

    def operator(self, function: str, arguments: Sequence[Any]) -> str:
        if function == "aten.mm.default":
            return _layout(*arguments[:2])
        return {ATTENTION: "attention", "aten.convolution.default": "convolution"}.get(function, "")

    def implementations(self, operator: str) -> Sequence[str]:
        return IMPLEMENTATIONS[operator]

    def using(self, operator: str, implementation: str) -> AbstractContextManager[Any]:
        if implementation in (self.reference, IMPLEMENTATIONS[operator][0]):
            return nullcontext()
        if operator == "attention":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            return sdpa_kernel(SDPBackend.MATH)  # type: ignore[no-any-return]  # torch is not followed
        if operator == "convolution":
            from torch.backends import mkldnn

            return mkldnn.flags(enabled=False)  # type: ignore[no-any-return]
        return _products({operator})

    def apply(self, choice: Mapping[str, str]) -> None:
        import torch

        if choice.get("attention") == "math":
            torch.backends.cuda.enable_flash_sdp(False)  # in spite of its name, CPUs read it too
        if choice.get("convolution") == "native":
            torch.backends.mkldnn.enabled = False
        if products := {name for name, value in choice.items() if name.startswith("mm_") and value == "onednn"}:
            self._applied = _products(products)  # it ends with its last reference
            self._applied.__enter__()


def _layout(left: Any, right: Any) -> str:
    """Return the operator of a product, or an empty string if only one library has it."""
    if str(left.dtype) != "torch.float32" or left.device.type != "cpu" or not left.numel():
        return ""
    sides = ["n" if each.is_contiguous() else "t" if each.t().is_contiguous() else "" for each in (left, right)]
    name = f"mm_{sides[0]}{sides[1]}"
    return name if name in IMPLEMENTATIONS else ""


@contextmanager
def _products(operators: set[str]) -> Iterator[None]:
    """Run the products of these layouts in oneDNN."""
    import torch

    def product(left: Any, right: Any) -> Any:
        if _layout(left, right) in operators:
            return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")
        return torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1]))

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each replaced implementation
        library.impl("mm", product, "CPU")
    try:
        yield
    finally:
        library._destroy()


TORCH: OperatorLibrary = TorchOnCpu()
