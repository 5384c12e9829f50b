"""A mixture of experts: a router, routed experts, and shared experts that all tokens use (arXiv 2401.06066).

Sources: megatron-core 0.16 `moe/`; latent experts as in Nemotron-3 (transformers 5.24 `models/nemotron_h`).
"""

from dataclasses import dataclass
from functools import partial

from flagcore.domain.model import Network, Product
from flagcore_models.networks.dense import two_products


@dataclass(frozen=True, kw_only=True)
class Experts(Network):
    """`count` routed experts of `width` elements, of which a token chooses `chosen`.

    `shared`: the total width of the shared experts. 0: none.
    `latent`: the width between which and their own routed experts project. 0: that of the residual stream.
    `groups`, `chosen_groups`: into which the experts are divided, and from which a token chooses. 0: no groups.
    `bias`: whether the products of routed experts have biases.
    """

    label = "MoE"
    kind = "experts"

    count: int
    chosen: int
    shared: int = 0
    latent: int = 0
    groups: int = 0
    chosen_groups: int = 0
    bias: bool = False

    @property
    def active_width(self) -> int:
        """The width of the experts that a token chooses, and of the shared ones."""
        return self.chosen * self.width + self.shared

    def expert_width(self, hidden_size: int) -> int:
        """Return the width of the input and output of routed experts."""
        return self.latent or hidden_size

    def routed(self, hidden_size: int) -> tuple[Product, Product]:
        """Return the two products of all routed experts."""
        return two_products(
            self.expert_width(hidden_size),
            self.width,
            gated=self.gated,
            component="experts",
            group="experts",
            copies=self.count,
            bias=self.bias,
        )

    def always(self, hidden_size: int) -> tuple[Product, ...]:
        """Return the two products of the shared experts, which all tokens use. Empty without shared experts."""
        if not self.shared:
            return ()
        return two_products(
            hidden_size, self.shared, gated=self.gated, component="shared_experts", group="shared experts"
        )

    def routing(self, hidden_size: int) -> tuple[Product, ...]:
        """Return the products of the router, and those between the residual stream and latent experts."""
        part = partial(Product, split="", adapts=False, component="router")
        router = part(inputs=hidden_size, outputs=self.count, name="router", group="")
        if not self.latent:
            return (router,)
        latent = partial(part, name="latent", group="shared experts")
        return (
            router,
            latent(inputs=hidden_size, outputs=self.latent),
            latent(inputs=self.latent, outputs=hidden_size),
        )

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return *self.routing(hidden_size), *self.always(hidden_size), *self.routed(hidden_size)
