"""Rounds that were launched and whose results have not come back yet.

What the host wants to know of a round (survivals, windows, ceilings) is copied to pinned memory on
the device's own time. SGLang waits for every round's results anyway, in order, and then calls the
worker: by then these copies have arrived too, so reading them waits for nothing.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.utils.common import async_d2h

from cost_tables.model import Floats
from sglang_dspark.schedule.scheduler import Decision, Ints


@dataclass(frozen=True)
class FinishedRound:
    """A round that is over. R requests.

    seconds: from its start to that of the next round, None if anything came in between.
    tokens: M, padding included. full: whether every row of every window was run.
    survivals: [R, D], None without a draft. windows: [R]. accepted, ceiling: [R], drafts; the
    latter means something only if `full`. broken: [R], whose confidences are NaN or infinite.
    """

    decision: Decision
    rows: Ints
    generations: Ints
    seconds: float | None
    tokens: int
    full: bool
    survivals: Floats | None
    windows: Ints
    accepted: Ints
    ceiling: Ints
    broken: npt.NDArray[np.bool_]


@dataclass
class _Launched:
    decision: Decision
    rows: Ints
    generations: Ints
    started: float
    next_started: float | None
    tokens: int
    full: bool
    gamma: int
    packet: torch.Tensor


class RoundLog:
    """First in, first out."""

    def __init__(self) -> None:
        self._launched: deque[_Launched] = deque()
        self._running: _Launched | None = None  # the one whose time is being taken

    def start(self) -> float:
        """A round begins. Returns the time, to be given to `launch`."""
        now = time.perf_counter()
        if self._running is not None:
            self._running.next_started = now
        return now

    def interrupt(self) -> None:
        """Something else than a round begins: the last round's time is nobody's."""
        self._running = None

    def launch(
        self,
        started: float,
        decision: Decision,
        rows: Ints,
        generations: Ints,
        *,
        survivals: torch.Tensor | None,
        windows: torch.Tensor,
        ceiling: torch.Tensor,
        broken: torch.Tensor | None,
        tokens: int,
        full: bool,
    ) -> None:
        """Everything of the round is queued on the device. survivals [R, D]; the others [R]."""
        columns = [windows.float(), ceiling.float()]
        if broken is not None:
            columns.append(broken.float())
        packet = torch.stack(columns, dim=1)
        if survivals is not None:
            packet = torch.cat([packet, survivals], dim=1)
        self._running = _Launched(
            decision,
            rows,
            generations,
            started,
            None,
            tokens,
            full,
            0 if survivals is None else survivals.shape[1],
            async_d2h(packet),
        )
        self._launched.append(self._running)

    def finish(self, accepted: Ints) -> FinishedRound:
        """The oldest round's results are on the host. accepted: [R] drafts."""
        done = self._launched.popleft()
        ended = done.next_started
        if done is self._running:  # nothing was launched since: it ends here
            ended = time.perf_counter()
        packet = done.packet.numpy()
        gamma = done.gamma
        return FinishedRound(
            decision=done.decision,
            rows=done.rows,
            generations=done.generations,
            seconds=None if ended is None else ended - done.started,
            tokens=done.tokens,
            full=done.full,
            survivals=packet[:, -gamma:].astype(np.float64) if gamma else None,
            windows=packet[:, 0].astype(np.int64),
            accepted=accepted,
            ceiling=packet[:, 1].astype(np.int64),
            broken=packet[:, 2] > 0 if gamma else np.zeros(len(packet), dtype=bool),
        )
