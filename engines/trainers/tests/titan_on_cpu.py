"""Runs torchtitan's trainer on CPU cores: `torchrun ... titan_on_cpu.py ARGUMENTS`, after `write_assets`.

torchtitan 0.3 starts on accelerators only. Replaced: the device and its memory, attention (FlexAttention has no
backward on a CPU; documents attend to each other), averages that Gloo does not have, and a function of a later torch.
"""

import json
import random
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WORDS = 1000


def write_assets(directory: Path) -> None:
    """Write the tokenizer and the data that torchtitan's debug model reads from its working directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = directory / "tests" / "assets"
    for name in ("tokenizer", "c4_test"):
        (folder / name).mkdir(parents=True)
    words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    names = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    (folder / "tokenizer" / "tokenizer_config.json").write_text(names)
    choose = random.Random(0)
    texts = [" ".join(f"w{int(choose.random() ** 3 * WORDS)}" for _ in range(400)) for _ in range(200)]
    (folder / "c4_test" / "data.json").write_text("\n".join([json.dumps({"text": text}) for text in texts]))


def main() -> None:
    """Replace what needs an accelerator, and run the trainer."""
    import torch
    import torch._utils as utils
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    def memory_stats(*_: object) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    cpu: Any = torch.cpu
    cpu.get_device_name, cpu.current_device, cpu.memory_stats = lambda *_: "cpu", lambda: 0, memory_stats
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 34)
    cpu.set_device = cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    utils._get_available_device_type, utils._get_device_module = lambda: "cpu", lambda _: cpu
    dist.set_timeout = lambda *_: None

    divide = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(module: Any, factor: float) -> None:
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor

    from torchtitan import train
    from torchtitan.models.common.attention import FlexAttention

    def attention(query: Any, key: Any, value: Any, *, scale: float | None, enable_gqa: bool, **_: object) -> Any:
        core = torch.nn.functional.scaled_dot_product_attention
        return core(query, key, value, is_causal=True, scale=scale, enable_gqa=enable_gqa), SimpleNamespace(lse=None)

    FlexAttention.compiled_flex_attn = staticmethod(attention)
    train.main()


if __name__ == "__main__":
    main()
