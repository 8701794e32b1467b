"""Greedy acceptance inside the target's verify graphs.

Like the greedy block in the draft's (`drafters.captured`): a dozen small kernels behind the
forward, replayed with it. A round whose logits are still to be changed (penalties, grammars), or
that samples, runs the same steps behind the graph instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_exec

from sglang_dspark import plugin
from sglang_dspark.verify.accept import Verdict, accept_greedy, accept_simulated

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dspark.verify.layout import VerifyRows
    from sglang_dspark.verify.simulated import SimulatedAcceptance


class CapturedAccept:
    """requests: of the largest graph; width: W. simulated: None if acceptance is real.

    What differs from round to round lies in static buffers, filled before the replay.
    """

    def __init__(
        self,
        requests: int,
        width: int,
        device: torch.device,
        simulated: SimulatedAcceptance | None = None,
    ) -> None:
        self._width, self._simulated = width, simulated
        self._windows = torch.full((requests,), width, device=device)
        self._index = torch.arange(requests * width, device=device).view(requests, width)
        self._coins = torch.zeros(requests, width - 1, device=device)
        # Whether the buffers are those of full windows
        self._full = True
        self._verdicts: dict[int, Verdict] = {}  # by the rows of a graph

    def capture(
        self, graphs: Any, output: Any, forward_batch: ForwardBatch, num_tokens: int
    ) -> None:
        """One of SGLang's `capture_tail_hooks`; called in warm-ups too, last in the capture."""
        requests = forward_batch.batch_size
        windows = self._windows[:requests]
        # What an earlier round has left for more requests than this tier holds must not lead out
        # of its rows.
        index = self._index[:requests].clamp(max=num_tokens - 1)
        drafts = forward_batch.input_ids[index[:, 1:]]
        target = output.next_token_logits.argmax(dim=-1)[index]
        if self._simulated is None:
            verdict = accept_greedy(drafts, target, windows)
        else:
            survives = self._simulated.survives(self._coins[:requests])
            verdict = accept_simulated(drafts, target, survives, windows)
        self._verdicts[num_tokens] = verdict

    def stage(self, rows: VerifyRows, drafted: int) -> None:
        """Before a replay. drafted: how many tokens of each window were proposed."""
        requests = len(rows.index)
        if self._simulated is not None:
            self._simulated.toss(self._coins[:requests], drafted)
        if rows.windows is None and rows.ragged is None:
            if not self._full:
                self._windows.fill_(self._width)
                torch.arange(self._index.numel(), out=self._index.view(-1))
            self._full = True
            return
        self._full = False
        if rows.windows is not None:
            self._windows[:requests].copy_(rows.windows)
        self._index[:requests].copy_(rows.index)

    def verdict(self, graph_rows: int, requests: int) -> Verdict:
        """Of the graph that was just replayed; its next replay overwrites the ceiling. The rest,
        which outlives the round, is copied."""
        return self._verdicts[graph_rows].copied(requests)


def capture_acceptance(
    runner: ModelRunner, width: int, device: torch.device, simulated: SimulatedAcceptance | None
) -> CapturedAccept | None:
    """Acceptance in the graphs of a target's runner, if it is going to capture any."""
    decode = get_exec().graph.cuda_graph_config.decode
    if device.type == "cpu" or decode.backend == Backend.DISABLED:
        return None
    if plugin.sanitizes_logits():
        return None  # the graph would see them before they are
    captured = CapturedAccept(max(decode.bs), width, device, simulated)
    runner.capture_tail_hooks.append(captured.capture)
    return captured
