import os
import tempfile
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def cache_dir() -> str:
    return os.environ.get("HSMOE_TEST_CACHE", str(Path(tempfile.gettempdir()) / "hsmoe-test-corpora"))


@pytest.fixture(scope="session")
def model_parallel():
    from nemo_hsmoe.runtime.process_groups import ensure_model_parallel

    ensure_model_parallel()
