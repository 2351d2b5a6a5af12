#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
export HSMOE_RUNS="${HSMOE_RUNS:-runs}"
nemo llm pretrain --factory hsmoe_tiny --yes --yaml conf/experiment/demo.yaml \
  log.log_dir="$HSMOE_RUNS" log.name="demo-$(date +%Y%m%d-%H%M%S)"
