"""What sampled batches run in CUDA graphs of their own, which greedy ones do not pay for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cuda_graph.pool import Buffer, GraphPool, Views
from cuda_graph.tiers import TierGrid
from sglang_dspark.drafters.base import DraftBlock
from sglang_dspark.verify.accept import Verdict, accept_sampled
from sglang_dspark.verify.sampling import PARAM_BUFFERS, SamplingParams, distribution

# Of logits and draft distributions, which are copied into the graph's buffers. With more the
# device is busy for longer than the host needs to launch what it computes.
MAX_BYTES = 48 * 2**20


class SampledGraphs:
    """A function of the requests of a batch and of how they sample, captured for some batch sizes.

    run: gets a view of each buffer, [R, ...], and the parameters of the R requests. Captured with
    all filters and with none. buffers: beside those of the parameters. sizes: numbers of requests,
    ascending; those of more than max_bytes, at bytes_of_request each, are left out. kernels: see
    `SamplingParams`. backend: see `GraphPool`.
    """

    def __init__(
        self,
        run: Callable[[Views, SamplingParams], Any],
        buffers: Mapping[str, Buffer],
        sizes: list[int],
        *,
        bytes_of_request: int,
        max_bytes: int,
        generator: torch.Generator,
        kernels: bool,
        backend: str = "cuda",
    ) -> None:
        fitting = [size for size in sizes if size * bytes_of_request <= max_bytes]
        self.max_requests = fitting[-1] if fitting else 0
        self._pools: dict[bool, GraphPool] = {}

        def forward(filters: bool) -> Callable[[Views], Any]:
            return lambda views: run(views, SamplingParams.of_buffers(views, filters, kernels))

        for filters in (False, True) if fitting else ():
            self._pools[filters] = GraphPool(
                TierGrid.of(fitting, fitting[-1], gamma=0),
                forward(filters),
                {**buffers, **PARAM_BUFFERS},
                generator.device,
                backend,
                generator=generator,
            )
            self._pools[filters].capture()

    def replay(self, inputs: Mapping[str, torch.Tensor], sampling: SamplingParams) -> Any:
        """What `run` returns, for at least as many requests; the next replay overwrites it.
        inputs: as many rows each as there are requests, max_requests at most."""
        pool = self._pools[sampling.filters]
        requests = len(sampling.top_k)
        tier = pool.grid.tiers[pool.grid.index(requests, requests)]
        return pool.replay(tier.tokens, {**inputs, **sampling.buffers()})


class SampledAccept:
    """Acceptance of whole windows, as static and cap-accept verify them: some 40 small kernels,
    which for few requests cost the host more than the device.

    width: W. vocab_size: V. sizes: numbers of requests to capture for, ascending; those whose
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
        def accept(views: Views, sampling: SamplingParams) -> Verdict:
            logits = views["logits"].flatten(0, 1)
            request = torch.arange(len(logits), device=logits.device) // width
            target = distribution(logits, sampling.of_rows(request))
            return accept_sampled(
                views["tokens"], views["probs"], target, generator, views["windows"]
            )

        self._width = width
        self._graphs = SampledGraphs(
            accept,
            {
                "logits": Buffer(torch.float32, (width, vocab_size)),
                "tokens": Buffer(torch.int64, (width - 1,)),
                "probs": Buffer(torch.float32, (width - 1, vocab_size)),
                "windows": Buffer(torch.int64, padding=width),
            },
            sizes,
            bytes_of_request=4 * (2 * width - 1) * vocab_size,
            max_bytes=MAX_BYTES,
            generator=generator,
            kernels=kernels,
            backend=backend,
        )
        self.max_requests = self._graphs.max_requests
        self._full_windows = torch.full((self.max_requests,), width, device=generator.device)

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
        if block.probs is None or depth < self._width - 1 or requests > self.max_requests:
            return None
        inputs = {
            "logits": logits[: requests * self._width].view(requests, self._width, -1),
            "tokens": block.tokens,
            "probs": block.probs,
            "windows": self._full_windows[:requests] if windows is None else windows,
        }
        found: Verdict = self._graphs.replay(inputs, sampling)
        return found.copied(requests)
