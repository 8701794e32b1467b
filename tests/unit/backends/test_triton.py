"""Ragged windows on Triton: see `triton_cases.py`. On a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

CASES = Path(__file__).with_name("triton_cases.py")


def test_ragged_windows_on_triton():
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environ = {**os.environ, "PYTHONPATH": str(CASES.parent)}
    if not torch.cuda.is_available():
        environ["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        env=environ,
        cwd=CASES.parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
