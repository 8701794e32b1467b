"""EAGLE3: a chain of gamma forwards, one token each, over fused features of the target.

See `models.chain` for the model. The slot of position t holds the pair (g_t, x_{t+1}); so the
anchor x_L, at position L, is in slot L - 1, beside the features of the last committed position:
  step 1    : (g_{L-1}, x_L) in slot L - 1       proposes x_{L+1}
  step k > 1: (y, the token proposed last) in slot L - 2 + k
To "commit" is to write the slots of positions whose features are known now, with the tokens that
follow them, and to keep the last one's features for the next round.

A parallel draft (P-EAGLE) takes all steps in one forward: behind the first, it has a mask token and
a learnt vector in place of the token and the state that a chain would have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from sglang_dspark.drafters.backlog import Backlog, ContextRows, joined
from sglang_dspark.drafters.base import DraftBlock, RoundState
from sglang_dspark.drafters.evidence import evidence
from sglang_dspark.drafters.served import ServedDraft
from sglang_dspark.drafters.vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

    from sglang_dspark.config import SpecConfig
    from sglang_dspark.verify.accept import Verdict
    from sglang_dspark.verify.layout import VerifyRows

    _Run = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class PairRows(ContextRows):
    """tokens: [M] int64, the one behind each row. req_rows: [R] int64, of SGLang's request table;
    last: [R] int64, the row of each that was committed last."""

    tokens: Tensor
    req_rows: Tensor
    last: Tensor


class Eagle3Drafter:
    """See `Drafter`."""

    def __init__(self, config: SpecConfig, served: ServedDraft, generator: torch.Generator) -> None:
        self.draft, self.gamma = config.draft, config.gamma
        self.served, self.model = served, served.model
        self.vocabulary = DraftVocabulary(
            self.model.lm_head,
            self.draft.vocab_size,
            self.model.draft_ids,
            self.draft.logit_softcap,
            generator,
        )
        self.wants_evidence = config.wants_evidence
        self.model.graph_width = self.gamma if self.draft.parallel else 1
        self._backlog: Backlog[PairRows] = Backlog(self._write_rounds)
        # [rows of SGLang's request table, H]: g of each request's last committed position
        self._last: Tensor

    def start(self) -> None:
        requests = self.served.runner.req_to_token_pool.req_to_token.shape[0]
        self.model.allocate(requests * self.model.graph_width)
        self._last = self.model.hidden_in.new_zeros(requests, self.draft.hidden_size)

    def capture(self) -> None:
        """A chain's steps are graphs already, its choices between them are few."""

    def prefill(
        self,
        batch: ScheduleBatch,
        aux_hidden: Tensor,
        kv_plan: KVLocPlan,
        next_tokens: Tensor,
    ) -> None:
        self._backlog.flush()
        ends = [end - 1 for end in itertools.accumulate(batch.extend_lens)]
        last_rows, prompt = (
            async_h2d(numbers, dtype=torch.int64, device=self.served.device)
            for numbers in (ends, _prompt_continues(batch))
        )
        # The token behind each one; behind the last of a chunk, what the prompt goes on with.
        following = batch.input_ids.roll(-1)
        following[last_rows] = torch.where(prompt >= 0, prompt, next_tokens)
        with self.served.context(), torch.inference_mode():
            hidden = self.model.project(aux_hidden)
            if self.draft.num_layers == 1:
                slots = kv_plan.write_ids(self.served.runner.kv_index_translator)
                self._write_pairs(following, hidden, self.served.prompt_positions(batch), [slots])
            else:
                forward = ForwardBatch.init_new(
                    batch,
                    self.served.runner,
                    capture_hidden_mode=CaptureHiddenMode.NULL,
                    return_hidden_states_before_norm=False,
                    kv_loc_plan=kv_plan,
                )
                forward.input_ids = following
                with self.model.reading(hidden):
                    self.served.runner.forward(forward)
        self._last[batch.req_pool_indices] = hidden[last_rows]

    def propose(self, state: RoundState, depth: int) -> DraftBlock:
        self._backlog.flush()
        first = state.seq_lens - 1
        first_cpu = None if state.seq_lens_cpu is None else state.seq_lens_cpu - 1
        # Graphs of a parallel draft are captured for whole blocks only.
        whole = self.draft.parallel and self.served.has_graphs
        plan = self.served.runner.kv_index_translator.plan_uniform_extend(
            req_pool_indices=state.req_rows,
            seq_lens=first,
            seq_lens_cpu=first_cpu,
            width=self.gamma if whole else depth,
        )

        def run(tokens: Tensor, hidden: Tensor, step: int) -> Tensor:
            """Pairs [R, n] and [R * n, H] from a step on -> y [R * n, H]"""
            width = tokens.shape[1]
            self.model.hidden_in[: len(hidden)].copy_(hidden)
            return self.served.forward(
                tokens,
                (first + step).unsqueeze(1) + torch.arange(width, device=first.device),
                state.req_rows,
                first + step,
                None if first_cpu is None else first_cpu + step,
                plan,
                slice(step, step + width),
            )

        with self.served.context(), torch.inference_mode():
            hidden = self._last[state.req_rows]
            if self.draft.parallel:
                masks = self.gamma - 1 if whole else depth - 1
                tokens = torch.nn.functional.pad(
                    state.anchors.unsqueeze(1), (0, masks), value=self.draft.mask_token_id or 0
                )
                behind = self.model.mask_state().expand(len(hidden), masks, -1)
                states = torch.cat([hidden.unsqueeze(1), behind], dim=1).flatten(0, 1)
                rows = run(tokens, states, 0).view(len(hidden), -1, hidden.shape[-1])
                return self._parallel_block(rows[:, :depth], state)
            return self._chain_block(run, hidden, state, depth)

    def _chain_block(self, run: _Run, hidden: Tensor, state: RoundState, depth: int) -> DraftBlock:
        token = state.anchors
        tokens, probs, known = [], [], []
        for k in range(depth):
            hidden = run(token.unsqueeze(1), hidden, k)
            logits = self.vocabulary.logits(self.model.to_head(hidden))
            token, q = self.vocabulary.choose(logits, state.sampling)
            tokens.append(token)
            if q is not None:
                probs.append(q)
            if self.wants_evidence:
                known.append(evidence(logits))
        return DraftBlock(
            tokens=torch.stack(tokens, dim=1),
            probs=torch.stack(probs, dim=1) if probs else None,
            evidence=torch.stack(known, dim=1) if known else None,
            confidence_logits=None,
        )

    def _parallel_block(self, hidden: Tensor, state: RoundState) -> DraftBlock:
        """hidden y [R, D, H]"""
        logits = self.vocabulary.logits(self.model.to_head(hidden))
        tokens, q = self.vocabulary.choose_block(logits, state.sampling)
        return DraftBlock(
            tokens=tokens,
            probs=q,
            evidence=evidence(logits) if self.wants_evidence else None,
            confidence_logits=None,
        )

    def commit(
        self,
        state: RoundState,
        verdict: Verdict,
        aux_hidden: Tensor,
        rows: VerifyRows,
        *,
        drafted: bool,
        replayed: bool,
    ) -> None:
        # All rows, rejected ones and padding too. What they write lies behind the next anchor's
        # slot, where the next round's chain writes before anything reads, or in the reserved slot.
        following = verdict.tokens
        accepted = (verdict.commit_lens - 1).to(torch.int64).unsqueeze(1)
        last = rows.index.gather(1, accepted).squeeze(1)
        if self.draft.num_layers > 1:
            with self.served.context(), torch.inference_mode():
                hidden = self.model.project(aux_hidden)
                with self.model.reading(hidden[rows.index.flatten()]):
                    self.served.forward(
                        following,
                        state.positions,
                        state.req_rows,
                        state.seq_lens,
                        state.seq_lens_cpu,
                        state.kv_plan,
                        slice(0, following.shape[1]),
                    )
            self._last[state.req_rows] = hidden[last]
            return
        columns, tokens = rows.columns, following.flatten()
        self._backlog.add(
            PairRows(
                features=aux_hidden,
                positions=rows.positions,
                slots=state.kv_plan.write_ids(self.served.runner.kv_index_translator, cols=columns),
                tokens=tokens if columns is None else tokens[columns.clamp(min=0)],
                req_rows=state.req_rows,
                last=last,
            ),
            wait=not drafted and self.served.on_host,
        )

    def _write_rounds(self, rounds: list[PairRows]) -> None:
        with self.served.context(), torch.inference_mode():
            hidden = self.model.project(joined([rows.features for rows in rounds]))
            self._write_pairs(
                joined([rows.tokens for rows in rounds]),
                hidden,
                joined([rows.positions for rows in rounds]),
                [rows.slots for rows in rounds],
            )
            for rows, part in zip(rounds, hidden.split([len(r) for r in rounds]), strict=True):
                self._last[rows.req_rows] = part[rows.last]

    def _write_pairs(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, slots: list[Tensor]
    ) -> None:
        """Keys and values of pairs [N] and [N, H]; a single layer needs no attention for them."""
        layer, k, v = self.model.context_kv(tokens, hidden, positions)
        pool, sizes = self.served.runner.token_to_kv_pool, [len(part) for part in slots]
        for part, keys, values in zip(slots, k.split(sizes), v.split(sizes), strict=True):
            pool.set_kv_buffer(layer, KVWriteLoc(part, physical=True), keys, values)


def _prompt_continues(batch: ScheduleBatch) -> list[int]:
    """The token behind each request's chunk, -1 where the chunk is the last."""
    ends = [start + n for start, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    whole = [request.full_untruncated_fill_ids for request in batch.reqs]
    return [ids[end] if end < len(ids) else -1 for ids, end in zip(whole, ends, strict=True)]
