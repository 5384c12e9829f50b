"""Measures candidates per second of llm-analysis. The Python of its environment runs it with one JSON argument."""

import itertools
import json
import logging
import sys
import time

from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import ModelConfig, ParallelismConfig, get_dtype_config_by_name, get_gpu_config_by_name
from llm_analysis.logger import logger

LENGTH = 4096


def main() -> None:
    """Print one JSON object: the number of candidates, and candidates per processor second in the fastest round."""
    logger.setLevel(logging.ERROR)
    job = json.loads(sys.argv[1])
    shape, devices, batch = job["model"], job["devices"], job["batch"]
    model = ModelConfig(
        name=shape["name"],
        num_layers=shape["num_layers"],
        n_head=shape["num_attention_heads"],
        hidden_dim=shape["hidden_size"],
        ffn_embed_dim=shape["ffn_hidden_size"],
        vocab_size=shape["vocab_size"],
        max_seq_len=LENGTH,
    )
    chip, dtype = get_gpu_config_by_name("h100-sxm-80gb"), get_dtype_config_by_name("w16a16e16")
    knobs = itertools.product(
        (1, 2, 4, 8),
        [stages for stages in range(1, 97) if shape["num_layers"] % stages == 0],
        (1, 2, 4, 8),
        ActivationRecomputation,
        (DSZeRO.NONE, DSZeRO.STAGE_1),
        (False, True),
    )
    candidates = [
        knob
        for knob in knobs
        if devices % (knob[0] * knob[1]) == 0 and batch % (devices // (knob[0] * knob[1]) * knob[2]) == 0
    ]
    seconds = []
    for _ in range(job["rounds"]):
        start = time.process_time()
        for tensor, pipeline, micro_batch, recompute, zero, sequence in candidates:
            data = devices // (tensor * pipeline)
            split = ParallelismConfig(tensor, pipeline, data, sp_size=tensor if sequence else 1)
            LLMAnalysis(model, chip, dtype, split).training(
                batch_size_per_gpu=micro_batch,
                gradient_accumulation_steps=batch // (data * micro_batch),
                global_batch_size=batch,
                seq_len=LENGTH,
                activation_recomputation=recompute,
                ds_zero=zero,
            )
        seconds.append(time.process_time() - start)
    print(json.dumps({"candidates": len(candidates), "candidates_per_second": round(len(candidates) / min(seconds))}))


if __name__ == "__main__":
    main()
