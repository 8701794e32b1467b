"""Replay over shared static buffers: real rows are right, padding rows are padding every time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from cuda_graph import Buffer, GraphPool, TierGrid

GRID = TierGrid.of([2, 5, 12], max_requests=3, gamma=3)
BUFFERS = {"x": Buffer(torch.float32, shape=(4,)), "slot": Buffer(torch.int64, padding=-1)}
CPU = torch.device("cpu")


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def inputs(rows: int) -> dict[str, torch.Tensor]:
    """Nothing in them is a padding value."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
    return {"x": x, "slot": torch.arange(rows) + 100}


def seen(views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A forward that returns what it was given."""
    return {name: view.clone() for name, view in views.items()}


@pytest.mark.parametrize(("rows", "tokens"), [(1, 2), (2, 2), (3, 5), (5, 5), (6, 12), (1, 12)])
def test_real_rows_equal_the_direct_call(rows: int, tokens: int) -> None:
    model, given = mlp(), inputs(rows)
    pool = GraphPool(GRID, lambda views: model(views["x"]), BUFFERS, CPU, backend="eager")
    pool.capture()
    result = pool.replay(tokens, given)
    assert result.shape == (tokens, 3)
    torch.testing.assert_close(result[:rows], model(given["x"]))


def test_padding_rows_never_show_an_earlier_replay() -> None:
    pool = GraphPool(GRID, seen, BUFFERS, CPU, backend="eager")
    for rows, tokens in ((12, 12), (1, 12), (5, 5), (1, 2), (3, 5), (2, 12)):
        given = inputs(rows)
        found = pool.replay(tokens, given)
        assert len(found["x"]) == len(found["slot"]) == tokens
        assert torch.equal(found["x"][:rows], given["x"])
        assert torch.equal(found["slot"][:rows], given["slot"])
        assert found["x"][rows:].eq(0).all() and found["slot"][rows:].eq(-1).all()


def test_inputs_are_copied_not_kept() -> None:
    pool = GraphPool(GRID, seen, BUFFERS, CPU, backend="eager")
    given = inputs(2)
    pool.replay(2, given)
    given["x"].zero_()
    assert pool.replay(2, inputs(2))["x"].ne(0).all() and given["x"].eq(0).all()


def test_what_does_not_fit_is_refused() -> None:
    pool = GraphPool(GRID, seen, BUFFERS, CPU, backend="eager")
    with pytest.raises(ValueError, match="x has 6 rows; the tier holds 5"):
        pool.replay(5, inputs(6))
    with pytest.raises(ValueError, match=r"inputs have \[3, 2\] rows; must be alike"):
        pool.replay(5, {"x": inputs(3)["x"], "slot": inputs(2)["slot"]})
    with pytest.raises(KeyError, match="no tier of 6 tokens; captured: 2, 5, 12"):
        pool.replay(6, inputs(6))
    with pytest.raises(KeyError, match=r"inputs are \['x'\]; must be \['slot', 'x'\]"):
        pool.replay(5, {"x": inputs(2)["x"]})
    with pytest.raises(KeyError, match=r"inputs are \['slot', 'x', 'y'\]; must be"):
        pool.replay(5, {**inputs(2), "y": torch.zeros(2)})


def test_backends() -> None:
    with pytest.raises(ValueError, match="backend 'cuda' needs a CUDA device, not cpu"):
        GraphPool(GRID, seen, BUFFERS, CPU)
    with pytest.raises(ValueError, match="backend is 'gpu'; must be 'cuda' or 'eager'"):
        GraphPool(GRID, seen, BUFFERS, CPU, backend="gpu")
