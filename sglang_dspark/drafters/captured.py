"""Blocks that are chosen inside CUDA graphs.

A block behind the backbone's hidden states is a chain of some 40 small kernels (head, argmax, next
head), three times as many where tokens are drawn; launched one by one they cost the host more than
the device.

Greedy blocks are in the draft's own graphs: SGLang calls its `capture_tail_hooks` behind the
model's forward while it captures a graph, and what a hook computes is replayed with the forward.
Sampled ones need the requests' parameters and leave distributions behind, for which a greedy batch
must not pay: they have graphs of their own, which follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cuda_graph.pool import Buffer, Views
from sglang_dspark.drafters.base import DraftBlock
from sglang_dspark.verify.sampled_graphs import SampledGraphs
from sglang_dspark.verify.sampling import SamplingParams

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_dspark.drafters.served import ServedDraft

# Beyond it the device is busy for longer than the host needs to launch what it computes.
MAX_BYTES = 256 * 2**20


class GreedyBlocks:
    """served: a draft whose graphs are yet to be captured. choose: hidden states [rows, H] and
    token ids [rows] int64 of a captured forward -> the whole block of its requests."""

    def __init__(
        self, served: ServedDraft, choose: Callable[[torch.Tensor, torch.Tensor], DraftBlock]
    ) -> None:
        self._served, self._choose = served, choose
        # By the requests of a graph. To refer to them keeps their memory from later captures.
        self._blocks: dict[int, DraftBlock] = {}
        served.runner.capture_tail_hooks.append(self._capture)

    def _capture(
        self, graphs: Any, output: Any, forward_batch: ForwardBatch, num_tokens: int
    ) -> None:
        """Called in warm-ups too; the last call is the capture."""
        block = self._choose(output.hidden_states, forward_batch.input_ids)
        self._blocks[len(block.tokens)] = block

    def block(self, requests: int, depth: int) -> DraftBlock | None:
        """What the forward that just ran chose; None: it was not a replay. The next replay
        overwrites it."""
        replayed = self._served.replayed
        return None if replayed is None else self._blocks[replayed].part(requests, depth)


class SampledBlocks:
    """choose: hidden states [R, gamma, H], anchors [R] and how the requests sample -> their block.

    hidden: an example of one request's, [gamma, H]. vocab_size: V, of the block's distributions.
    sizes: numbers of requests to capture for, ascending; those whose distributions exceed MAX_BYTES
    are left out. kernels: see `SamplingParams`. backend: see `GraphPool`.
    """

    def __init__(
        self,
        choose: Callable[[torch.Tensor, torch.Tensor, SamplingParams], DraftBlock],
        hidden: torch.Tensor,
        vocab_size: int,
        sizes: list[int],
        generator: torch.Generator,
        kernels: bool,
        backend: str = "cuda",
    ) -> None:
        def run(views: Views, sampling: SamplingParams) -> DraftBlock:
            return choose(views["hidden"], views["anchors"], sampling)

        self._graphs = SampledGraphs(
            run,
            {
                "hidden": Buffer(hidden.dtype, tuple(hidden.shape)),
                "anchors": Buffer(torch.int64),
            },
            sizes,
            bytes_of_request=4 * len(hidden) * vocab_size,
            max_bytes=MAX_BYTES,
            generator=generator,
            kernels=kernels,
            backend=backend,
        )

    def block(
        self, hidden: torch.Tensor, anchors: torch.Tensor, sampling: SamplingParams, depth: int
    ) -> DraftBlock | None:
        """hidden [R, gamma, H], anchors [R] -> the first `depth` tokens of the block; None: there
        is no graph for it. The next one overwrites it."""
        requests = len(anchors)
        if requests > self._graphs.max_requests:
            return None
        inputs = {"hidden": hidden, "anchors": anchors}
        block: DraftBlock = self._graphs.replay(inputs, sampling)
        return block.part(requests, depth)
