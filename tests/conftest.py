"""Shared by all tests: threads, the path of the helpers, the environment, and the order."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)  # servers and other workers want the cores
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ  # of pytest-xdist

# A developer's settings must not decide whether a test passes.
for name in [n for n in os.environ if n.startswith(("SGLANG_", "SGLDSPARK_"))]:
    del os.environ[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cheap tests first, then servers, and last what wants the machine for itself."""
    items.sort(key=lambda item: ("alone" in item.keywords, "server" in item.keywords))


@pytest.fixture(scope="module", autouse=True)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """Shared with the other workers; a file marked `alone` waits until they have ended theirs."""
    if not IS_WORKER:
        yield
        return
    with (tmp_path_factory.getbasetemp().parent / "machine.lock").open("w") as lock:
        alone = request.node.get_closest_marker("alone") is not None
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
