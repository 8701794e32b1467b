"""Our Triton backend, its kernels interpreted where there is no GPU. Run by `test_triton.py`.

Metadata is compared exactly, and with SGLang's own class where windows are uniform; attention with
a loop over requests, rows and heads in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton_graphs import Graphs, attend, metadata_of, rows_of, uniform_batches
from triton_stack import Stack
from triton_world import (
    DEVICE,
    OURS,
    SGLANGS,
    TOLERANCE,
    D,
    W,
    World,
    published,
    replayed_batch,
)

from sglang_dspark.backends.triton import row_bounds

PREFIXES = (7, 1, 19, 12)


@pytest.fixture(autouse=True, scope="module")
def _published() -> Iterator[None]:
    with published():
        yield


# (windows, tier): lengths 1, odd, a full tier, one past a tier, every slot taken, none past one row
WINDOWS = [
    ([1], 4),
    ([3], 4),
    ([4, 4], 8),
    ([4, 1], 8),
    ([1, 3, 2], 8),
    ([2, 3, 4], 12),
    ([1, 1, 1, 1], 8),
    ([1, 4, 2, 1], 16),
]


@pytest.mark.parametrize(("windows", "tier"), WINDOWS)
@pytest.mark.parametrize("slots", ["taken", "free"])
def test_every_row_belongs_to_one_sequence_of_at_most_w_rows(windows, tier, slots):
    """Requests keep their windows, and ghosts take the rest, whole windows first."""
    free = 0 if slots == "taken" else 2
    ends = torch.tensor([0, *windows]).cumsum(0).int()
    lengths = row_bounds(ends, len(windows) + free, tier, W).diff().tolist()
    assert lengths[: len(windows)] == windows
    assert lengths[len(windows) : len(windows) + free] == [0] * free
    ghosts, missing = lengths[len(windows) + free :], tier - sum(windows)
    assert ghosts == [min(W, max(0, missing - W * g)) for g in range(tier // W)]
    assert sum(ghosts) == missing


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("windows", "tier"), WINDOWS)
def test_what_a_sequence_reads_is_what_a_loop_over_requests_says(windows, tier, graph, window):
    world = World(PREFIXES[: len(windows)], window=window)
    backend, batch = world.backend(), world.batch(windows, tier)
    if graph:
        captured = Graphs(backend, [tier]).captured[tier]
        backend.init_forward_metadata_out_graph(replayed_batch(batch))
        metadata = captured
    else:
        backend.init_forward_metadata(batch)
        metadata = backend.forward_metadata
    start = 0
    for s, (prefix, length) in enumerate(zip(world.prefixes, windows, strict=True)):
        assert metadata.qo_indptr[s : s + 2].tolist() == [start, start + length]
        start += length
        low, high = metadata.kv_indptr[s : s + 2].tolist()
        mine = world.table[s + 1, :prefix].tolist()
        assert metadata.kv_indices[low:high].tolist() == mine
        if window is not None:
            low, high = metadata.window_kv_indptr[s : s + 2].tolist()
            assert metadata.window_kv_indices[low:high].tolist() == mine[-window:]
    assert int(metadata.qo_indptr[-1]) == tier
    assert metadata.max_extend_len == W
    assert metadata.custom_mask is None
    ghosts = tier // W
    for indptr in (metadata.kv_indptr, metadata.window_kv_indptr):
        if indptr is not None:
            assert len(indptr) == len(metadata.qo_indptr)
            assert indptr[-ghosts - 1 :].diff().tolist() == [0] * ghosts


@pytest.mark.parametrize("window", [None, 5, 1])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2)])
@pytest.mark.parametrize(("windows", "tier"), WINDOWS)
def test_attention_without_graphs(windows, tier, heads, kv_heads, window):
    world = World(PREFIXES[: len(windows)], heads=heads, kv_heads=kv_heads, window=window)
    rows, backend, batch = rows_of(world, tier), world.backend(), world.batch(windows, tier)
    expected = world.expected(*rows, windows)
    backend.init_forward_metadata(batch)
    found = attend(world, backend, batch, rows)
    torch.testing.assert_close(found[: sum(windows)].double(), expected, rtol=0, atol=TOLERANCE)
    assert found.isfinite().all()  # padding rows too


@pytest.mark.parametrize("window", [None, 5])
def test_attention_in_graphs_of_several_tiers_replayed_in_turn(window):
    world = World(PREFIXES, window=window)
    graphs = Graphs(world.backend(), [4, 8, 12, 16])
    addresses = {tier: m.qo_indptr.data_ptr() for tier, m in graphs.captured.items()}
    for seed, (windows, tier) in enumerate([*WINDOWS[2:], *WINDOWS[:2]]):
        here = World(PREFIXES[: len(windows)], window=window)
        here.pool, here.table = world.pool, world.table
        rows = rows_of(here, tier, seed)
        expected = here.expected(*rows, windows)
        found = graphs.replay(here, here.batch(windows, tier), rows)
        torch.testing.assert_close(found[: sum(windows)].double(), expected, rtol=0, atol=TOLERANCE)
        assert found.isfinite().all()
    assert addresses == {tier: m.qo_indptr.data_ptr() for tier, m in graphs.captured.items()}


def test_rows_of_a_padded_window_are_those_of_the_full_one():
    """Bit for bit: how much of a window is verified changes nothing of what is."""
    world = World(PREFIXES[:2], heads=4, kv_heads=2)
    q, k, v = rows_of(world, 8)
    backend = world.backend()
    full = world.batch([4, 4], 8, ragged=False)
    backend.init_forward_metadata(full)
    whole = attend(world, backend, full, (q, k, v))
    kept = torch.tensor([0, 1, 4])  # two rows of the first window, one of the second
    packed = torch.nn.functional.pad(kept, (0, 1))
    ragged = world.batch([2, 1], 4)
    backend.init_forward_metadata(ragged)
    part = attend(world, backend, ragged, (q[packed], k[packed], v[packed]))
    assert torch.equal(part[:3], whole[kept])


class NoHostSync(TorchDispatchMode):
    """Raises where a value travels from the device to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def test_a_replay_waits_for_nothing():
    world = World(PREFIXES, window=5)
    backend = world.backend()
    captured = Graphs(backend, [8, 16]).captured[16]
    batch = replayed_batch(world.batch([1, 4, 2, 1], 16))
    with NoHostSync():
        backend.init_forward_metadata_out_graph(batch)
    assert captured.qo_indptr.tolist() == [0, 1, 5, 7, 8, 12, 16, 16, 16]
    with pytest.raises(AssertionError, match="waits"), NoHostSync():
        int(captured.qo_indptr[-1])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("kind", "in_graph"),
    [("verify", False), ("verify", True), ("prompt", False), ("decode", False), ("decode", True)],
)
def test_all_other_forwards_are_sglangs(kind, in_graph, window):
    world = World(PREFIXES, window=window)
    batch = uniform_batches(world)[kind]
    scratch = ("attn_logits", "attn_lse", "lean_Mp", "lean_Lp", "lean_Op")  # not written yet
    ours, sglangs = (
        metadata_of(world.backend(class_), batch, in_graph) for class_ in (OURS, SGLANGS)
    )
    for name, expected in sglangs.items():
        if name.endswith("kv_indices") and expected is not None:
            used = int(sglangs[name.replace("indices", "indptr")][-1])
            assert torch.equal(ours[name][:used], expected[:used]), name
        elif isinstance(expected, torch.Tensor) and name not in scratch:
            assert torch.equal(ours[name], expected), name
            assert ours[name].dtype == expected.dtype, name
        elif not isinstance(expected, torch.Tensor):
            assert ours[name] == expected, name


def test_sglang_knows_our_class_by_its_own_name():
    """Else it would capture verify graphs with a custom mask, which nobody refreshes."""
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    assert resolve_dflash_verify_mask_policy(World([1]).backend()) == ("TritonAttnBackend", False)


# --- greedy identity -----------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("windows", "tier"), [([4, 1, 2], 8), ([3, 4, 1], 12)])
def test_verified_windows_continue_as_plain_decoding_does(windows, tier, graph):
    """Every row of a window of the target's own tokens chooses the token that follows."""
    world = World(PREFIXES[: len(windows)], heads=4, kv_heads=2, layers=2)
    stack, backend = Stack(world), world.backend()
    texts, packed, positions = [], [], []
    for row, (prefix, window) in enumerate(zip(world.prefixes, windows, strict=True), start=1):
        rng = torch.Generator(DEVICE).manual_seed(row)
        start = torch.randint(0, 29, (prefix,), generator=rng)
        text = stack.greedy(start, window + 1)
        stack.alone(text[:prefix], keep_in=world.table[row, :prefix].long())
        texts.append(text)
        packed.append(text[prefix : prefix + window])
        positions.append(torch.arange(prefix, prefix + window))
    padding = (0, tier - sum(windows))
    tokens = torch.nn.functional.pad(torch.cat(packed), padding)
    places = torch.nn.functional.pad(torch.cat(positions), padding)
    batch = world.batch(windows, tier)
    if graph:
        captured = Graphs(backend, [tier, 16]).captured[tier]
        batch = replayed_batch(batch)
        backend.init_forward_metadata_out_graph(batch)
        backend.forward_metadata = captured
    else:
        backend.init_forward_metadata(batch)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.view(-1, world.kv_heads, D) for x in (k, v))
        return backend.forward_extend(q, k, v, world.layer(layer), batch)

    logits = stack.logits(tokens, places, attend)
    assert logits.isfinite().all()
    start = 0
    for prefix, window, text in zip(world.prefixes, windows, texts, strict=True):
        chosen = logits[start : start + window].argmax(-1)
        assert chosen.tolist() == text[prefix + 1 : prefix + 1 + window].tolist()
        start += window
