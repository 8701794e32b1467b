"""What is checked between the capture of graphs and the first request."""

from __future__ import annotations

from importlib import import_module

import pytest

from sglang_dspark.config import VerifyMode
from sglang_dspark.errors import ConfigError
from sglang_dspark.startup import check_backend


def backend(module: str, name: str):
    """An attention backend of SGLang, not initialised: that would need a GPU."""
    found = getattr(import_module(f"sglang.srt.layers.attention.{module}"), name)
    return object.__new__(found)


def test_a_backend_that_ignores_ragged_windows_is_refused_by_name():
    triton = backend("triton_backend", "TritonAttnBackend")
    with pytest.raises(ConfigError, match=r"TritonAttnBackend does not read ragged.*fa3.*host"):
        check_backend(triton, VerifyMode.COMPACT)
    check_backend(triton, VerifyMode.CAP_ACCEPT)
    check_backend(triton, VerifyMode.STATIC)


def test_the_host_platforms_is_not():
    from sglang_dspark.host.attention import HostAttention

    check_backend(object.__new__(HostAttention), VerifyMode.COMPACT)
