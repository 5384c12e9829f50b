"""Activations of layers with frozen weights and adapters.

Autograd stores the input of a linear layer only for the gradient of its weight, so a frozen layer without an adapter
stores none, and one with an adapter stores it for the first matrix (transformer-engine 2.9 to 2.20 `module/linear.py`,
`backward_needs_input`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flagcore.domain.model import Mixer
from flagcore_training.adapters import (
    Product,
    attention_products,
    chosen,
    has_adapter,
    mixer_products,
    network_products,
)
from flagcore_training.layout import Layout, Training
from flagcore_training.memory.modules import Module, Sizes

DORA_STORED, PEFT_STORED, DORA_COPIES = 1.0, 2.0, 3.0
"""Outputs that DoRA stores for the gradient of its magnitude (Megatron-Bridge @067f987d `peft/dora_layers.py`), those
that PEFT and NeMo AutoModel store (PEFT @0a6cd5a4 `tuners/lora/dora.py`: of the layer and of the adapter), and copies
of a matrix while it computes its norm."""
INPUTS: Mapping[str, Sequence[str]] = {
    "qkv_linear": ("q_proj", "k_proj", "v_proj"),
    "mixer_linear": ("in_proj",),
    "mlp_input": ("gate_proj", "up_proj"),
    "mlp_act": ("down_proj",),
    "shared_act": ("down_proj",),
    "expert_fc1": ("gate_proj", "up_proj"),
    "moe_act": ("down_proj",),
}
"""The targets that need a stored input of linear layers, by its name (`memory`). The router also needs its input, and
the attention core its output."""


def frozen(
    train: Training, layout: Layout, sizes: Sizes, modules: Sequence[Module], mixer: Mixer | None = None
) -> list[Module]:
    """Return the modules of a layer, of which adapters and not weights are trained. `mixer`: that of the layer, if any.

    An adapter of a joint projection stores its input as gathered over the tensor-parallel ranks, the output of its
    first matrix, and with DoRA the outputs. Workspaces have the matrix that is converted, or whose norm is computed.
    """
    adapter, model = train.options.adapter, train.model
    if adapter is None:
        return list(modules)
    h, latent = float(model.hidden_size), float(model.expert_hidden_size)
    *inputs, output = attention_products(model)
    widths_of = {"ffn": model.ffn_hidden_size, "shared_experts": model.moe_shared_expert_intermediate_size or 0}
    networks = {name: [*network_products(model, float(width), h)] for name, width in widths_of.items()}
    networks["experts"] = [*network_products(model, float(model.moe_ffn_hidden_size or 0), latent)]
    mixers = [*mixer_products(mixer, model.hidden_size)] if mixer else []
    products: dict[str, list[Product]]
    products = {"qkv_proj": inputs, "out_proj": [output], "mixers": mixers, **networks}
    gathers = sizes.tokens / sizes.rows if train.options.joint_adapters else 1.0
    result = []
    for each in modules:
        tensors, work, tokens, split = dict(each.tensors), each.work, sizes.tokens, layout.tensor
        if each.component == "experts":
            tokens, split = tensors["expert_fc1"] / (sizes.linear * latent), layout.expert_tensor
        for name in tensors.keys() & INPUTS.keys() if each.component != "router" else ():
            is_whole = name in ("qkv_linear", "mixer_linear", "mlp_input")
            tensors[name] = tensors[name] * has_adapter(adapter, *INPUTS[name]) * (gathers if is_whole else 1.0)
        for inner, outer in products.get(each.component, ()):
            found = chosen(adapter, outer, joint=train.options.joint_adapters)
            stored = len(found) * adapter.rank + DORA_STORED * sum(found) / split * (adapter.kind == "dora")
            tensors["adapters"] = tensors.get("adapters", 0.0) + sizes.unit * tokens * stored
            copies = 1.0 * bool(adapter.base) + DORA_COPIES * (adapter.kind == "dora")
            work = np.maximum(work, each.work + copies * sizes.unit * inner * sum(outer.values()) / split)
        result.append(replace(each, tensors=tensors, work=work))
    return result
