"""Text to tokens to Megatron indexed datasets. Knows neither NeMo nor Lightning."""
