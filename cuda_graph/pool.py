"""One graph a tier over shared static buffers; replay copies the inputs in and pads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cuda_graph.tiers import TierGrid

Views = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Buffer:
    """A static input. shape: of one token. padding: what rows behind the real ones hold."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    padding: int = 0


class GraphPool:
    """Runs `forward` at the token counts of a grid, and nowhere else.

    forward: gets a view of each buffer, [tier tokens, ...], and returns tensors (or any nest of
        them) whose rows are the tier's. It is called once a tier by `capture` and, on the backend
        "eager", at every replay.
    backend: "cuda" replays a captured torch.cuda.CUDAGraph, "eager" calls `forward` over the same
        buffers with the same padding, so that what runs on a GPU can be tested without one.
    generator: what `forward` draws random numbers from; on "cuda" a graph must know it.
    before_replay: called with the tier's tokens before every replay on "eager", for tests.
    A result belongs to its tier's graph: the next replay of the tier overwrites it on "cuda".
    """

    def __init__(
        self,
        grid: TierGrid,
        forward: Callable[[Views], Any],
        buffers: Mapping[str, Buffer],
        device: torch.device,
        backend: str = "cuda",
        before_replay: Callable[[int], None] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if backend not in ("cuda", "eager"):
            raise ValueError(f"backend is {backend!r}; must be 'cuda' or 'eager'")
        if backend == "cuda" and device.type != "cuda":
            raise ValueError(f"backend 'cuda' needs a CUDA device, not {device}")
        largest = grid.tiers[-1].tokens
        self.grid, self.backend, self._forward = grid, backend, forward
        self._before_replay, self._generator = before_replay, generator
        self._specs = dict(buffers)
        self._buffers = {
            name: torch.full((largest, *b.shape), b.padding, dtype=b.dtype, device=device)
            for name, b in buffers.items()
        }
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._memory: Any = None

    def capture(self) -> None:
        """Capture every tier, the largest first, so that the smaller ones reuse its memory."""
        if self.backend == "eager":
            return
        for tier in reversed(self.grid.tiers):
            views = self._views(tier.tokens)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # outside of capture: lazy initialisation, autotuning
                self._forward(views)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            if self._generator is not None:
                graph.register_generator_state(self._generator)
            with torch.cuda.graph(graph, pool=self._memory):
                result = self._forward(views)
            self._memory = graph.pool()
            self._graphs[tier.tokens] = (graph, result)

    def holds(self, tokens: int) -> bool:
        """Whether there is a tier of exactly so many tokens."""
        return any(tier.tokens == tokens for tier in self.grid.tiers)

    def replay(self, tokens: int, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Run the tier of `tokens` tokens (one of the grid's) on inputs of at most as many rows."""
        if not self.holds(tokens):
            raise KeyError(f"no tier of {tokens} tokens; captured: {self.grid.describe()}")
        if inputs.keys() != self._specs.keys():
            raise KeyError(f"inputs are {sorted(inputs)}; must be {sorted(self._specs)}")
        if len({len(value) for value in inputs.values()}) > 1:
            raise ValueError(f"inputs have {[len(v) for v in inputs.values()]} rows; must be alike")
        for name, value in inputs.items():
            if len(value) > tokens:
                raise ValueError(f"{name} has {len(value)} rows; the tier holds {tokens}")
            buffer = self._buffers[name]
            buffer[: len(value)].copy_(value)
            if len(value) < tokens:
                buffer[len(value) : tokens].fill_(self._specs[name].padding)
        if self.backend == "eager":
            if self._before_replay is not None:
                self._before_replay(tokens)
            return self._forward(self._views(tokens))
        if tokens not in self._graphs:
            raise RuntimeError("replay before capture")
        graph, result = self._graphs[tokens]
        graph.replay()
        return result

    def _views(self, tokens: int) -> dict[str, torch.Tensor]:
        return {name: buffer[:tokens] for name, buffer in self._buffers.items()}
