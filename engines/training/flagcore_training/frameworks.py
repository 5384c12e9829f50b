"""The settings of fine-tuning frameworks' commands. `frameworks.yaml` has their keys."""

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flagcore_importers import dialect
from flagcore_importers.dialect import OFF, Dialect, name_of, read_given, scalar
from flagcore_models.layers import product_counts

from flagcore.domain.launch import Start
from flagcore.domain.model import Model
from flagcore.domain.space import FloatArray
from flagcore.domain.spec import Spec
from flagcore.errors import SpecError
from flagcore.i18n import _
from flagcore.spec.plain_data import package_yaml

TABLES: Any = package_yaml(__package__, "frameworks.yaml")
COMMON, MEGATRON = TABLES.pop("common"), TABLES.pop("megatron")
OPTIMIZERS: dict[str, list[list[float]]] = COMMON["optimizers"]
LOW_RANK = 128
"""The default rank of GaLore and APOLLO (transformers 5.24 `trainer_optimizer.py`)."""
CONFIG = "{config}"
"""A word of a command that stands for the path of the configuration file. Without it, the user's path is replaced."""
CONFIG_FLAGS = ("--config", "-c", "--config_file", "--config-file", "--accelerate_config")
PP, TILED_LOSS = "pipeline_model_parallel_size", "tiled_loss"
SIZES = ("tensor_model_parallel_size", PP, "context_parallel_size", "expert_model_parallel_size")
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
DEPTHS = "mtp_num_layers"
MEGATRON_NAMES = (*MEGATRON["knobs"], *MEGATRON["settings"], *MEGATRON["ends"], *RECOMPUTE, DEPTHS)
PROGRAM = r"\.py$|^(train|sft|pt|llm|automodel|[a-z_]+(\.[a-z_]+)+\.\w+)$"
"""The word before the first argument of a program."""


def framework_of(words: Sequence[str]) -> str | None:
    """Return the framework that a command starts, or None."""
    return next((name for name, row in TABLES.items() if re.search(row["starts"], " ".join(words))), None)


def has_tiled_loss(spec: Spec) -> bool:
    """Return whether head and loss run on tiles of the logits, by the framework of a spec's command or its settings."""
    name = framework_of(spec.train.command or ())
    if spec.train.settings.get(TILED_LOSS):
        return True
    if name is None or TILED_LOSS not in TABLES[name]["keys"]:
        return bool(TABLES[name].get(TILED_LOSS) if name else spec.train.assumed.get(TILED_LOSS))
    has_kernel = re.search(TABLES[name].get("tiled_families", ""), spec.model.family)
    return bool(has_kernel) and _is_on(spec, name, TILED_LOSS) and not _is_on(spec, name, "whole_loss")


def has_fused_layers(spec: Spec) -> bool:
    """Return whether norms, activations and rotary embeddings are one kernel each, by the framework of a command."""
    name = framework_of(spec.train.command or ())
    has_kernels = name is not None and re.search(TABLES[name].get("tiled_families", ""), spec.model.family)
    return bool(has_kernels) and _is_on(spec, str(name), "fused_layers")


def has_torch_attention(spec: Spec) -> bool:
    """Return whether torch chooses the kernel of attention, by the framework of a spec's command.

    On some chips it is cuDNN's since 2.11 (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`,
    check_prefer_cudnn_attention; huggingface/transformers pull request 48163).
    """
    name = framework_of(spec.train.command or ())
    return name is not None and "flash_2" in TABLES[name]["keys"] and not _is_on(spec, name, "flash_2")


def keeps_activations_on_host(spec: Spec) -> str:
    """Return which of autograd's tensors go to the host until backward: "all", "checkpoints" or "", for none."""
    name = framework_of(spec.train.command or ())
    if name is None or _is_on(spec, name, "host_activations"):
        return "all" if name else ""
    return "checkpoints" if _is_on(spec, name, "host_checkpoints") else ""


class Moments(NamedTuple):
    """The states of an optimizer per weight: `bytes`, and `elements` of the type of the weights."""

    bytes: float = 0.0
    elements: float = 0.0

    def of(self, element: FloatArray | float) -> FloatArray | float:
        """Return the bytes beside a weight of `element` bytes."""
        return self.bytes + self.elements * element


ADAM = Moments(elements=2.0)


def moments_of(spec: Spec) -> tuple[Moments, Moments] | None:
    """Return the states of the optimizer that a framework's command names: those of layers, and of the embedding.

    None: as Adam's. GaLore and APOLLO have the states of another optimizer for gradients of a `rank` and, beside them,
    the projection to it (galore-torch 1.0, apollo-torch 1.0).
    """
    if framework_of(spec.train.command or ()) is None:
        return None
    with suppress(SpecError):
        read = reading(spec)
        for value in (str(read.given[key]) for key, is_known in read.found("moments").items() if is_known):
            name = re.sub(r"^(galore|apollo)_", "", value)
            rows = next((row for pattern, row in OPTIMIZERS.items() if re.search(pattern, name)), [ADAM])
            layers, table = Moments(*rows[0]), Moments(*rows[-1])
            if name == value:
                return layers, table
            rank = re.search(r"\brank\W+(\d+)", str(read.given.get("optim_args")))
            share, projection = _low_rank(spec.model, int(rank[1]) if rank else LOW_RANK)
            return Moments(layers.bytes * share, layers.elements * share + projection), table
    return None


def _low_rank(model: Model, rank: int) -> tuple[float, float]:
    """Return the elements of a gradient of a rank, and of the projection to it, per weight of a linear layer."""
    total = projected = kept = 0.0
    for product, number in product_counts(model).items():
        for layer in product.layers:
            small, large = sorted((product.inputs, layer.width))
            total += number * small * large
            projected += number * min(rank, small) * large
            kept += number * min(rank, small) * small
    return projected / total, kept / total


def whole_weights(spec: Spec) -> tuple[bool, bool]:
    """Return whether ranks of FSDP2 hold quantized weights whole: those of layers, and of experts.

    accelerate leaves out what is stored as integers (1.15 `utils/fsdp_utils.py`): weights in 8 bits, those in 4 bits
    unless they have another `storage`, and axolotl's experts (067b021c `docs/expert_quantization.qmd`).
    """
    name, adapter = framework_of(spec.train.command or ()), spec.train.adapter
    if name is None or adapter is None or adapter.base not in ("nf4", "int8"):
        return False, False
    stores = "storage" not in TABLES[name]["keys"] or _is_on(spec, name, "storage")
    return adapter.base == "int8" or not stores, adapter.quantized_experts


def _is_on(spec: Spec, framework: str, target: str) -> bool:
    """Return whether a target is on in a job whose files are here."""
    with suppress(SpecError):
        return reading(spec).is_on(target)
    return False


@cache
def _dialect(framework: str, *, on_megatron: bool) -> Dialect:
    """Return the keys of a framework, and those of the programs that start it."""
    row, keys = TABLES[framework], dict[str, Any]()
    first = {**{name: (name,) for name in SIZES}, **row.get("megatron_keys", {})} if on_megatron else {}
    for name, names in [*first.items(), *row["keys"].items(), *COMMON["keys"].items()]:
        keys[name] = (*keys.get(name, ()), *(each for each in names if each not in row.get("ignored", ())))
    own = (*SIZES, *(MEGATRON_NAMES if on_megatron else ()))
    keys = {**{name: (name,) for name in own}, **keys, **{f"refused {name}": (name,) for name in row["refused"]}}
    tables: dict[str, Any] = {name: {**COMMON[name]} for name in ("harmless", "named", "why")}
    for name, table in tables.items():
        for start, ends in row.get(name, {}).items():
            table[start] = ends if name == "why" else f"{table.get(start, '')} {ends}"
    return Dialect(
        starts=row["starts"],
        keys=keys,
        defaults={**row["defaults"], **(row.get("megatron_defaults", {}) if on_megatron else {})},
        **tables,
        config=CONFIG_FLAGS,
        program=PROGRAM,
        presets=row.get("presets", {}),
    )


class Reading(dialect.Reading):
    """The settings of a command, of the files that it names, and of the variables around it, by meaning."""

    def __init__(self, framework: str, start: Start, directory: Path) -> None:
        self.row, self.words, self.directory = TABLES[framework], start.words, directory
        self.text = " ".join(start.words)
        given = read_given(_dialect(framework, on_megatron=False), start.words, directory)
        inner = {key.removeprefix("ENV."): value for key, value in given.items() if key.startswith("ENV.")}
        around = {key.lower(): scalar(str(value)) for key, value in {**start.job, **start.envs, **inner}.items()}
        mark, variables = self.row.get("megatron", "$^"), {"use_mca", "use_megatron_bridge"}
        self.on_megatron = bool(re.search(mark, self.text) or mark in given or variables & {*around})
        super().__init__(_dialect(framework, on_megatron=self.on_megatron), given, around)
        self.drop("host_activations", "host_checkpoints")  # their transfers take no predicted time
        others = [name for name, is_narrow in self.found("moments").items() if not is_narrow]
        self._dropped |= {each for each in others if not self.dialect.is_harmless(each, self.given[each])}

    def set_in_command(self, name: str) -> dict[str, Any]:
        """Return the names of a meaning that are set to other values than off or `auto`, with these."""
        given = {key: self.given.get(name_of(key)) for key in map(name_of, self.keys[name].names)}
        return {key: value for key, value in given.items() if value not in (*OFF, "auto")}

    def size(self, name: str) -> int:
        """Return a number of a meaning, by default 1."""
        return self.number(name) or 1

    def has_checkpoints(self) -> bool:
        """Return whether backward computes layers again: tensors on the host may replace this beside adapters."""
        is_replaced = self.is_on("replaced_checkpoints") and self.value("adapter") != "full"
        return self.is_on("checkpointing") and not is_replaced

    def is_idle(self, name: str) -> bool:
        return (".pipeline." in name and self.size(PP) == 1) or super().is_idle(name)


def kept_framework(spec: Spec) -> str | None:
    """Return the framework whose command a spec keeps for the real job only, or None."""
    words = spec.train.command or ()
    return None if any(CONFIG in word for word in words) else framework_of(words)


def reading(spec: Spec) -> Reading:
    """Return the settings of the command of a spec. Raises SpecError."""
    words, directory = spec.train.command or (), Path(spec.train.directory or ".")
    return Reading(framework_of(words) or "", Start(words=words, envs=spec.envs), directory)


def of_replicas(spec: Spec) -> Reading | None:
    """Return the settings of a framework's command on one device or on DDP, where each rank has all weights."""
    read = reading(spec) if kept_framework(spec) else None
    has_deepspeed = read and (read.is_on("deepspeed") or any(key.startswith("deepspeed.") for key in read.given))
    return None if read is None or has_deepspeed or read.is_on("fsdp") else read


def plain_layers(spec: Spec) -> tuple[bool, bool]:
    """Return whether a framework's layers have fused norms and gates, as of Liger, and whether autocast computes.

    Without FSDP and DeepSpeed, it does with trained weights in fp32, unless they are loaded in 16 bits, and with PEFT's
    adapters, which TRL casts beside quantized weights (1.16 `trainer/sft_trainer.py`).
    """
    name, adapter = framework_of(spec.train.command or ()), spec.train.adapter
    with suppress(SpecError):
        read = reading(spec) if name else None
        is_narrow = adapter.base in ("nf4", "int8") and name == "TRL" if adapter else read and read.is_on("pure")
        casts = spec.train.precision != "fp32" and of_replicas(spec) is not None and not is_narrow
        return has_fused_layers(spec), casts
    return False, False


def refuse_trials(spec: Spec) -> None:
    """Raise SpecError if a spec keeps a framework's command for the real job only."""
    if name := kept_framework(spec):
        problem, fix = _("is {framework}'s, which trials do not start", framework=name), _("use `flag export`")
        raise SpecError(key="train.command", problem=problem, fix=fix)
