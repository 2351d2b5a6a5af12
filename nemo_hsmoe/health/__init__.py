"""What a run looks like: routing histograms and plots. Knows neither NeMo nor Lightning."""
