"""Compute kernels, each beside a plain torch reference. Knows neither Megatron nor NeMo."""
