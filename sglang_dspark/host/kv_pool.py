"""KV pool of the host platform."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class HostKVPool(MHATokenToKVPool):
    """SGLang's pool without the Triton copy kernel that it compiles for speculation."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
