"""What the last rounds did, kept on the host and shown by /server_info.

Accept counts come from SGLang's own copy to the host, and confidences are copied only when somebody
asks, so that a round costs no device synchronisation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from sglang_dspark.config import SpecConfig

KEPT_ROUNDS = 1024
KEPT_CONFIDENCES = 8


class RoundRecords:
    """Accept lengths of the most recent rounds, and totals since the start or the last clear."""

    def __init__(self, config: SpecConfig) -> None:
        self._config = config
        self.clear()

    def clear(self) -> None:
        self._recent: deque[list[int]] = deque(maxlen=KEPT_ROUNDS)
        self._confidences: deque[torch.Tensor] = deque(maxlen=KEPT_CONFIDENCES)
        self._rounds = 0
        self._windows = 0
        self._accepted = 0

    def add(self, accepted: Sequence[int]) -> None:
        """Accepted draft tokens of each request in one round."""
        self._recent.append([1 + count for count in accepted])
        self._rounds += 1
        self._windows += len(accepted)
        self._accepted += sum(accepted)

    def keep_confidence(self, logits: torch.Tensor) -> None:
        """Confidence logits [R, gamma] of a round; they stay on the device until they are asked."""
        self._confidences.append(logits)

    def dump(self) -> dict[str, Any]:
        """The resolved configuration, the totals, and the accept lengths round by round.

        accept_lens: one list per round, oldest first, with the tokens that each request of the
        batch committed (accepted drafts and the bonus).
        confidence_logits: [R][gamma] of each of the last rounds, oldest first.
        """
        config = self._config
        return {
            "plugin": "sglang-dspark",
            "algorithm": str(config.algorithm),
            "mode": str(config.mode),
            "gamma": config.gamma,
            "resolved": config.describe(),
            "rounds": self._rounds,
            "accept_length": 1 + self._accepted / self._windows if self._windows else None,
            "accept_rate": (
                self._accepted / (self._windows * config.gamma) if self._windows else None
            ),
            "accept_lens": list(self._recent),
            "confidence_logits": [logits.tolist() for logits in self._confidences],
        }
