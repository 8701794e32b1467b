"""Which cached tokens each row of a forward reads: the plan of host attention.

A forward packs the rows of its requests one after the other. Request r has q_r rows, its
first one at position p_r of the request; its cache holds n_r = p_r + q_r tokens, rows
included. A `Group` is a set of requests that are attended in one call, padded to the
longest of them; a `Read` is what one kind of layer gathers for a group. Both are built
once per forward and shared by all layers.

Exactness. A row must get the same bits whether it is decoded alone or verified in a window,
whatever else is in the batch. The matrix products under torch's attention choose their
summation order by their shape, so shapes are padded to classes that all give the same order:
see `padded_rows` and `padded_tokens`.

Symbols: R requests of a group, Q rows each (padded), N cached tokens each (padded),
M rows of the forward (packed), G query heads per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

# Reading this many padding bytes of K and V costs about as much as one more call per layer.
GROUP_OVERHEAD_BYTES = 256 * 1024
# Requests with more rows than this are attended alone, in blocks of ROW_BLOCK: their
# matrices are large enough, and a block skips the tokens after it.
LONG_ROWS = 32
ROW_BLOCK = 256


def padded_rows(rows: int) -> int:
    """Rows of a product so that its kernels treat each row alike: a multiple of 4.

    MKL has kernels of their own for 1, 2 and 3 rows, and torch cuts rows into blocks of a
    multiple of 4, so only the remainder modulo 4 can reach these.
    """
    return -(-rows // 4) * 4


def padded_tokens(tokens: int) -> int:
    """Tokens of a product so that padding never changes the order of a row's sums.

    A multiple of 16, the widest vector. torch cuts tokens into blocks of 512; MKL sums up to
    192 tokens of a block in one run, then cuts at 192 and 384 if there are at least 384,
    but in halves if there are between 192 and 384, so these lengths are avoided.
    """
    tokens = -(-tokens // 16) * 16
    rest = tokens % 512
    return tokens + 384 - rest if 192 < rest < 384 else tokens


class Kind(NamedTuple):
    """What distinguishes the attention layers of a model."""

    causal: bool
    window: int  # tokens before (and, if not causal, after) the row's own; -1: all
    swa_pool: bool  # reads the sliding-window sub-pool, which has slot ids of its own


class Read(NamedTuple):
    """What one kind of layer reads for one group."""

    slots: torch.Tensor  # int64 [R*N]; padding repeats a live slot of the same request
    num_tokens: int  # N
    # 0 or -inf, None if every token is allowed. [R, 1, rows, N] for the rows that the products
    # have: query heads of a KV head folded in (unless Q > LONG_ROWS), padded; 1 if all alike.
    mask: torch.Tensor | None


@dataclass
class Group:
    """Requests, or a block of rows of one request, that are attended in one call."""

    requests: torch.Tensor  # int64 [R], rows of req_to_token
    first: torch.Tensor  # int64 [R], position of the first row in the request
    q_lens: torch.Tensor  # int64 [R]
    kv_lens: torch.Tensor  # int64 [R], all tokens of the request
    num_rows: int  # Q
    begin: int  # packed row of the first request, used when `gather` is None
    gather: torch.Tensor | None  # int64 [R*Q]: packed row for each padded one; None: a slice
    live: torch.Tensor | None  # int64 [m]: padded rows that are real; None: all
    reads: dict[tuple[Kind, torch.dtype, int], Read] = field(default_factory=dict)


def split_by_length(lengths: torch.Tensor, budget: int) -> list[torch.Tensor]:
    """Cuts requests into sets of similar length.

    lengths: int64 [R]. Padding every request to the longest of its set wastes tokens;
    a cut is made where it saves the most, as long as it saves more than `budget` tokens.
    Returns index tensors, each ascending, that together cover 0..R-1.
    """
    everyone = torch.arange(lengths.numel())
    if int(lengths.max()) * lengths.numel() - int(lengths.sum()) <= budget:
        return [everyone]
    longest_first, order = lengths.sort(descending=True)
    # Ascending within a set: a single set must be the batch in its own order.
    return [order[part].sort().values for part in _cut(longest_first, everyone, budget)]


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
        token_bytes: int,  # K and V of one token in one layer
    ) -> None:
        self.req_to_token = req_to_token
        self.requests = requests.long()
        self.q_lens = q_lens.long()
        self.kv_lens = kv_lens.long()
        self.groups: list[Group] = []
        lengths = self.q_lens.tolist()
        self.num_rows = sum(lengths)
        if not self.num_rows:
            return
        budget = GROUP_OVERHEAD_BYTES // token_bytes
        starts = self.q_lens.cumsum(0) - self.q_lens
        everyone = None
        if max(lengths) > LONG_ROWS or min(lengths) == 0:
            is_long = self.q_lens > LONG_ROWS
            for r in is_long.nonzero().flatten().tolist():
                self._add_long(r, int(starts[r]))
            everyone = (~is_long & (self.q_lens > 0)).nonzero().flatten()
            if not everyone.numel():
                return
        kv_lens = self.kv_lens if everyone is None else self.kv_lens[everyone]
        parts = split_by_length(kv_lens, budget)
        if everyone is None and len(parts) == 1 and max(lengths) == min(lengths):
            self._add_all(max(lengths))  # decode or uniform verify: nothing to move
            return
        for part in parts:
            self._add_short(part if everyone is None else everyone[part], starts)

    def _add_all(self, num_rows: int) -> None:
        """All requests, with the same number of rows each."""
        self.groups.append(
            Group(
                requests=self.requests,
                first=self.kv_lens - num_rows,
                q_lens=self.q_lens,
                kv_lens=self.kv_lens,
                num_rows=num_rows,
                begin=0,
                gather=None,
                live=None,
            )
        )

    def _add_long(self, r: int, start: int) -> None:
        """Blocks of rows of one request."""
        one = slice(r, r + 1)
        first = self.kv_lens[one] - self.q_lens[one]
        for begin in range(0, int(self.q_lens[r]), ROW_BLOCK):
            rows = min(ROW_BLOCK, int(self.q_lens[r]) - begin)
            self.groups.append(
                Group(
                    requests=self.requests[one],
                    first=first + begin,
                    q_lens=torch.tensor([rows]),
                    kv_lens=self.kv_lens[one],
                    num_rows=rows,
                    begin=start + begin,
                    gather=None,
                    live=None,
                )
            )

    def _add_short(self, members: torch.Tensor, starts: torch.Tensor) -> None:
        """Some requests with few rows each, together."""
        q_lens, kv_lens, first = self.q_lens[members], self.kv_lens[members], starts[members]
        num_rows = int(q_lens.max())
        rows = torch.arange(num_rows)
        live = None
        if int(q_lens.min()) < num_rows:
            live = (rows < q_lens[:, None]).flatten().nonzero().flatten()
        self.groups.append(
            Group(
                requests=self.requests[members],
                first=kv_lens - q_lens,
                q_lens=q_lens,
                kv_lens=kv_lens,
                num_rows=num_rows,
                begin=0,
                # Padded rows repeat the request's last row; `live` drops them afterwards.
                gather=(first[:, None] + torch.minimum(rows, q_lens[:, None] - 1)).flatten(),
                live=live,
            )
        )

    def read(
        self,
        group: Group,
        kind: Kind,
        dtype: torch.dtype,
        heads_per_kv: int,
        full_to_swa: torch.Tensor | None = None,
    ) -> Read:
        """What layers of `kind` read for `group`; built at the first such layer of a forward.

        dtype: of the queries and so of the mask; full_to_swa: int [slots], if kind.swa_pool.
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
        first, q_lens = group.first[:, None], group.q_lens[:, None]  # [R, 1]
        end = first + q_lens if kind.causal else group.kv_lens[:, None]
        if kind.window >= 0:
            # Tokens before every row's window may have been freed and overwritten.
            begin = (first - kind.window).clamp(min=0)
            n = padded_tokens(int((end - begin).max()))
            tokens = begin + torch.arange(n)  # [R or 1, N] positions in the request
        else:
            n = padded_tokens(int(end.max()))
            tokens = torch.arange(n)[None]
        # Padding reads a live token of the same request: a masked score still multiplies
        # its value by zero, which must not be the NaN of a slot that nobody has written.
        slots = self.req_to_token[group.requests[:, None], torch.minimum(tokens, end - 1)].long()
        if kind.swa_pool:
            assert full_to_swa is not None
            slots = full_to_swa[slots].long()
        rows = first  # [R, Q]
        if group.num_rows > 1:
            rows = first + torch.minimum(torch.arange(group.num_rows), q_lens - 1)
        allowed = _allowed(kind, rows[:, :, None], tokens[:, None, :], end[:, :, None])
        mask = None
        if not bool(allowed.all()):
            mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))
            mask = _product_rows(mask, heads_per_kv)[:, None]
        return Read(slots.flatten(), n, mask)


def _allowed(
    kind: Kind, rows: torch.Tensor, tokens: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """Who reads what. rows [R, Q, 1], tokens [R, 1, N], end [R, 1, 1] -> bool [R, Q, N]."""
    allowed = tokens <= rows if kind.causal else (tokens < end).expand(-1, rows.shape[1], -1)
    if kind.window >= 0:
        allowed = allowed & (tokens >= rows - kind.window)
        if not kind.causal:
            allowed = allowed & (tokens <= rows + kind.window)
    return allowed


def _product_rows(mask: torch.Tensor, heads_per_kv: int) -> torch.Tensor:
    """Mask rows [R, Q, N] of a group -> the rows of its products, see `Read.mask`."""
    num_rows = mask.shape[1]
    if num_rows == 1:
        return mask
    if num_rows <= LONG_ROWS:
        mask = mask.repeat_interleave(heads_per_kv, dim=1)
    missing = padded_rows(mask.shape[1]) - mask.shape[1]
    return torch.cat([mask, mask[:, -1:].expand(-1, missing, -1)], dim=1) if missing else mask
