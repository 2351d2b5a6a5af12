"""The learning-rate rule of quantisation-aware training."""

QAT_FRACTION = 0.1
QAT_FACTOR = 0.5


def qat_learning_rate_factor(
    step: int, total_steps: int, fraction: float = QAT_FRACTION, factor: float = QAT_FACTOR
) -> float:
    """Multiplier on the schedule: `factor` for the first `fraction` of a run, 1 after.

    Args:
        step: iterations done before this one, so the first iteration is 0.
        total_steps: length of the run.
    """
    return factor if step < fraction * total_steps else 1.0
