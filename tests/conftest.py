"""Shared by all tests: thread count, the path of the helpers, and the environment they may see."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(2)

# A developer's settings must not decide whether a test passes.
for name in [n for n in os.environ if n.startswith(("SGLANG_", "SGLDSPARK_"))]:
    del os.environ[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cheap tests first, and server tests grouped by file, so that servers are shared."""
    items.sort(key=lambda item: "server" in item.keywords)
