"""What a launch of each Triton kernel takes, beside its reference in torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median

import pytest
import torch

from sglang_dspark.kernels.top_windows import top_windows, top_windows_reference


def microseconds(run: Callable[[], object]) -> float:
    """Median of single calls, with the device idle before and after."""
    times = []
    for _ in range(60):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - began))
    return round(median(times[10:]), 1)


@pytest.mark.parametrize("requests", [1, 8, 64, 256])
def test_windows_from_a_budget(requests: int, record_property) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    values = torch.rand(requests, 7, generator=generator, device="cuda").cumprod(dim=1)
    budget = requests * 3
    assert torch.equal(top_windows(values, budget), top_windows_reference(values, budget))
    times = {
        "requests": requests,
        "kernel_us": microseconds(lambda: top_windows(values, budget)),
        "reference_us": microseconds(lambda: top_windows_reference(values, budget)),
    }
    record_property("top_windows", json.dumps(times))
