#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
recipe=${1:-hsmoe_1b}
steps=${2:-20}
quantization=${3:-auto}
folder=$(mktemp -d)
nemo llm pretrain --factory "$recipe(max_steps=$steps,quantization=$quantization)" --yes log.log_dir="$folder" trainer.limit_val_batches=0
python3 - "$folder/$recipe/metrics.jsonl" "$quantization" <<'PYTHON'
import json
import statistics
import sys

import torch

lines = [json.loads(line) for line in open(sys.argv[1])]
settled = lines[len(lines) // 2 :]
print(f"{sys.argv[2]}: device {torch.cuda.get_device_name()}  torch {torch.__version__}")
print(f"median tok/s {statistics.median(line['tokens_per_second'] for line in settled):,.0f}")
print(f"seconds {statistics.median(line['seconds'] for line in settled):.3f}")
print(f"peak memory {max(line['peak_memory_gib'] for line in lines):.1f} GiB")
print(f"loss {lines[0]['loss']:.3f} -> {lines[-1]['loss']:.3f}")
PYTHON
