"""DFLASH: a parallel backbone, every token of a block on its own.

For the block behind an anchor x_0 (DFlash, arXiv 2602.06036):
  h_0..h_n  = backbone([x_0, mask, ..., mask])     one non-causal forward
  q_k       = softmax(LMhead(h))                   k = 1..gamma
Drafts that sample from the anchor have gamma rows, and row k - 1 proposes token k; for the others,
z-lab's, a row proposes the token at its own position, so that there is one row more.
The backbone attends to its own KV of all committed tokens, which is computed from target hidden
states (fc, norm, then each layer's key and value projection); so to "commit" is to write that KV.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import pad

from sglang_dspark.drafters.backlog import Backlog, ContextRows, joined
from sglang_dspark.drafters.base import DraftBlock, RoundState
from sglang_dspark.drafters.captured import GreedyBlocks, SampledBlocks
from sglang_dspark.drafters.evidence import evidence
from sglang_dspark.drafters.served import ServedDraft
from sglang_dspark.drafters.vocabulary import DraftVocabulary
from sglang_dspark.models.block import context_kv

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_dspark.config import SpecConfig
    from sglang_dspark.verify.accept import Verdict
    from sglang_dspark.verify.layout import VerifyRows
    from sglang_dspark.verify.sampling import SamplingParams


class DFlashDrafter:
    """See `Drafter`."""

    def __init__(self, config: SpecConfig, served: ServedDraft, generator: torch.Generator) -> None:
        draft = config.draft
        self.gamma = config.gamma
        self.served, self.model = served, served.model
        self.vocabulary = DraftVocabulary(
            self.model.lm_head,
            draft.vocab_size,
            getattr(self.model, "draft_ids", None),
            draft.logit_softcap,
            generator,
        )
        self.wants_evidence = config.wants_evidence
        assert draft.mask_token_id is not None
        self._mask_token_id = draft.mask_token_id
        # Rows of the anchor that propose nothing
        self._skipped = 0 if draft.sample_from_anchor else 1
        self._backlog: Backlog[ContextRows] = Backlog(self._write_rounds)
        # Blocks from graphs, where there are any
        self._greedy: GreedyBlocks | None = None
        self._sampled: SampledBlocks | None = None
        # Whether the target's graphs end with the draft's context KV
        self._commits_in_graph = False
        if served.on_host:
            # In bfloat16 the draft layers would launch a CUDA kernel for norm and RoPE.
            for layer in self.model.layers:
                layer.self_attn.use_table_qk_norm_rope = False

    def start(self) -> None:
        if not self.served.on_host:
            self._greedy = GreedyBlocks(self.served, self._greedy_block)
            if self.served.shares_slots:
                self._commits_in_graph = True
                self.served.target.capture_tail_hooks.append(self._capture_commit)

    def capture(self) -> None:
        sizes = self.served.captured_requests
        if not sizes or self.served.ranks > 1:
            return  # another rank's graph would have to be captured in step with this one's
        hidden = torch.zeros(
            self.gamma,
            self.served.hidden_size,
            dtype=self.served.runner.dtype,
            device=self.served.device,
        )
        with self.served.context(), torch.inference_mode():
            self._sampled = SampledBlocks(
                self._block,
                hidden,
                self.vocabulary.vocab_size,
                sizes,
                self.vocabulary.generator,
                self.served.sampling_kernels,
            )

    def prefill(
        self,
        batch: ScheduleBatch,
        aux_hidden: torch.Tensor,
        kv_plan: KVLocPlan,
        next_tokens: torch.Tensor,
    ) -> None:
        self._backlog.flush()
        slots = kv_plan.write_ids(self.served.runner.kv_index_translator)
        self._write_context_kv(aux_hidden, self.served.prompt_positions(batch), [slots])

    def propose(self, state: RoundState, depth: int) -> DraftBlock:
        self._backlog.flush()
        with self.served.context(), torch.inference_mode():
            hidden = self._backbone(state, depth)
            block = None
            if state.sampling is None and self._greedy is not None:
                block = self._greedy.block(len(state.anchors), depth)
            elif state.sampling is not None and self._sampled is not None:
                block = self._sampled.block(hidden, state.anchors, state.sampling, depth)
            return block or self._block(hidden[:, :depth], state.anchors, state.sampling)

    def commit(
        self,
        state: RoundState,
        verdict: Verdict,
        aux_hidden: torch.Tensor,
        rows: VerifyRows,
        *,
        drafted: bool,
        replayed: bool,
    ) -> None:
        # All rows, rejected ones too: those lie at or behind the next anchor, where the next
        # round's block writes before anything reads. So nothing needs to be masked or counted.
        if replayed and self._commits_in_graph:
            return
        self._backlog.add(
            ContextRows(
                features=aux_hidden,
                positions=rows.positions,
                slots=state.kv_plan.write_ids(
                    self.served.runner.kv_index_translator, cols=rows.columns
                ),
            ),
            wait=not drafted and self.served.on_host,
        )

    def _capture_commit(
        self, graphs: Any, output: Any, forward_batch: ForwardBatch, num_tokens: int
    ) -> None:
        """One of SGLang's `capture_tail_hooks`, of the target."""
        positions, slots = forward_batch.positions, forward_batch.out_cache_loc
        self._write_context_kv(output.hidden_states, positions, [slots])

    def _write_rounds(self, rounds: list[ContextRows]) -> None:
        features = joined([rows.features for rows in rounds])
        positions = joined([rows.positions for rows in rounds])
        self._write_context_kv(features, positions, [rows.slots for rows in rounds])

    def _backbone(self, state: RoundState, depth: int) -> torch.Tensor:
        """Hidden states [R, at least depth, H] of the rows that propose."""
        requests = state.anchors.numel()
        # Graphs are captured for whole blocks only.
        width = (self.gamma if self.served.has_graphs else depth) + self._skipped
        ids = pad(state.anchors.unsqueeze(1), (0, width - 1), value=self._mask_token_id)
        hidden = self.served.forward(
            ids,
            state.positions[:, :width],
            state.req_rows,
            state.seq_lens,
            state.seq_lens_cpu,
            state.kv_plan,
            slice(0, width),
        )
        return hidden.view(requests, width, -1)[:, self._skipped :]

    def _greedy_block(self, hidden: torch.Tensor, ids: torch.Tensor) -> DraftBlock:
        """The block behind a captured backbone. hidden [rows, H], ids [rows] int64."""
        width = self.gamma + self._skipped
        rows = hidden.view(-1, width, hidden.shape[-1])[:, self._skipped :]
        return self._block(rows, ids.view(-1, width)[:, 0], None)

    def _block(
        self, hidden: torch.Tensor, anchors: torch.Tensor, sampling: SamplingParams | None
    ) -> DraftBlock:
        """hidden [R, D, H], anchors [R] -> the block."""
        logits = self.vocabulary.logits(hidden)
        tokens, q = self.vocabulary.choose_block(logits, sampling)
        return DraftBlock(
            tokens=tokens,
            probs=q,
            evidence=evidence(logits) if self.wants_evidence else None,
            confidence_logits=None,
        )

    def _write_context_kv(
        self, aux_hidden: torch.Tensor, positions: torch.Tensor, slots: list[torch.Tensor]
    ) -> None:
        """Turn target features [N, F * H] into each draft layer's KV, at slots of N rows in all,
        which are written part by part."""
        pool = self.served.runner.token_to_kv_pool
        with self.served.context(), torch.inference_mode():
            if not self.served.on_host and hasattr(self.model, "write_target_hidden_kv"):
                self.model.write_target_hidden_kv(
                    target_hidden=aux_hidden,
                    pool=pool,
                    positions=positions,
                    cache_loc=joined(slots),
                )
                return
            # SGLang's writer launches a Triton kernel in bfloat16; the same steps one by one.
            sizes = [len(part) for part in slots]
            for layer, k, v in context_kv(self.model, aux_hidden, positions):
                for part, keys, values in zip(slots, k.split(sizes), v.split(sizes), strict=True):
                    pool.set_kv_buffer(layer, KVWriteLoc(part, physical=True), keys, values)
