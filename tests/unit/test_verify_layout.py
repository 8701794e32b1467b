"""Rows of a verify forward against plain loops, for windows of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cuda_graph import Tier, TierGrid
from sglang_dspark.verify.layout import full_rows, packed_rows


def round_of(requests: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions [R, W] that tell every place of the round apart, none of them 0."""
    tokens = 1000 + torch.arange(requests * width).view(requests, width)
    lens = 7 + 31 * torch.arange(requests)
    return tokens, lens.unsqueeze(1) + torch.arange(width)


def random_windows(requests: int, width: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1, width + 1, (requests,), generator=generator)


@pytest.mark.parametrize("spare", [0, 1, 9])
@pytest.mark.parametrize(
    "windows", [[1], [4], [2, 1, 4], [1, 1, 1], [4, 4, 4, 4], [3, 4, 1, 2, 1, 1, 4]], ids=str
)
def test_packed_rows_equal_a_loop(windows: list[int], spare: int) -> None:
    width, total = 4, sum(windows)
    tokens, positions = round_of(len(windows), width)
    tier = Tier(total + spare, len(windows) + spare)
    rows = packed_rows(tokens, positions, torch.tensor(windows), tier)

    expected = [
        (int(tokens[r, k]), int(positions[r, k]), r, r * width + k)
        for r, window in enumerate(windows)
        for k in range(window)
    ] + [(0, 0, len(windows) - 1, -1)] * spare
    found = (rows.tokens, rows.positions, rows.request, rows.columns)
    assert list(zip(*(column.tolist() for column in found), strict=True)) == expected

    starts = [sum(windows[:r]) for r in range(len(windows))]
    assert rows.index.tolist() == [
        [start + min(k, window - 1) for k in range(width)]
        for start, window in zip(starts, windows, strict=True)
    ]
    assert rows.windows.tolist() == windows


def test_sglang_is_told_the_lengths_and_the_tier() -> None:
    windows = torch.tensor([3, 1, 4])
    layout = packed_rows(*round_of(3, 4), windows, Tier(11, 3)).ragged
    assert layout.verify_lens.tolist() == [3, 1, 4] and layout.graph_num_tokens == 11
    assert layout.qo_indptr_device.tolist() == [0, 3, 4, 8]
    assert layout.extend_start_loc.tolist() == [0, 3, 4]


@pytest.mark.parametrize("windows", [None, [2, 1, 4]])
def test_full_rows_are_all_rows_in_order(windows: list[int] | None) -> None:
    tokens, positions = round_of(3, 4)
    kept = None if windows is None else torch.tensor(windows)
    rows = full_rows(tokens, positions, kept)
    assert rows.tokens.tolist() == tokens.flatten().tolist()
    assert rows.positions.tolist() == positions.flatten().tolist()
    assert rows.request.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert rows.index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert rows.windows is kept and rows.columns is None and rows.ragged is None


def batches(count: int) -> Iterator[tuple[TierGrid, int, torch.Tensor]]:
    """Grids, batches that they serve, and legal windows; the extremes among them."""
    generator = torch.Generator().manual_seed(0)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for case in range(count):
        if case % 10 == 0:
            most, gamma = between(1, 32), between(1, 8)
            grid = TierGrid.choose(most, gamma, between(1, 12))
        windows = random_windows(between(1, most), gamma + 1, generator)
        if case % 10 < 2:
            windows = torch.full_like(windows, 1 if case % 10 else gamma + 1)
        yield grid, gamma + 1, windows


def test_every_legal_window_has_its_own_row_in_the_planned_tier() -> None:
    for grid, width, windows in batches(400):
        requests, total = len(windows), int(windows.sum())
        tier = grid.fit(total, requests)
        assert total <= tier.tokens and requests <= tier.slots
        tokens, positions = round_of(requests, width)
        rows = packed_rows(tokens, positions, windows, tier)
        assert len(rows.tokens) == len(rows.columns) == tier.tokens

        inside = torch.arange(width) < windows.unsqueeze(1)
        own = rows.index[inside]
        assert torch.equal(own, torch.arange(total))  # each place a row, no row twice
        assert torch.equal(rows.tokens[own], tokens[inside])
        assert torch.equal(rows.positions[own], positions[inside])
        assert rows.columns[total:].eq(-1).all() and rows.tokens[total:].eq(0).all()
        # What is behind a window never names a row of another request, or of none.
        owner = torch.arange(requests).unsqueeze(1).expand_as(rows.index)
        assert torch.equal(rows.request[rows.index], owner) and int(rows.index.max()) < total
