"""How an engine runs a training job besides the split of the work: the same for all candidates of one call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What one (virtual) stage of a pipeline holds: 1 where it has the embedding or the loss with its head."""

    embedding: int = 0
    layers: int = 0
    mtp: int = 0
    loss: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of Megatron and of schedules beside it. Names are Megatron-core's where it has one.

    `schedule` is a name of `flagcore.physics.schedules.catalogue`; None is 1F1B, interleaved with virtual stages.
    `stage_layout` gives each virtual stage of the pipeline, in order of the model; None splits layers by the rules of
    `Layout`. `account_for_embedding` and `account_for_loss` count embedding and loss as one layer of an even split.
    `recompute_modules` is what selective recompute drops. `recompute_stage_layers` is the number of layers that
    each pipeline stage recomputes, in place of one number for all; empty is off.

    Widths are bytes of one element. `optimizer_offload_fraction` is the share of the optimizer's state and step that
    lives on the host. `offload_modules` are those whose saved activations go to the host, on the stages
    `offload_stages` (empty: on all).

    `dropout` says that attention's probabilities and the outputs of attention and FFN are dropped at random.

    With `adapters` only low-rank adapters are trained: the model's weights have no gradients and no optimizer.

    `cuda_graph` says which part of a step is launched as one: "", "layer", or "iteration". `dispatcher` is
    allgather, alltoall or flex; with `deduplicated_dispatch` a token goes to a node once, whatever the number of its
    experts there. `expert_imbalance` is the load of the busiest expert rank over the mean.
    """

    schedule: str | None = None
    stage_layout: tuple[StageLayers, ...] = ()
    account_for_embedding: bool = False
    account_for_loss: bool = False
    recompute_modules: frozenset[str] = frozenset({"core_attn"})
    recompute_stage_layers: tuple[int, ...] = ()
    grad_bytes: int = 4
    main_grad_bytes: int = 4
    main_param_bytes: int = 4
    exp_avg_bytes: int = 4
    exp_avg_sq_bytes: int = 4
    precision_aware_optimizer: bool = False
    fp8_param_gather: bool = False
    optimizer_offload_fraction: float = 0.0
    offload_modules: frozenset[str] = frozenset()
    offload_stages: tuple[int, ...] = ()
    fsdp: bool = False
    adapters: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    tp_comm_overlap: bool = False
    overlap_p2p_comm: bool = True
    overlap_expert_comm: bool = False
    delay_weight_gradient: bool = False
    overlap_shared_expert: bool = False
    dispatcher: str = "alltoall"
    deduplicated_dispatch: bool = False
    grouped_gemm: bool = True
    pad_experts_to_capacity: bool = False
    expert_imbalance: float = 1.0
    cp_comm: str = "p2p"
    cuda_graph: str = ""
    cross_entropy_fusion: bool = False
    dropout: bool = False


DEFAULTS = Options()
"""What holds where nothing is said."""
