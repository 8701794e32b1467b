"""Rows that wait for the next draft: all are written, in order, before anybody reads them."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.drafters.backlog import MAX_ROUNDS, MAX_ROWS, Backlog, ContextRows
from sglang_dspark.drafters.dflash import DFlashDrafter
from sglang_dspark.drafters.eagle3 import Eagle3Drafter


def rows(count: int, mark: int = 0) -> ContextRows:
    slots = torch.full((count,), mark)
    return ContextRows(torch.zeros(count, 8), torch.zeros(count, dtype=torch.int64), slots)


def backlog() -> tuple[Backlog[ContextRows], list[list[int]]]:
    """And what has been written: the marks of each write's rounds."""
    written: list[list[int]] = []
    return Backlog(lambda rounds: written.append([int(r.slots[0]) for r in rounds])), written


def test_rounds_wait_until_one_does_not():
    waiting, written = backlog()
    waiting.add(rows(4, 1), wait=True)
    waiting.add(rows(4, 2), wait=True)
    assert written == []
    waiting.add(rows(4, 3), wait=False)
    assert written == [[1, 2, 3]]
    waiting.flush()
    assert written == [[1, 2, 3]]


def test_no_more_than_so_many_rounds_or_rows_wait():
    waiting, written = backlog()
    for i in range(MAX_ROUNDS):
        waiting.add(rows(1, i), wait=True)
    assert written == [list(range(MAX_ROUNDS))]
    waiting.add(rows(MAX_ROWS - 1, 1), wait=True)
    assert len(written) == 1
    waiting.add(rows(1, 2), wait=True)
    assert written[1:] == [[1, 2]]


class Flushed(Exception):
    pass


class Alarm:
    def flush(self) -> None:
        raise Flushed


@pytest.mark.parametrize("drafter", [DFlashDrafter, Eagle3Drafter])
def test_a_draft_and_a_prefill_start_with_what_waits(drafter):
    made = object.__new__(drafter)
    made._backlog = Alarm()
    with pytest.raises(Flushed):
        made.propose(None, 1)
    with pytest.raises(Flushed):
        made.prefill(None, None, None, None)
