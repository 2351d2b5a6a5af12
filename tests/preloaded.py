"""Imported once by the fork server of `tests.processes`."""

import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402

torch.set_num_threads(1)
