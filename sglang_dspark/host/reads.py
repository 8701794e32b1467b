"""Which cached tokens each row of a forward reads: the plan of host attention.

A forward packs the rows of its requests one after the other. Request r has q_r rows and a
cache of n_r tokens whose last q_r tokens are these rows. A `Group` is a set of requests
that are attended in one call, padded to the longest of them; a `Read` is what a kind of
layer gathers for a group. Both are built once per forward and shared by all layers.

Symbols: R requests of a group, Q rows each (padded), N cached tokens each (padded),
M rows of the forward (packed), G query heads per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

# Reading this many padding bytes of K/V costs about as much as one more call per layer.
GROUP_OVERHEAD_BYTES = 256 * 1024
# Requests with more rows than this are attended alone: their matrices are large enough.
LONG_ROWS = 16


class Kind(NamedTuple):
    """What distinguishes the attention layers of a model."""

    causal: bool
    window: int  # tokens before (and, if not causal, after) the row's own; -1: all
    swa_pool: bool  # reads the sliding-window sub-pool, which has slot ids of its own


class Read(NamedTuple):
    """What one kind of layer reads for one group."""

    slots: torch.Tensor  # int64 [R*N]; padding repeats a live slot of the same request
    num_tokens: int  # N
    mask: torch.Tensor | None  # [R, 1, Q*G or 1, N], 0 or -inf; None: every token allowed
    is_causal: bool  # plain triangle: no mask, the kernel skips the upper half


@dataclass
class Group:
    """Requests that are attended in one call."""

    requests: torch.Tensor  # int64 [R], rows of req_to_token
    q_lens: torch.Tensor  # int64 [R], >= 0
    kv_lens: torch.Tensor  # int64 [R], rows included
    num_rows: int  # Q
    first_row: int  # packed row of the first request, used when `gather` is None
    gather: torch.Tensor | None  # int64 [R*Q]: packed row for each padded one; None: a slice
    live: torch.Tensor | None  # int64 [m]: padded rows that are real; None: all
    reads: dict[tuple[Kind, torch.dtype, int], Read] = field(default_factory=dict)


def split_by_length(lengths: torch.Tensor, budget: int) -> list[torch.Tensor]:
    """Cuts requests into sets of similar length.

    lengths: int64 [R]. Padding every request to the longest of its set wastes tokens;
    a cut is made where it saves the most, as long as it saves more than `budget` tokens.
    Returns index tensors that together cover 0..R-1.
    """
    everyone = torch.arange(lengths.numel())
    if int(lengths.max()) * lengths.numel() - int(lengths.sum()) <= budget:
        return [everyone]
    longest_first, order = lengths.sort(descending=True)
    return [order[part] for part in _cut(longest_first, everyone, budget)]


def _cut(lengths: torch.Tensor, index: torch.Tensor, budget: int) -> list[torch.Tensor]:
    """`split_by_length` for sorted lengths (longest first) and their positions."""
    n = lengths.numel()
    if n == 1:
        return [index]
    before = torch.arange(1, n)
    cost = before * lengths[0] + (n - before) * lengths[1:]
    best = int(cost.argmin())
    if n * int(lengths[0]) - int(cost[best]) <= budget:
        return [index]
    at = best + 1
    return _cut(lengths[:at], index[:at], budget) + _cut(lengths[at:], index[at:], budget)


class ReadPlan:
    """Groups of one forward, and what they read."""

    def __init__(
        self,
        *,
        req_to_token: torch.Tensor,  # int32 [rows, width]
        requests: torch.Tensor,  # int [R]
        q_lens: torch.Tensor,  # int [R]
        kv_lens: torch.Tensor,  # int [R], rows included
        uniform_rows: int | None,  # Q if all q_lens are known to equal it
        token_bytes: int,  # K and V of one token in one layer
    ) -> None:
        self.req_to_token = req_to_token
        self.requests = requests.long()
        self.q_lens = q_lens.long()
        self.kv_lens = kv_lens.long()
        self.num_rows = int(self.q_lens.sum())
        self.groups: list[Group] = []
        if not self.num_rows:
            return
        budget = GROUP_OVERHEAD_BYTES // token_bytes
        starts = self.q_lens.cumsum(0) - self.q_lens
        if uniform_rows is not None and uniform_rows <= LONG_ROWS:
            self._add_short(torch.arange(self.requests.numel()), starts, budget)
            return
        long = self.q_lens > LONG_ROWS
        for r in long.nonzero().flatten().tolist():
            self._add(torch.tensor([r]), starts)
        short = (~long & (self.q_lens > 0)).nonzero().flatten()
        if short.numel():
            self._add_short(short, starts, budget)

    def _add_short(self, members: torch.Tensor, starts: torch.Tensor, budget: int) -> None:
        for part in split_by_length(self.kv_lens[members], budget):
            self._add(members[part], starts)

    def _add(self, members: torch.Tensor, starts: torch.Tensor) -> None:
        q_lens, kv_lens = self.q_lens[members], self.kv_lens[members]
        num_rows = int(q_lens.max())
        first = starts[members]
        begin = int(first[0])
        full = bool((q_lens == num_rows).all())
        rows = torch.arange(num_rows)
        gather = live = None
        if not (full and bool((first == begin + torch.arange(len(members)) * num_rows).all())):
            # Padded rows repeat the request's last row; `live` drops them afterwards.
            gather = first[:, None] + torch.minimum(rows, (q_lens - 1).clamp(min=0)[:, None])
            gather = gather.clamp(max=self.num_rows - 1).flatten()
        if not full:
            live = (rows < q_lens[:, None]).flatten().nonzero().flatten()
        self.groups.append(
            Group(self.requests[members], q_lens, kv_lens, num_rows, begin, gather, live)
        )

    def read(
        self,
        group: Group,
        kind: Kind,
        *,
        dtype: torch.dtype,
        heads_per_kv: int,
        full_to_swa: torch.Tensor | None = None,
    ) -> Read:
        """What layers of `kind` read for `group`; built at the first layer of a forward.

        full_to_swa: int [slots], needed if kind.swa_pool.
        """
        key = (kind, dtype, heads_per_kv)
        if key not in group.reads:
            group.reads[key] = self._build(group, kind, dtype, heads_per_kv, full_to_swa)
        return group.reads[key]

    def _build(
        self,
        group: Group,
        kind: Kind,
        dtype: torch.dtype,
        heads_per_kv: int,
        full_to_swa: torch.Tensor | None,
    ) -> Read:
        q_lens, kv_lens = group.q_lens[:, None], group.kv_lens[:, None]  # [R, 1]
        first_row = kv_lens - q_lens  # position of the request's first row
        begin = torch.zeros_like(kv_lens)
        if kind.window >= 0:
            # Tokens before every row's window may have been freed and overwritten.
            begin = (first_row - kind.window).clamp(min=0)
        n = int((kv_lens - begin).max())
        tokens = begin + torch.arange(n)  # [R, N] positions in the request
        columns = torch.minimum(tokens, kv_lens - 1).clamp(min=0)
        slots = self.req_to_token[group.requests[:, None], columns].long().flatten()
        if kind.swa_pool:
            assert full_to_swa is not None
            slots = full_to_swa[slots].long()
        if (
            kind.causal
            and kind.window < 0
            and len(q_lens) == 1
            and group.num_rows > LONG_ROWS
            and int(first_row) == 0
        ):
            return Read(slots, n, None, True)
        rows = first_row + torch.minimum(torch.arange(group.num_rows), q_lens - 1)
        allowed = _allowed(kind, rows[:, :, None], tokens[:, None, :], kv_lens[:, :, None])
        if bool(allowed.all()):
            return Read(slots, n, None, False)
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))
        if group.num_rows > 1:
            mask = mask.repeat_interleave(heads_per_kv, dim=1)
        return Read(slots, n, mask[:, None], False)


def _allowed(
    kind: Kind, rows: torch.Tensor, tokens: torch.Tensor, kv_lens: torch.Tensor
) -> torch.Tensor:
    """Who reads what. rows [R, Q, 1], tokens [R, 1, N], kv_lens [R, 1, 1] -> bool [R, Q, N]."""
    allowed = tokens < kv_lens
    if kind.causal:
        allowed = allowed & (tokens <= rows)
    if kind.window >= 0:
        allowed = allowed & (tokens >= rows - kind.window)
        if not kind.causal:
            allowed = allowed & (tokens <= rows + kind.window)
    return allowed.expand(-1, rows.shape[1], -1)
