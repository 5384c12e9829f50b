#!/bin/bash
# TP 2, max_num_seqs 32 on 2 x V100-32GB, from qwen3-32b-awq
#   tensor_model_parallel_size = 2: Devices that split each layer's matrices.
#   max_num_seqs = 32: Maximum number of sequences in one iteration.
#   GEMS_VENDOR: what the plugins of the chips set, see docs/vendors.md
PORT="${PORT:-8000}"
export GEMS_VENDOR=nvidia
exec vllm serve Qwen/Qwen3-32B-AWQ \
  --host 127.0.0.1 \
  --port "$PORT" \
  --tensor-parallel-size 2 \
  --max-num-seqs 32
