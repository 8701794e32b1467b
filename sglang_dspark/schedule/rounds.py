"""Rounds that were launched and whose results have not come back yet.

What the host wants to know of a round (survivals, windows, ceilings) is copied to pinned memory on
the device's own time. SGLang waits for every round's results anyway, in order, and then calls the
worker: by then these copies have arrived too, so reading them waits for nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.utils.common import async_d2h

from cost_tables.model import Floats
from sglang_dspark.schedule.scheduler import Decision, Ints


@dataclass(frozen=True)
class Belief:
    """What is thought of a drafted block, on the device.

    survivals: [R, D] float32. broken: [R] bool, requests whose confidences are not finite.
    evidence: [R, D, F] float32, head_logits: [R, D] float32, what the survivals are made of; None:
    there is none. sampled: [R] bool, requests that are not greedy; None: all are.
    """

    survivals: torch.Tensor
    broken: torch.Tensor
    evidence: torch.Tensor | None
    head_logits: torch.Tensor | None
    sampled: torch.Tensor | None

    def without_evidence(self) -> Belief:
        """For requests whose tokens are not what the target alone would give: penalties, grammars
        and the like change its distribution and not the draft's, and teach others nothing."""
        return replace(self, evidence=None, head_logits=None)

    def parts(self) -> dict[str, torch.Tensor | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class FinishedRound:
    """A round that is over. R requests.

    seconds: from its start to that of the next round, None if anything came in between.
    tokens: M, padding included. full: whether every row of every window was run.
    survivals: [R, D], None without a draft. windows: [R]. accepted, ceiling: [R], drafts; the
    latter means something only if `full`. broken: [R], whose confidences are NaN or infinite.
    evidence, head_logits, sampled: as in `Belief`; the last is of all requests.
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
    evidence: Floats | None
    head_logits: Floats | None
    sampled: npt.NDArray[np.bool_]

    @property
    def drafted(self) -> bool:
        """Whether there was a block, even if nothing of it was to be verified (cap-accept)."""
        return self.decision.drafts or self.survivals is not None


@dataclass
class _Launched:
    decision: Decision
    rows: Ints
    generations: Ints
    started: float
    next_started: float | None
    tokens: int
    full: bool
    belief: Belief | None
    packet: torch.Tensor | None
    width: int


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
        belief: Belief | None,
        windows: torch.Tensor | None,
        ceiling: torch.Tensor,
        tokens: int,
        full: bool,
        width: int,
    ) -> None:
        """Everything of the round is queued on the device. windows, ceiling: [R]; windows None: all
        are `width`, so that the ceiling is what was accepted."""
        packet = None
        if windows is not None or belief is not None:
            if windows is None:
                windows = torch.full_like(ceiling, width)
            known = [] if belief is None else belief.parts().values()
            packet = async_d2h(torch.cat(_columns([windows, ceiling, *known]), dim=1))
        self._running = _Launched(
            decision,
            rows,
            generations,
            started,
            None,
            tokens,
            full,
            belief,
            packet,
            width,
        )
        self._launched.append(self._running)

    def finish(self, accepted: Ints) -> FinishedRound:
        """The oldest round's results are on the host. accepted: [R] drafts."""
        done = self._launched.popleft()
        ended = done.next_started
        if done is self._running:  # nothing was launched since: it ends here
            ended = time.perf_counter()
        if done.packet is None:
            packet = np.empty((len(accepted), 2), dtype=np.float32)
            packet[:, 0], packet[:, 1] = done.width, accepted
        else:
            packet = done.packet.numpy()
        return FinishedRound(
            decision=done.decision,
            rows=done.rows,
            generations=done.generations,
            seconds=None if ended is None else ended - done.started,
            tokens=done.tokens,
            full=done.full,
            windows=packet[:, 0].astype(np.int64),
            accepted=accepted,
            ceiling=packet[:, 1].astype(np.int64),
            **_unpack(packet[:, 2:], done.belief),
        )


def _columns(parts: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Each as float32 [R, n], to travel in one copy."""
    return [part.reshape(len(part), -1).float() for part in parts if part is not None]


def _unpack(packet: npt.NDArray[np.float32], belief: Belief | None) -> dict[str, Any]:
    """What `_columns` made of a belief's parts, by the same names; None where there was none."""
    found: dict[str, Any] = dict.fromkeys(field.name for field in fields(Belief))
    taken = 0
    for name, part in ({} if belief is None else belief.parts()).items():
        if part is not None:
            start, taken = taken, taken + part.numel() // len(part)
            found[name] = packet[:, start:taken].reshape(part.shape).astype(np.float64)
    for name in ("broken", "sampled"):
        known = found[name]
        found[name] = np.zeros(len(packet), dtype=bool) if known is None else known > 0
    return found
