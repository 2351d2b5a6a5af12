# SPDX-License-Identifier: Apache-2.0
"""Emulated quantise-dequantise beside TorchAO's, as shares of this GPU's copy bandwidth.

Bytes are counted once in and once out. Times are medians: of calls replayed from a CUDA graph, which is what the device
takes, and of single calls between two events, which show the host's share where that is longer. Run it on a CUDA machine:
`python benchmarks/block_quantize.py [RESULT.json]`.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from triton.testing import do_bench, do_bench_cudagraph

from nemo_hsmoe.kernels.block_quantize import quantize_dequantize, quantize_dequantize_reference
from nemo_hsmoe.quantization.spec import QuantizationSpec

SHAPES = {"weight stack 64×1536×896": (64, 1536, 896), "activation 65,536×896": (65_536, 896)}
SPECS = {
    "NVFP4 8×8, fp32 per matrix": QuantizationSpec.parse("NVFP4_8x8", outer_scale="matrix"),
    "NVFP4 16×16, fp32 per matrix": QuantizationSpec.parse("NVFP4_16x16", outer_scale="matrix"),
    "NVFP4 16, fp32 per tensor": QuantizationSpec.parse("NVFP4_16"),
    "NVFP4 16, fp32 per row": QuantizationSpec.parse("NVFP4_16", outer_scale="row", scale_limits=(1e-6, 10.0)),
    "NVFP4 32, fp32 per row": QuantizationSpec.parse("NVFP4_32", outer_scale="row", scale_limits=(1e-6, 10.0)),
    "MXFP8 32": QuantizationSpec.parse("MXFP8"),
}


def torchao_nvfp4(x: torch.Tensor) -> torch.Tensor:
    """TorchAO's emulation of NVFP4 with a scale for the tensor."""
    scale = per_tensor_amax_to_scale(x.abs().amax())
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(x.dtype)


def torchao_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """TorchAO's emulation of MXFP8."""
    return MXTensor.to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=ScaleCalculationMode.RCEIL).dequantize(x.dtype)


RIVALS = {"NVFP4 16, fp32 per tensor": torchao_nvfp4, "MXFP8 32": torchao_mxfp8}


def device_milliseconds(function, *arguments) -> float:
    """Median time of a call in a CUDA graph."""
    return do_bench_cudagraph(lambda: function(*arguments), rep=20, return_mode="median")


def call_milliseconds(function, *arguments) -> float:
    """Median time between two events around a call."""
    return do_bench(lambda: function(*arguments), warmup=20, rep=80, return_mode="median")


def copy_milliseconds(x: torch.Tensor) -> float:
    """Median time of copying `x` on the device."""
    target = torch.empty_like(x)
    return device_milliseconds(target.copy_, x)


def main() -> int:
    """Print a table and, with a path as argument, write it as JSON."""
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}  torch {torch.__version__}  triton {triton.__version__}")
    large = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    copy_rate = 2 * large.numel() * large.element_size() / copy_milliseconds(large) / 1e9
    print(f"copy of 1 GiB: {copy_rate:.2f} TB/s")
    del large
    rows = []
    for shape_name, shape in SHAPES.items():
        x = (torch.randn(shape, device="cuda") * 0.02).to(torch.bfloat16)
        moved = 2 * x.numel() * x.element_size()
        contenders = [(f"ours: {name}", quantize_dequantize, x, spec.scaling) for name, spec in SPECS.items()]
        reference = "NVFP4 16, fp32 per tensor"
        contenders.append((f"torch reference: {reference}", quantize_dequantize_reference, x, SPECS[reference].scaling))
        flat = x.reshape(-1, x.shape[-1])
        for name, rival in RIVALS.items():
            contenders.append((f"torchao eager: {name}", rival, flat))
            contenders.append((f"torchao compiled: {name}", torch.compile(rival, dynamic=False), flat))
        copy = copy_milliseconds(x)
        print(f"\n{shape_name}, bf16: copy {copy:.3f} ms = {moved / copy / 1e9:.2f} TB/s")
        for name, function, *arguments in contenders:
            try:
                call = call_milliseconds(function, *arguments)
                time = device_milliseconds(function, *arguments)
            except Exception as error:
                print(f"  {name:<52} failed: {str(error).splitlines()[0][:80]}")
                continue
            rate = moved / time / 1e9
            share, of_call = rate / copy_rate, moved / call / 1e9 / copy_rate
            rows.append({"shape": shape_name, "what": name, "ms": time, "of_copy": share, "of_copy_by_call": of_call})
            print(
                f"  {name:<48}{time:8.3f} ms {rate:6.2f} TB/s {share:6.1%} of copy, a single call {of_call:6.1%}", flush=True
            )
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "copy_tb_per_s": copy_rate, "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
