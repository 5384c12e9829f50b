"""Time of a mixture of experts for one micro-batch: router, exchange of tokens, experts, shared experts."""

from __future__ import annotations

import numpy as np

from flagcore.contracts import Costs
from flagcore.domain.space import FloatArray
from flagcore.engines.megatron.parallel.layout import Layout, Training
from flagcore.engines.megatron.time.exchange import TensorExchange, expert_exchange
from flagcore.engines.megatron.time.linear import Linear, linear
from flagcore.engines.megatron.time.passes import Block, Seconds, activation_seconds, norm_seconds, quiet

LAUNCHES = {True: (70.0, 25.0, 10.0), False: (150.0, 33.0, 20.0)}
"""Kernels that the host launches forward for router, permutation and dispatch; for one expert (for all of them, where
their products are grouped); and for the shared experts: with transformer-engine's layers, and with megatron-core's own
(fitted to 13 measured ranks with 2 to 64 experts each). Backward, twice as many."""


def moe_block(train: Training, layout: Layout, costs: Costs, exchange: TensorExchange) -> Block:
    """Return norm, router, dispatch, experts, combine, shared experts and residual sum.

    The busiest expert rank has `expert_imbalance` times the mean of token copies, and the others wait for it.
    With `overlap_expert_comm` the exchange of one micro-batch hides behind the layer of another.
    """
    model, kernels, options, unit = train.model, costs.kernels, train.options, float(train.value_bytes)
    h, rows = model.hidden_size, layout.token_rows(train.sequence)
    copies = layout.expert_tokens(model, train.sequence) * options.expert_imbalance
    experts, activation, activation_back = _experts(train, layout, costs, copies)
    router = linear(kernels, rows, h, float(model.num_moe_experts or 1), _router_precision(train))
    norm, norm_back = norm_seconds(kernels, unit * h * rows)
    permute = kernels.memory_seconds(unit * 2.0 * h * copies)
    residual = kernels.memory_seconds(unit * 3.0 * h * rows)
    local = 1.0 if _grouped(train) else (model.num_moe_experts or 1) / layout.expert
    router_launches, expert_launches, _ = LAUNCHES[train.transformer_engine]
    launches = np.full_like(rows, router_launches) + expert_launches * local
    exchanges = 2.0 * expert_exchange(train, layout, costs) * options.expert_imbalance
    none = np.zeros_like(rows)

    element = norm + 2.0 * permute + residual + activation
    forward = Seconds(experts.forward + router.forward + element, none, none, exchanges, launches)
    gradients = experts.input_gradient + router.input_gradient + norm_back + 3.0 * permute + activation_back + residual
    backward = Seconds(gradients, none, none, exchanges, 2.0 * launches)
    repeated = _repeated(train, norm, activation, forward)
    block = Block(forward, backward, experts.weight_gradient + router.weight_gradient, repeated)
    if model.moe_shared_expert_intermediate_size:
        block = block + _shared(train, layout, costs, exchange)
    return _hidden(block) if options.overlap_expert_comm else block


def _experts(
    train: Training, layout: Layout, costs: Costs, copies: FloatArray
) -> tuple[Linear, FloatArray, FloatArray]:
    """Return the routed experts' products and activation functions; each local expert has a product of its own."""
    model, kernels = train.model, costs.kernels
    local = (model.num_moe_experts or 1) / layout.expert
    each, width = copies / local, (model.moe_ffn_hidden_size or 0) / layout.expert_tensor
    up = linear(kernels, each, model.hidden_size, (2.0 if model.gated_linear_unit else 1.0) * width, train.precision)
    down = linear(kernels, each, width, model.hidden_size, train.precision)
    activation, back = activation_seconds(train, kernels, train.value_bytes * width * copies)
    return (up + down) * local, activation, back


def _shared(train: Training, layout: Layout, costs: Costs, exchange: TensorExchange) -> Block:
    model, kernels, tokens = train.model, costs.kernels, layout.tokens(train.sequence)
    width = (model.moe_shared_expert_intermediate_size or 0) / layout.tensor
    up = linear(kernels, tokens, model.hidden_size, (2.0 if model.gated_linear_unit else 1.0) * width, train.precision)
    down = linear(kernels, tokens, width, model.hidden_size, train.precision)
    activation, back = activation_seconds(train, kernels, train.value_bytes * width * tokens)
    none, launches = np.zeros_like(tokens), np.full_like(tokens, LAUNCHES[train.transformer_engine][2])
    forward = Seconds(up.forward + down.forward + activation, exchange.forward, none, none, launches)
    waits = exchange.backward(up.input_gradient, up.weight_gradient)
    backward = Seconds(up.input_gradient + down.input_gradient + back, waits, none, none, 2.0 * launches)
    modules = train.options.recompute_modules
    repeated = forward if modules & {"shared_experts", "moe"} else quiet(none)
    return Block(forward, backward, up.weight_gradient + down.weight_gradient, repeated)


def _repeated(train: Training, norm: FloatArray, activation: FloatArray, forward: Seconds) -> Seconds:
    """Return what the named modules of selective recompute run again."""
    modules = train.options.recompute_modules
    again = quiet(np.zeros_like(norm))
    if "layernorm" in modules:
        again = again + quiet(norm)
    if "moe" in modules:
        return again + forward
    return again + quiet(activation) if "moe_act" in modules else again


def _hidden(block: Block) -> Block:
    """Return a block whose exchange hides behind its own amount of kernels, as those of another micro-batch."""

    def behind(seconds: Seconds, kernels: FloatArray) -> Seconds:
        left = np.maximum(seconds.expert - kernels, 0.0)
        return Seconds(seconds.compute, seconds.tensor, seconds.context, left, seconds.launches)

    return Block(
        behind(block.forward, block.forward.compute),
        behind(block.backward, block.backward.compute + block.weight),
        block.weight,
        block.repeated,
    )


def _grouped(train: Training) -> bool:
    """Return whether the products of a rank's experts are one kernel."""
    return train.options.grouped_gemm and train.transformer_engine


def _router_precision(train: Training) -> str:
    return train.precision if train.precision in ("fp32", "fp16", "bf16") else "bf16"
