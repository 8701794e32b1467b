"""The one place that keeps these tests from machines without CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        needs_cuda = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if FOLDER in item.path.parents:
                item.add_marker(needs_cuda)
