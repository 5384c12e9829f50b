"""Builds a command of Megatron-LM's `pretrain_gpt.py` for a spec without a user's command.

Source of the arguments: Megatron-LM core_v0.16.0 `training/arguments.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flagcore.domain.candidate import KnobValue
from flagcore.domain.launch import Launch
from flagcore.domain.model import Model
from flagcore.domain.spec import Task
from flagcore.engines.megatron.flags import flags
from flagcore.engines.megatron.hetero import NOT_PASSED, PROGRAM, Mixed
from flagcore.engines.megatron.meshes import SIZES

MISSING_ARGUMENTS = (
    "the data and tokenizer, the learning rate and its schedule, --train-iters or --train-samples, and --save"
)
SAMPLE_ARGUMENTS = (
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--split", "99,1,0", "--eval-iters", "1"),
    *("--lr", "1e-4", "--train-iters", "100", "--log-interval", "1"),
)
"""Arguments that train on generated data."""
PRECISION_FLAGS = {
    "bf16": ("--bf16",),
    "fp16": ("--fp16",),
    "fp32": (),
    "fp8": ("--bf16", "--fp8-format", "hybrid"),
    "mxfp8": ("--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
    "nvfp4": ("--bf16", "--fp4-format", "e2m1"),
}


def reference_launch(task: Task, values: Mapping[str, KnobValue], folder: str, mixed: Mixed | None = None) -> Launch:
    """Return how to start `pretrain_gpt.py` by torchrun with the arguments of model, precision and candidate.

    A mixed job starts FlagScale's program.
    """
    spec, group = task.spec, task.cluster.groups[0]
    train, nodes = spec.train, sum(each.nodes for each in task.cluster.groups)
    addresses = ["--master-addr={master_addr}", "--master-port={master_port}"]
    rendezvous = ["--standalone"] if nodes == 1 else [f"--nnodes={nodes}", "--node-rank={node_rank}", *addresses]
    argv = [
        "torchrun",
        *rendezvous,
        f"--nproc-per-node={group.devices_per_node}",
        "pretrain_gpt.py" if mixed is None else PROGRAM,
    ]
    argv += model_arguments(spec.model)
    argv += ["--max-position-embeddings", str(train.seq_length), *PRECISION_FLAGS[train.precision]]
    argv += ["--transformer-impl", train.implementation] if train.implementation else []
    if mixed is None:
        argv += flags(values, spec, None)
    else:
        values = {name: value for name, value in values.items() if name not in NOT_PASSED}
        argv += [*flags({**values, SIZES["pp"]: mixed.stages}, spec, None), *mixed.words]
    return Launch(argv=tuple(argv), folder=folder, missing=MISSING_ARGUMENTS, sample=SAMPLE_ARGUMENTS)


def model_arguments(model: Model) -> list[str]:
    """Return the arguments of a model: a decoder with RMSNorm, rotary embeddings and no biases."""
    sizes: dict[str, object] = {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.ffn_hidden_size,
        "num-attention-heads": model.num_attention_heads,
        "kv-channels": model.kv_channels,
        "vocab-size": model.vocab_size,
        "mtp-num-layers": model.mtp_num_layers or None,
        **_latent_attention(model),
        **_experts(model),
    }
    if model.num_query_groups != model.num_attention_heads and not model.multi_latent_attention:
        sizes["num-query-groups"] = model.num_query_groups
    words = [word for name, size in sizes.items() if size is not None for word in (f"--{name}", str(size))]
    return [*words, *_switches(model)]


def _switches(model: Model) -> Iterator[str]:
    yield from ("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear")
    yield from ("--attention-dropout", "0.0", "--hidden-dropout", "0.0")
    is_grouped = model.num_query_groups != model.num_attention_heads and not model.multi_latent_attention
    switches = {
        "--swiglu": model.gated_linear_unit,
        "--untie-embeddings-and-output-weights": model.untie_embeddings_and_output_weights,
        "--qk-layernorm": model.qk_layernorm,
        "--add-qkv-bias": model.add_qkv_bias,
        "--multi-latent-attention": model.multi_latent_attention,
        "--group-query-attention": is_grouped,
    }
    yield from (flag for flag, is_on in switches.items() if is_on)


def _latent_attention(model: Model) -> dict[str, object]:
    names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return {name.replace("_", "-"): getattr(model, name) for name in names} if model.multi_latent_attention else {}


def _experts(model: Model) -> dict[str, object]:
    if model.num_moe_experts is None:
        return {}
    dense_layers = model.moe_first_dense_layers
    return {
        "num-experts": model.num_moe_experts,
        "moe-router-topk": model.moe_router_topk,
        "moe-ffn-hidden-size": model.moe_ffn_hidden_size,
        "moe-shared-expert-intermediate-size": model.moe_shared_expert_intermediate_size or None,
        "moe-layer-freq": f"([0]*{dense_layers}+[1]*{model.num_layers - dense_layers})" if dense_layers else None,
    }
