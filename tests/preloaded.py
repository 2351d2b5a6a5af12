"""Imported once by the fork server of `tests.processes`."""

import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402

torch.set_num_threads(1)

import nemo_hsmoe.model.hybrid_moe  # noqa: E402
import nemo_hsmoe.recipes  # noqa: E402, F401
