"""From a draft's hidden states to tokens of the target, and to what these are drawn from.

V is the target's vocabulary, V_d <= V the draft's: the tokens that it can propose, of which `ids`
gives the target's.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.models.dspark import gather_and_crop_vocab, project_through_lm_head

from sglang_dspark.verify.sampling import SamplingParams, distribution, draw


class DraftVocabulary:
    """head: an LM head of SGLang, the target's or the draft's own.

    ids: [V_d] int64, None: V_d is V. softcap: logits are softcap * tanh(logits / softcap), as in
    Gemma; None: as they are.
    """

    def __init__(
        self,
        head: Any,
        vocab_size: int,
        ids: torch.Tensor | None,
        softcap: float | None,
        generator: torch.Generator,
    ) -> None:
        self.head, self.vocab_size, self.ids, self.softcap = head, vocab_size, ids, softcap
        self.generator = generator

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., H] -> [..., V_d]"""
        shape = hidden.shape[:-1]
        local = project_through_lm_head(hidden.flatten(0, -2), self.head)
        logits: torch.Tensor = gather_and_crop_vocab(local, self.head).view(*shape, -1)
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def choose(
        self, logits: torch.Tensor, sampling: SamplingParams | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One token a row. logits [N, V_d]; sampling: of the N rows, None: all are greedy.

        Returns the target's ids [N] int64 and what each was drawn from, [N, V] float32 (None if
        all are greedy).
        """
        if sampling is None:
            return self._target_ids(logits.argmax(dim=-1)), None
        q = distribution(logits, sampling)
        tokens = draw(q, self.generator)
        if self.ids is None:
            return tokens, q
        whole = q.new_zeros(len(q), self.vocab_size)
        return self._target_ids(tokens), whole.index_copy_(1, self.ids, q)

    def choose_block(
        self, logits: torch.Tensor, sampling: SamplingParams | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens that do not depend on each other. logits [R, D, V_d]; sampling: of R requests.

        Returns [R, D] int64 and [R, D, V] float32, as `choose`.
        """
        requests, depth = logits.shape[:2]
        if sampling is not None:
            rows = torch.arange(requests, device=logits.device).repeat_interleave(depth)
            sampling = sampling.of_rows(rows)
        tokens, q = self.choose(logits.flatten(0, 1), sampling)
        return tokens.view(requests, depth), None if q is None else q.view(requests, depth, -1)

    def _target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.ids is None else self.ids[tokens]
