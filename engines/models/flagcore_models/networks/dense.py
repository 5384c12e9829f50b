"""A dense feed-forward network, with or without a gate (GLU variants, arXiv 2002.05202)."""

from dataclasses import dataclass
from functools import partial

from flagcore.domain.model import Network, Output, Product


def two_products(
    hidden: int, width: int, *, gated: bool, component: str, group: str, copies: int = 1, bias: bool = False
) -> tuple[Product, Product]:
    """Return the products of a feed-forward network of `width` elements: up, joined with a gate's, and down."""
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    joined = tuple(Output(name, width) for name in names)
    part = partial(Product, component=component, group=group, copies=copies, bias=bias)
    up = part(inputs=hidden, outputs=len(names) * width, name="up", joined=joined)
    down = part(inputs=width, outputs=hidden, split="inputs", name="down", joined=(Output("down_proj", hidden),))
    return up, down


@dataclass(frozen=True, kw_only=True)
class Dense(Network):
    """A network of `width` elements, whose activation function may have a gate. Source: megatron-core 0.16 `mlp.py`."""

    label = "MLP"

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return two_products(hidden_size, self.width, gated=self.gated, component="ffn", group="dense")
