"""DSPARK: DFLASH's backbone with a sequential head and, mostly, a confidence head.

From the DSpark paper (arXiv 2607.05147), over the backbone's h_1..h_gamma:
  logits_k = LMhead(h_k) + bias(x_{k-1}, h_k, state)      sequential, k = 1..gamma
  c_k      = sigmoid(w . [h_k ; W1[x_{k-1}]] + b)         P(x_k survives | all before do)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from sglang_dspark.drafters.base import DraftBlock
from sglang_dspark.drafters.checkpoints import DraftCheckpoint
from sglang_dspark.drafters.dflash import DFlashDrafter
from sglang_dspark.drafters.evidence import evidence

if TYPE_CHECKING:
    from sglang_dspark.config import SpecConfig
    from sglang_dspark.drafters.served import ServedDraft
    from sglang_dspark.verify.sampling import SamplingParams


class DSparkDrafter(DFlashDrafter):
    """See `Drafter`."""

    def __init__(self, config: SpecConfig, served: ServedDraft, generator: torch.Generator) -> None:
        super().__init__(config, served, generator)
        self.confidence_head = load_confidence_head(config.draft, served.device)

    def _block(
        self, hidden: torch.Tensor, anchors: torch.Tensor, sampling: SamplingParams | None
    ) -> DraftBlock:
        """Draw x_1..x_D one after the other. hidden [R, D, H]."""
        logits = self.vocabulary.logits(hidden)
        head = self.model.markov_head
        head_state = head.init_state(hidden[:, 0])
        previous = anchors
        tokens, probs, known = [], [], []
        for k in range(hidden.shape[1]):
            bias, head_state = head.step_bias(
                previous, hidden_states=hidden[:, k], state=head_state
            )
            row = logits[:, k] + bias
            if self.wants_evidence:
                known.append(evidence(row))
            previous, q = self.vocabulary.choose(row, sampling)
            tokens.append(previous)
            probs.append(q)
        block = torch.stack(tokens, dim=1)
        drawn_from = [q for q in probs if q is not None]
        return DraftBlock(
            tokens=block,
            probs=torch.stack(drawn_from, dim=1) if drawn_from else None,
            evidence=torch.stack(known, dim=1) if known else None,
            confidence_logits=self._confidence(hidden, anchors, block),
        )

    def _confidence(
        self, hidden: torch.Tensor, anchors: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """Confidence logits [R, D]; logit k reads h_k and x_{k-1}, never x_k."""
        if self.confidence_head is None or not self.wants_evidence:
            return None
        features = hidden.float()
        if self.confidence_head.in_features > hidden.shape[-1]:
            previous = torch.cat([anchors.unsqueeze(1), tokens[:, :-1]], dim=1)
            embedded = self.model.markov_head.get_prev_embeddings(previous)
            features = torch.cat([features, embedded.float()], dim=-1)
        logits: torch.Tensor = self.confidence_head(features).squeeze(-1)
        return logits


def load_confidence_head(
    checkpoint: DraftCheckpoint, device: torch.device
) -> torch.nn.Linear | None:
    """The confidence head in float32, from the checkpoint's own file.

    SGLang's draft model builds it only outside static mode; ours is always there if the
    checkpoint has one, so that its logits can be recorded and calibrated in every mode.
    """
    if not checkpoint.has_confidence_head:
        return None
    head = torch.nn.Linear(checkpoint.confidence_features, 1, device=device)
    weights = _read_weights(checkpoint, "confidence_head.proj.")
    with torch.no_grad():
        head.weight.copy_(weights["weight"])
        head.bias.copy_(weights["bias"])
    return head.requires_grad_(False)


def _read_weights(checkpoint: DraftCheckpoint, prefix: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(checkpoint.path).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as weights:
            for name in weights.keys():
                own = checkpoint.rename(name.removeprefix("model."))
                if own.startswith(prefix):
                    found[own.removeprefix(prefix)] = weights.get_tensor(name)
    return found
