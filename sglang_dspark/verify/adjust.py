"""What a request's sampling parameters do to logits, for a whole verify window at once.

SGLang's sampler adjusts one row per request: penalties, grammar, logit bias, custom processors, in
this order. A window has W rows per request, and penalties of row j must count the drafted tokens
before it, so that speculation changes nothing (built-in workers apply the state at the start of
the round, or none). Token counts are kept here, on the device, in tables indexed by SGLang's
request row, and only once a request asks for a penalty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.utils.common import async_h2d

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dspark.verify.accept import Verdict


class LogitAdjuster:
    """Applies SGLang's logit adjustments to packed window rows."""

    def __init__(self, width: int, runner: ModelRunner) -> None:
        self._width = width
        self._runner = runner
        self._penalties: PenaltyTables | None = None

    def start_requests(self, batch: ScheduleBatch) -> None:
        """Begin (or, after a retraction, begin again) to count the tokens of a prefill batch."""
        if self._penalties is None:
            if not _any_penalty(batch):
                return
            self._penalties = PenaltyTables.empty(
                rows=self._runner.req_to_token_pool.req_to_token.shape[0],
                vocab_size=self._runner.model_config.vocab_size,
                device=torch.device(self._runner.device),
            )
        self._penalties.start(batch.reqs)

    def adjusts(self, batch: ScheduleBatch) -> bool:
        """Whether `apply` (but for a grammar) changes any logit of the batch."""
        info = batch.sampling_info
        penalties = self._penalties is not None and _any_penalty(batch)
        return bool(penalties or info.logit_bias is not None or info.has_custom_logit_processor)

    def apply(
        self,
        logits: torch.Tensor,
        batch: ScheduleBatch,
        window_tokens: torch.Tensor,
        grammar_mask: Any | None,
    ) -> None:
        """Adjust logits [R * W, V] in place; window_tokens: [R, W] int64, anchor first."""
        info = batch.sampling_info
        if self._penalties is not None and _any_penalty(batch):
            self._penalties.apply(logits, batch.req_pool_indices, window_tokens)
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        if info.logit_bias is not None:
            rows = logits.view(-1, self._width, logits.shape[-1])
            rows.add_(info.logit_bias.unsqueeze(1))
        if info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, info, num_tokens_in_batch=self._width)

    def commit(self, batch: ScheduleBatch, anchors: torch.Tensor, verdict: Verdict) -> None:
        """Count what a round committed: the anchor and the accepted drafts.

        The bonus is the next anchor and is counted with the next round.
        """
        if self._penalties is not None and _any_penalty(batch):
            tokens = torch.cat([anchors.unsqueeze(1), verdict.tokens[:, :-1]], dim=1)
            self._penalties.count(batch.req_pool_indices, tokens, verdict.commit_lens)


@dataclass
class PenaltyTables:
    """Penalty parameters and output token counts; a row per row of SGLang's req_to_token table.

    Formulas (those of SGLang's penalizers), with n_v the count of token v in the output so far:
      logit_v -= frequency * n_v + presence * [n_v > 0]
      logit_v  = logit_v / repetition if logit_v > 0 else logit_v * repetition   where n_v > 0
      logit_stop = -inf while the output is shorter than min_new_tokens
    """

    # [rows] float32
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    # [rows] int32
    min_new_tokens: torch.Tensor
    # [rows] int32, output tokens counted so far; the current anchor is not
    output_lens: torch.Tensor
    # [rows, V] int32
    counts: torch.Tensor
    # [rows, V] bool, tokens that may not come before min_new_tokens
    stops: torch.Tensor

    @classmethod
    def empty(cls, rows: int, vocab_size: int, device: torch.device) -> PenaltyTables:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            frequency=zeros(rows, dtype=torch.float32),
            presence=zeros(rows, dtype=torch.float32),
            repetition=torch.ones(rows, device=device),
            min_new_tokens=zeros(rows, dtype=torch.int32),
            output_lens=zeros(rows, dtype=torch.int32),
            counts=zeros(rows, vocab_size, dtype=torch.int32),
            stops=zeros(rows, vocab_size, dtype=torch.bool),
        )

    def start(self, reqs: list[Req]) -> None:
        """Set the rows of requests that are about to decode."""
        device = self.counts.device
        req_rows = [req.kv.req_pool_idx for req in reqs]
        # Pinned copies and fills: .to(device) and table[rows] = 0 would wait for the whole
        # target forward.
        rows = async_h2d(req_rows, dtype=torch.int64, device=device)
        params = [req.sampling_params for req in reqs]
        for table, values in (
            (self.frequency, [p.frequency_penalty for p in params]),
            (self.presence, [p.presence_penalty for p in params]),
            (self.repetition, [p.repetition_penalty for p in params]),
            (self.min_new_tokens, [p.min_new_tokens for p in params]),
            (self.output_lens, [len(req.output_ids) for req in reqs]),
        ):
            table[rows] = async_h2d(values, dtype=table.dtype, device=device)
        self.counts.index_fill_(0, rows, 0)
        self.stops.index_fill_(0, rows, False)
        for row, req in zip(req_rows, reqs, strict=True):
            if not _has_penalty(req):
                continue
            if req.output_ids:  # retracted after it had generated these
                generated = async_h2d(list(req.output_ids), dtype=torch.int64, device=device)
                ones = torch.ones_like(generated, dtype=self.counts.dtype)
                self.counts[row].scatter_add_(0, generated, ones)
            if req.sampling_params.min_new_tokens > 0:
                stops = async_h2d(sorted(_stop_tokens(req)), dtype=torch.int64, device=device)
                self.stops[row].index_fill_(0, stops, True)

    def apply(
        self, logits: torch.Tensor, req_rows: torch.Tensor, window_tokens: torch.Tensor
    ) -> None:
        """Penalise logits [R * W, V] in place; row j counts window tokens 0..j."""
        width = window_tokens.shape[1]
        windows = logits.view(-1, width, logits.shape[-1])
        counts = self.counts[req_rows]
        one = torch.ones_like(window_tokens[:, :1], dtype=counts.dtype)
        frequency = self.frequency[req_rows].unsqueeze(1)
        presence = self.presence[req_rows].unsqueeze(1)
        repetition = self.repetition[req_rows].unsqueeze(1)
        missing = (self.min_new_tokens - self.output_lens)[req_rows].unsqueeze(1)
        stops = self.stops[req_rows]
        for j in range(width):
            counts.scatter_add_(1, window_tokens[:, j : j + 1], one)
            seen = counts > 0
            row = windows[:, j]
            row.sub_(frequency * counts + presence * seen)
            scaled = torch.where(row > 0, row / repetition, row * repetition)
            row.copy_(torch.where(seen, scaled, row))
            row.masked_fill_(stops & (missing > j + 1), float("-inf"))

    def count(self, req_rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Add the first lengths[r] of tokens [R, W] to the counts."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        committed = (columns < lengths.unsqueeze(1)).to(self.counts.dtype)
        index = (req_rows.unsqueeze(1).expand_as(tokens), tokens)
        self.counts.index_put_(index, committed, accumulate=True)
        self.output_lens.index_add_(0, req_rows, lengths.to(self.output_lens.dtype))


def _any_penalty(batch: ScheduleBatch) -> bool:
    return any(_has_penalty(req) for req in batch.reqs)


def _has_penalty(req: Req) -> bool:
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def _stop_tokens(req: Req) -> set[int]:
    tokens = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        tokens |= set(req.tokenizer.additional_stop_token_ids or ())
        tokens.add(req.tokenizer.eos_token_id)
    return {token for token in tokens if token is not None}
