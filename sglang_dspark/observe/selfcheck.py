"""A self-check while serving: a draft that loads, runs and never helps.

The most common silent failure of speculative decoding is a draft that was mapped wrongly (layers,
layout, vocabulary). Output stays right, since verification is lossless, and only the speed is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

ROUNDS = 300
MIN_ACCEPT_LENGTH = 1.05


class AcceptanceCheck:
    """Warns once if the mean accept length over the first rounds says that the draft is useless.

    resolved: what was loaded and how, in one line, to be told with the warning.
    """

    def __init__(self, resolved: str) -> None:
        self._resolved = resolved
        self._rounds = 0
        self._accepted = 0
        self.done = False

    def add(self, accepted: Sequence[int]) -> None:
        """Accepted draft tokens of each request in one round."""
        if self.done:
            return
        self._rounds += len(accepted)
        self._accepted += sum(accepted)
        if self._rounds < ROUNDS:
            return
        self.done = True
        accept_length = 1 + self._accepted / self._rounds
        if accept_length < MIN_ACCEPT_LENGTH:
            logger.warning(
                "sglang-dspark: the draft does not help: mean accept length %.3f over the first "
                "%d rounds (1.0 is no accepted draft at all). Output is right, but slower than "
                "without speculation. Resolved: %s. Is this draft made for this target, these "
                "layers and this chat template?",
                accept_length,
                self._rounds,
                self._resolved,
            )
