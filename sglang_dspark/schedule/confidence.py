"""Confidence from what the draft's distribution says of itself, fitted while serving.

    confidence_logit_k = bias_k + Σ_f w_f · evidence_kf (+ h · head_logit_k)

is the log-odds of P(draft token k survives | all before it survived). It starts as the head's own
logit, or without a head as the log-odds of the draft's greatest probability, and follows the verify
outcomes from there. Slopes w, h are common to all positions; for sampled requests they and all
biases are shifted. What was measured is in docs/confidence.md.

The fit is a logistic regression with a Gaussian posterior (mean w, precision A), updated once a
round by one Newton step (the extended Kalman filter of the logistic model, with forgetting):

    p = sigmoid(η),  η = wᵀx
    A <- A + φ (A₀ - A) + Σ p (1 - p) x xᵀ
    w <- w + s A⁻¹ [ Σ x (label - p) + φ A₀ (w₀ - w) ],  φ = 1 - exp(-n / MEMORY)

n is the number of observations of the round, and (w₀, A₀) the prior, to which everything returns as
it is forgotten. s <= 1 keeps the round's own η from moving by more than MAX_STEP.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cost_tables.model import Floats
from sglang_dspark.drafters.evidence import BOUND, NAMES, F

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Float32s = npt.NDArray[np.float32]

LOG_ODDS = NAMES.index("log_odds")
# The last so many observations count; one is a draft token whose outcome is known.
MEMORY = 4096
# Prior standard deviations: of slopes, of what sampling adds to each and to all biases, of the mean
# bias, and of each position's bias around it; the last are alike in neighbours.
SLOPE_SPREAD, SAMPLED_SPREAD, BIAS_SPREAD, POSITION_SPREAD = 0.5, 0.5, 1.0, 0.7
NEIGHBOURS = 0.8
MAX_STEP = 1.0
# No text justifies more.
MAX_WEIGHT = 8.0
# A change of a parameter that is worth an upload.
NEWS = 0.01


class ConfidenceFit:
    """gamma: draft tokens a block. head: whether the draft has a confidence head. frozen: the prior
    stays, as under a calibration of its own. features: columns of the evidence.

    Weights are in the order of `_columns`, then a bias for every position.
    """

    def __init__(self, gamma: int, head: bool, *, frozen: bool = False, features: int = F) -> None:
        self.gamma, self.head, self.frozen = gamma, head, frozen
        self._slopes = slopes = features + head
        self._prior = np.zeros(2 * slopes + 1 + gamma)
        self._prior[features if head else LOG_ODDS] = 1.0
        spread = np.repeat([SLOPE_SPREAD, SAMPLED_SPREAD], [slopes, slopes + 1])
        covariance = np.diag(np.concatenate([spread**2, np.zeros(gamma)]))
        distance = np.abs(np.arange(gamma)[:, None] - np.arange(gamma))
        covariance[-gamma:, -gamma:] = BIAS_SPREAD**2 + POSITION_SPREAD**2 * NEIGHBOURS**distance
        self._prior_precision = np.linalg.inv(covariance)
        self._weights, self._precision = self._prior.copy(), self._prior_precision.copy()
        self._handed_out = self.parameters()

    def learn(
        self,
        evidence: Floats,
        head_logits: Floats | None,
        windows: Ints,
        accepted: Ints,
        sampled: Bools,
    ) -> None:
        """From a round that is over. evidence [R, D, F]; head_logits [R, D], None without a head;
        windows, accepted, sampled [R].

        Token k was observed if it was verified (k < window - 1) and reached (accepted >= k).
        """
        if self.frozen:
            return
        inputs = evidence.T  # [S, D, R], so that the sums over requests below are over neighbours
        if self.head:
            assert head_logits is not None
            inputs = np.concatenate([inputs, head_logits.T[None]])
        positions = np.arange(inputs.shape[1])[:, None]
        observed = positions <= np.minimum(windows - 2, accepted)
        observed &= np.isfinite(inputs).all(axis=0)
        if observed.any():
            columns = _columns(np.where(observed, inputs, 0.0).clip(-BOUND, BOUND), sampled)
            self._update(columns, observed, positions < accepted)

    def _update(self, columns: Floats, observed: Bools, labels: Bools) -> None:
        """columns [C, D, R]; observed, labels [D, R]. See the module's formulas."""
        count, depth, _ = columns.shape
        biases = np.arange(count, count + depth)
        flat = columns.reshape(count, -1)
        eta = (self._weights[:count] @ flat).reshape(labels.shape)
        eta += self._weights[biases, None]
        chances = 0.5 + 0.5 * np.tanh(0.5 * eta)
        curvature = observed * chances * (1.0 - chances)
        residual = observed * (labels - chances)

        weighted = columns * curvature
        information = np.zeros_like(self._precision)
        information[:count, :count] = weighted.reshape(count, -1) @ flat.T
        information[:count, biases] = weighted.sum(axis=2)
        information[biases, :count] = information[:count, biases].T
        information[biases, biases] = curvature.sum(axis=1)
        forgotten = -np.expm1(-observed.sum() / MEMORY)
        gradient = forgotten * (self._prior_precision @ (self._prior - self._weights))
        gradient[:count] += flat @ residual.ravel()
        gradient[biases] += residual.sum(axis=1)

        self._precision += forgotten * (self._prior_precision - self._precision) + information
        step = np.linalg.solve(self._precision, gradient)
        moved = observed * ((step[:count] @ flat).reshape(labels.shape) + step[biases, None])
        self._weights += step * min(1.0, MAX_STEP / max(np.abs(moved).max(), 1e-9))
        np.clip(self._weights, -MAX_WEIGHT, MAX_WEIGHT, out=self._weights)

    def parameters(self) -> Float32s:
        """float32 [2, gamma, P], for greedy and for sampled requests: weights of the evidence, that
        of the head if there is one, bias; P = F + 1 or F + 2."""
        slopes, shifts = self._weights[: self._slopes], self._weights[self._slopes :]
        result = np.empty((2, self.gamma, self._slopes + 1), dtype=np.float32)
        result[:, :, :-1] = slopes
        result[:, :, -1] = self._weights[-self.gamma :]
        result[1] += shifts[: self._slopes + 1]
        return result

    def news(self) -> Float32s | None:
        """The parameters, if they have changed noticeably since they were last handed out here."""
        latest = self.parameters()
        if np.abs(latest - self._handed_out).max() < NEWS:
            return None
        self._handed_out = latest
        return latest


def _columns(inputs: Floats, sampled: Bools) -> Floats:
    """inputs [S, D, R] -> [2 S + 1, D, R]: themselves, and for sampled requests again, and a 1."""
    count, depth, requests = inputs.shape
    extended = np.empty((2 * count + 1, depth, requests))
    extended[:count] = inputs
    extended[count:-1] = inputs * sampled
    extended[-1] = sampled
    return extended


def confidence_logits(
    evidence: torch.Tensor,
    head_logits: torch.Tensor | None,
    parameters: torch.Tensor,
    sampled: torch.Tensor | None = None,
) -> torch.Tensor:
    """evidence [R, D, F]; head_logits [R, D] or None; parameters [2, gamma, P], as above; sampled
    [R] bool, None: all are greedy -> float32 [R, D].

    What is NaN stays NaN. The prior of a head gives exactly the head's logits.
    """
    _, depth, features = evidence.shape
    weights = (parameters[0] if sampled is None else parameters[sampled.long()])[..., :depth, :]
    logits = (evidence * weights[..., :features]).sum(dim=-1) + weights[..., -1]
    return logits if head_logits is None else logits + head_logits * weights[..., features]
