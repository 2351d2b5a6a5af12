"""The hybrid sparse mixture-of-experts transformer on Megatron Core. Knows neither NeMo nor Lightning."""
