"""KV pool of the host platform."""

from __future__ import annotations

import math
import mmap

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only when written.

    torch.zeros writes every page, so a pool sized for the whole machine would fill it.
    """
    count = math.prod(shape)
    if not count:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class HostKVPool(MHATokenToKVPool):
    """SGLang's pool, allocated lazily and without the Triton copy kernel."""

    def _create_buffers_normal(self) -> None:
        if self.kv_cache_layout != "nhd":
            raise ValueError(
                f"KV layout {self.kv_cache_layout!r} is not supported on the host platform, "
                "only 'nhd' is: unset SGLANG_USE_HND_KVCACHE."
            )
        k_shape, v_shape = self._kv_buffer_shapes()
        self.k_buffer = [lazy_zeros(k_shape, self.store_dtype) for _ in range(self.layer_num)]
        self.v_buffer = [lazy_zeros(v_shape, self.store_dtype) for _ in range(self.layer_num)]

    def _init_kv_copy_and_warmup(self) -> None:
        # SGLang compiles a Triton kernel here as soon as speculation is on.
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
