"""Checkpoints that several server tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

import micro


@pytest.fixture(scope="session")
def noisy_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that depends on its whole context, and a draft that is right most of the time."""
    return micro.write_oracle(tmp_path_factory.mktemp("noisy"), target_noise=0.05)
