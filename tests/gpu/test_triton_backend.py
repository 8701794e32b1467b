"""Our Triton attention backend natively: ragged windows against a loop over rows and heads.

The cases, the pool and the loop are those of tests/unit/backends, where Triton is interpreted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "backends"))
from triton_graphs import attend, rows_of
from triton_world import World, published, verify_batch

DEVICE = torch.device("cuda")


class DeviceWorld(World):
    """The same requests, all of them on the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pool.k, self.pool.v = self.pool.k.to(DEVICE), self.pool.v.to(DEVICE)
        self.table = self.table.to(DEVICE)

    @property
    def seq_lens(self) -> torch.Tensor:
        return super().seq_lens.to(DEVICE)

    @property
    def rows(self) -> torch.Tensor:
        return super().rows.to(DEVICE)

    def runner(self) -> SimpleNamespace:
        made = super().runner()
        made.device = DEVICE.type
        made.kv_index_translator = KVIndexTranslator(
            req_to_token=self.table,
            token_to_kv_pool_allocator=None,
            token_to_kv_pool=self.pool,
            page_size=1,
            device=DEVICE.type,
        )
        return made

    def batch(self, windows: Sequence[int], tier: int, ragged: bool = True) -> ForwardBatch:
        layout = RaggedVerifyLayout.from_verify_lens_device(
            verify_lens=torch.tensor(windows, device=DEVICE), graph_num_tokens=tier
        )
        return verify_batch(
            self.rows, self.seq_lens, self.slots(windows, tier), layout if ragged else None
        )


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")  # else products are in TF32
    with published():
        yield


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2)])
@pytest.mark.parametrize(
    ("windows", "tier"),
    [([1], 4), ([4, 1], 8), ([1, 3, 2], 8), ([1, 1, 1, 1], 8), ([4, 4, 4, 4], 16)],
)
def test_attention_of_ragged_windows(windows, tier, heads, kv_heads, window) -> None:
    world = DeviceWorld((7, 1, 19, 12)[: len(windows)], heads, kv_heads, window)
    rows = tuple(row.to(DEVICE) for row in rows_of(world, tier))
    expected = world.expected(*rows, windows)
    backend, batch = world.backend(), world.batch(windows, tier)
    backend.init_forward_metadata(batch)
    found = attend(world, backend, batch, rows)
    torch.testing.assert_close(found[: sum(windows)].double(), expected, rtol=0, atol=1e-5)
    assert found.isfinite().all()  # padding rows too
