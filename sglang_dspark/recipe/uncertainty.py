"""The draft's last layer, taught to show the confidence head how sure the draft is.

The head is linear in h_k. How likely a token is to be accepted is not: it depends on how far the
logits of h_k are apart, which no linear function of h_k tells. But the last layer can work it out
and write it where the logits do not care: a direction of h that is the same for all rows of the
vocabulary moves all logits alike. So the last layer, the final norm and the head are trained
together,

    loss = BCE(c_k, y_k) + KL(q_before ‖ q_now)

where y_k is what `confidence.accept_labels` says and q_before the draft as it was: what it proposes
stays. On text that the draft was not trained on, since what it knows by heart it is sure of.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor

from sglang_dspark.recipe.batches import Batch, make_batch
from sglang_dspark.recipe.confidence import accept_labels
from sglang_dspark.recipe.draft import DraftModel
from sglang_dspark.recipe.features import Example
from sglang_dspark.recipe.loss import Vocabulary, choose_vocabulary
from sglang_dspark.recipe.objectives import BlockRows, Shared, block_rows, frequent_ids
from sglang_dspark.recipe.train import TrainConfig, examples_at

LEARNING_RATE = 2e-4
FREQUENT_IDS, LIKELY_PER_ROW, NUM_SAMPLED = 3000, 8, 1024
# One sequence in so many is kept for the head's scale and bias.
CHECKED_EVERY = 8


@dataclass(frozen=True)
class Taught:
    """Cross-entropy of the confidences on checked sequences, nats a token, before and after; KL of
    the draft's distributions there, nats a row: how far what it proposes has moved."""

    before: float
    after: float
    divergence: float


def teach_confidence(
    draft: DraftModel, shared: Shared, examples: list[Example], steps: int, seed: int
) -> Taught:
    """In place. examples: of text that the draft was not trained on, at least CHECKED_EVERY."""
    if draft.confidence_head is None:
        raise ValueError("the draft has no confidence head")
    if len(examples) < CHECKED_EVERY:
        raise ValueError(f"{len(examples)} sequences; needed are {CHECKED_EVERY}")
    checked = examples[CHECKED_EVERY - 1 :: CHECKED_EVERY]
    taught = [e for i, e in enumerate(examples) if i % CHECKED_EVERY != CHECKED_EVERY - 1]
    teacher = _Teacher(draft, shared, frequent_ids(examples, FREQUENT_IDS, len(shared.head)))
    before, _ = teacher.check(checked, seed)
    teacher.train(taught, steps, seed)
    teacher.rescale(checked, seed)
    after, divergence = teacher.check(checked, seed)
    return Taught(before, after, divergence)


class _Teacher:
    """frequent: ids that are always among the candidates."""

    def __init__(self, draft: DraftModel, shared: Shared, frequent: Tensor) -> None:
        self.draft, self.shared = draft, shared
        self.frequent = frequent.to(shared.head.device)
        self.before = copy.deepcopy(draft).requires_grad_(False)

    def train(self, examples: list[Example], steps: int, seed: int) -> None:
        draft = self.draft
        assert draft.confidence_head is not None
        parts = (draft.decoder_layers[-1], draft.norm, draft.confidence_head)
        trained = list(chain.from_iterable(part.parameters() for part in parts))
        config = TrainConfig(steps, learning_rate=LEARNING_RATE, decay_fraction=0.5, seed=seed)
        optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        for step in track(range(steps), "confidence", console=Console(stderr=True)):
            for group in optimizer.param_groups:
                group["lr"] = config.rate_at(step)
            bce, divergence = self.losses(*self.batch_at(examples, config, step))
            optimizer.zero_grad(set_to_none=True)
            (bce + divergence).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
            optimizer.step()

    def batch_at(
        self, examples: list[Example], config: TrainConfig, step: int
    ) -> tuple[Batch, Vocabulary]:
        chosen, anchors = examples_at(examples, config, step)
        shape = self.draft.config
        batch = make_batch(chosen, anchors, shape.block_size, shape.mask_token_id)
        batch = batch.to(self.shared.head.device)
        likely = batch.topk_ids[batch.valid][:, :LIKELY_PER_ROW]
        wanted = torch.cat([batch.labels[batch.valid], likely.flatten()])
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        return batch, choose_vocabulary(
            shape.vocab_size, self.frequent, wanted, NUM_SAMPLED, generator
        )

    def losses(self, batch: Batch, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
        """BCE of the rows that count and KL of all, their means."""
        device = self.shared.head.device.type
        with torch.autocast(device, dtype=torch.bfloat16):
            with torch.no_grad():
                old = block_rows(self.before, self.shared, batch, vocabulary)
            new = block_rows(self.draft, self.shared, batch, vocabulary)
        log_before, log_now = (_log_probs(rows, vocabulary) for rows in (old, new))
        divergence = (log_before.exp() * (log_before - log_now)).sum(dim=-1)
        labels, counts = _labels(log_before, batch, vocabulary)
        assert new.confidence is not None
        bce = F.binary_cross_entropy_with_logits(new.confidence.float()[counts], labels[counts])
        return bce, divergence[batch.valid.flatten()].mean()

    @torch.no_grad()
    def check(self, examples: list[Example], seed: int) -> tuple[float, float]:
        """BCE and KL over one pass of the examples."""
        pairs = [self.losses(*each) for each in self._pass(examples, seed)]
        bce, divergence = torch.tensor(pairs).mean(dim=0).tolist()
        return bce, divergence

    def rescale(self, examples: list[Example], seed: int) -> None:
        """A scale and a bias for the head's logits: it was taught on the other sequences, and is
        surer of these."""
        logits, labels = [], []
        with torch.no_grad():
            for batch, vocabulary in self._pass(examples, seed):
                rows = block_rows(self.draft, self.shared, batch, vocabulary)
                old = block_rows(self.before, self.shared, batch, vocabulary)
                label, counts = _labels(_log_probs(old, vocabulary), batch, vocabulary)
                assert rows.confidence is not None
                logits.append(rows.confidence.float()[counts])
                labels.append(label[counts])
        x, y = torch.cat(logits), torch.cat(labels)
        line = torch.tensor([1.0, 0.0], device=x.device, requires_grad=True)
        solver = torch.optim.LBFGS([line], max_iter=100, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            solver.zero_grad()
            loss = F.binary_cross_entropy_with_logits(line[0] * x + line[1], y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        solver.step(closure)  # type: ignore[no-untyped-call]
        assert self.draft.confidence_head is not None
        head = self.draft.confidence_head.proj
        with torch.no_grad():
            head.weight.mul_(line[0])
            head.bias.mul_(line[0]).add_(line[1])

    def _pass(self, examples: list[Example], seed: int) -> list[tuple[Batch, Vocabulary]]:
        config = TrainConfig(1, sequences_per_step=1, anchors_per_sequence=64, seed=seed + 1)
        return [self.batch_at(examples, config, step) for step in range(len(examples))]


def _labels(log_q: Tensor, batch: Batch, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """`accept_labels` over a candidate vocabulary. log_q: [R, c + s]."""
    columns = vocabulary.column[batch.topk_ids.flatten(0, 1)]  # c for ids that are no candidate
    q = F.pad(log_q[:, : vocabulary.num_candidates].exp(), (0, 1))
    own = vocabulary.ids[log_q.argmax(dim=-1)]
    return accept_labels(own, q.gather(1, columns), batch)


def _log_probs(rows: BlockRows, vocabulary: Vocabulary) -> Tensor:
    """log q over vocabulary.ids, [R, c + s]; the sampled ids stand for all that are not there."""
    shift = torch.zeros(len(vocabulary.ids), device=rows.logits.device)
    shift[vocabulary.num_candidates :] = vocabulary.sample_shift
    return (rows.logits.float() + shift).log_softmax(dim=-1)
