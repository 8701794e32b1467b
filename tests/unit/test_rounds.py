"""Rounds come back in order, with exactly what was launched, and with times that are theirs."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dspark.schedule import rounds as module
from sglang_dspark.schedule.rounds import Belief, FinishedRound, RoundLog
from sglang_dspark.schedule.scheduler import Decision


class Clock:
    """Time that passes when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def belief(survivals: torch.Tensor, **changes) -> Belief:
    nothing = torch.zeros(len(survivals), dtype=torch.bool)
    parts = {"broken": nothing, "evidence": None, "head_logits": None, "sampled": None, **changes}
    return Belief(survivals, **parts)


def launch(log: RoundLog, started: float, requests: int = 2, budget: int = 0, **changes) -> None:
    values = {
        "belief": belief(torch.rand(requests, 3)),
        "windows": torch.ones(requests, dtype=torch.int64),
        "ceiling": torch.zeros(requests, dtype=torch.int64),
        "tokens": 8,
        "full": False,
        "width": 4,
        **changes,
    }
    rows = np.arange(requests)
    log.launch(started, Decision(3, budget, 0), rows, rows + 50, **values)


def finish(log: RoundLog, requests: int = 2) -> FinishedRound:
    return log.finish(np.zeros(requests, dtype=np.int64))


def test_everything_comes_back_exactly():
    log, decision = RoundLog(), Decision(4, 5, 3, 6.5, 0.02)
    generator = torch.Generator().manual_seed(0)
    survivals = torch.rand(3, 4, generator=generator).cumprod(dim=1)
    evidence = torch.rand(3, 4, 2, generator=generator)
    head_logits = torch.rand(3, 4, generator=generator)
    rows, generations, accepted = np.array([9, 2, 4]), np.array([7, 2**40, 0]), np.array([0, 3, 1])
    log.launch(
        log.start(),
        decision,
        rows,
        generations,
        belief=Belief(
            survivals=survivals,
            broken=torch.tensor([True, False, True]),
            evidence=evidence,
            head_logits=head_logits,
            sampled=torch.tensor([False, False, True]),
        ),
        windows=torch.tensor([1, 5, 3]),
        ceiling=torch.tensor([4, 3, 0]),
        tokens=12,
        full=True,
        width=5,
    )
    done = log.finish(accepted)
    assert done.decision is decision and (done.tokens, done.full) == (12, True)
    assert done.survivals.tolist() == survivals.tolist() and done.survivals.dtype == np.float64
    assert done.windows.tolist() == [1, 5, 3] and done.ceiling.tolist() == [4, 3, 0]
    assert done.windows.dtype == done.ceiling.dtype == np.int64
    assert done.rows is rows and done.generations is generations and done.accepted is accepted
    assert done.broken.tolist() == [True, False, True] and done.broken.dtype == bool
    assert done.evidence.tolist() == evidence.tolist()
    assert done.head_logits.tolist() == head_logits.tolist()
    assert done.sampled.tolist() == [False, False, True] and done.sampled.dtype == bool


def test_rounds_of_different_depths_keep_their_own_survivals():
    log, drafted = RoundLog(), [torch.rand(2, depth) for depth in (3, 1, 7)]
    for survivals in drafted:
        launch(log, log.start(), belief=belief(survivals), windows=torch.tensor([2, 1]))
    launch(log, log.start(), belief=None)
    for survivals in drafted:
        done = finish(log)
        assert done.survivals.tolist() == survivals.tolist() and done.windows.tolist() == [2, 1]
    assert finish(log).survivals is None


def test_a_round_without_a_draft_has_no_survivals():
    log = RoundLog()
    launch(log, log.start(), belief=None)
    done = finish(log)
    assert done.survivals is None and done.broken.tolist() == [False, False]
    assert done.evidence is None and done.head_logits is None
    assert done.sampled.tolist() == [False, False]
    assert done.windows.tolist() == [1, 1] and done.ceiling.tolist() == [0, 0]


def test_full_windows_need_no_copy_from_the_device():
    log = RoundLog()
    launch(log, log.start(), belief=None, windows=None, full=True)
    done = log.finish(np.array([3, 0]))
    assert done.windows.tolist() == [4, 4]
    assert done.ceiling.tolist() == [3, 0], "a full window accepts what there is to accept"
    survivals = torch.rand(2, 3)
    launch(log, log.start(), belief=belief(survivals), windows=None, ceiling=torch.tensor([3, 1]))
    done = log.finish(np.array([3, 1]))
    assert done.windows.tolist() == [4, 4] and done.ceiling.tolist() == [3, 1]
    assert done.survivals.tolist() == survivals.tolist()


def test_rounds_end_in_the_order_of_their_launch():
    log = RoundLog()
    for budget in (1, 2):
        launch(log, log.start(), requests=budget, budget=budget)
    assert finish(log, 1).decision.budget == 1
    launch(log, log.start(), requests=3, budget=3)
    assert [finish(log, n).decision.budget for n in (2, 3)] == [2, 3]
    with pytest.raises(IndexError):
        finish(log)


def test_under_overlap_a_round_takes_until_the_next_one_starts(clock):
    log = RoundLog()
    for pause in (0.010, 0.020, 0.030):
        launch(log, log.start())
        clock.now += pause
    assert finish(log).seconds == pytest.approx(0.010)
    launch(log, log.start())
    clock.now += 0.040
    assert finish(log).seconds == pytest.approx(0.020)
    assert finish(log).seconds == pytest.approx(0.030)
    assert finish(log).seconds == pytest.approx(0.040)  # the last one ends when it is finished


def test_without_overlap_a_round_takes_until_it_is_finished(clock):
    log = RoundLog()
    for seconds in (0.010, 0.020):
        launch(log, log.start())
        clock.now += seconds
        assert finish(log).seconds == pytest.approx(seconds)
        clock.now += 5.0  # nobody asks anything


def test_an_interrupted_round_has_no_time(clock):
    log = RoundLog()
    launch(log, log.start())
    clock.now += 0.010
    launch(log, log.start())
    clock.now += 0.500
    log.interrupt()  # a prefill between the second round and the third
    clock.now += 0.500
    launch(log, log.start())
    clock.now += 0.030
    launch(log, log.start())
    assert finish(log).seconds == pytest.approx(0.010)
    assert finish(log).seconds is None
    assert finish(log).seconds == pytest.approx(0.030)


def test_times_are_in_seconds():
    log = RoundLog()
    launch(log, log.start())
    time.sleep(0.01)
    log.start()
    assert 0.01 <= finish(log).seconds < 60
