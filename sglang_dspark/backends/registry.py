"""Our class behind a name of SGLang's attention registry."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

NAME = "triton"


def serve_ragged_triton() -> None:
    """Let `--attention-backend triton` build our subclass, in this process from now on.

    To be called in compact mode only, before the attention backends are built. A second call
    changes nothing.
    """
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    before = ATTENTION_BACKENDS[NAME]
    if not isinstance(before, partial) or before.func is not _create:
        register_attention_backend(NAME)(partial(_create, before))


def _create(before: Callable[[Any], Any], runner: Any) -> Any:
    """before: what the registry had; it says what is wrong with cross attention."""
    if runner.model_config.is_encoder_decoder:
        return before(runner)
    from sglang_dspark.backends.triton import TritonAttnBackend

    return TritonAttnBackend(runner)
