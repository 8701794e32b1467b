"""Sampled acceptance in CUDA graphs of its own.

Some 40 small kernels behind the target's forward: for few requests they cost the host more than the
device. They are not in the target's graphs, since greedy batches must not pay for them. Only whole
windows are taken, as static and cap-accept verify them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cuda_graph.pool import Buffer, GraphPool, Views
from cuda_graph.tiers import TierGrid
from sglang_dspark.drafters.base import DraftBlock
from sglang_dspark.verify.accept import Verdict, accept_sampled
from sglang_dspark.verify.sampling import PARAM_BUFFERS, SamplingParams, distribution

# Of logits and draft distributions, which are copied into the graph's buffers. With more the
# device is busy for longer than the host needs to launch what it computes.
MAX_BYTES = 48 * 2**20


class SampledAccept:
    """width: W. vocab_size: V. sizes: numbers of requests to capture for, ascending; those whose
    inputs exceed MAX_BYTES are left out. kernels: see `SamplingParams`. backend: see `GraphPool`.
    """

    def __init__(
        self,
        width: int,
        vocab_size: int,
        sizes: list[int],
        generator: torch.Generator,
        kernels: bool,
        backend: str = "cuda",
    ) -> None:
        self._width = width
        self._pools: dict[bool, GraphPool] = {}
        bytes_of_request = 4 * (2 * width - 1) * vocab_size
        fitting = [size for size in sizes if size * bytes_of_request <= MAX_BYTES]
        if not fitting:
            return
        buffers = {
            "logits": Buffer(torch.float32, (width, vocab_size)),
            "tokens": Buffer(torch.int64, (width - 1,)),
            "probs": Buffer(torch.float32, (width - 1, vocab_size)),
            "windows": Buffer(torch.int64, padding=width),
            **PARAM_BUFFERS,
        }

        def forward(filters: bool) -> Callable[[Views], Verdict]:
            def run(views: Views) -> Verdict:
                logits = views["logits"].flatten(0, 1)
                request = torch.arange(len(logits), device=logits.device) // width
                sampling = SamplingParams.of_buffers(views, filters, kernels).of_rows(request)
                target = distribution(logits, sampling)
                return accept_sampled(
                    views["tokens"], views["probs"], target, generator, views["windows"]
                )

            return run

        for filters in (False, True):
            self._pools[filters] = GraphPool(
                TierGrid.of(fitting, fitting[-1], gamma=0),
                forward(filters),
                buffers,
                generator.device,
                backend,
                generator=generator,
            )
            self._pools[filters].capture()
        self._full_windows = torch.full((fitting[-1],), width, device=generator.device)

    def verdict(
        self,
        block: DraftBlock,
        logits: torch.Tensor,
        sampling: SamplingParams,
        windows: torch.Tensor | None,
    ) -> Verdict | None:
        """Of R requests' whole windows; None: there is no graph for them.

        logits: [R * W or more, V]. windows: see `accept_sampled`. The next one overwrites the
        ceiling; the rest, which outlives the round, is copied.
        """
        requests, depth = block.tokens.shape
        pool = self._pools.get(sampling.filters)
        if pool is None or block.probs is None or depth < self._width - 1:
            return None
        if requests > pool.grid.max_requests:
            return None
        tier = pool.grid.tiers[pool.grid.index(requests, requests)]
        inputs = {
            "logits": logits[: requests * self._width].view(requests, self._width, -1),
            "tokens": block.tokens,
            "probs": block.probs,
            "windows": self._full_windows[:requests] if windows is None else windows,
            **sampling.buffers(),
        }
        found: Verdict = pool.replay(tier.tokens, inputs)
        return found.copied(requests)
