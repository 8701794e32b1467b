"""What several server tests share: checkpoints, and the yardsticks of their requests."""

from __future__ import annotations

from pathlib import Path

import pytest

import micro
import trained
from servers import generate_all, serve

# Noise at which each head is wrong now and then, so that accept lengths vary.
NOISY = {
    "vanilla": {"head_noise": 1.0},
    # Behind the third token its blocks see the anchor, and then nothing but mask tokens.
    "gated": {"head_noise": 1.5, "distance": 3},
    "rnn": {"head_noise": 1.0},
}


@pytest.fixture(scope="session")
def noisy_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """By the draft's head: a target that depends on its whole context, and a draft that is right
    now and then."""
    return {
        head: micro.write_oracle(
            tmp_path_factory.mktemp(head),
            head=head,
            target_noise=0.05,
            feature_layers=(0, 1, 2),
            **changes,
        )
        for head, changes in NOISY.items()
    }


@pytest.fixture(scope="session")
def noisy_pair(noisy_pairs: dict[str, tuple[Path, Path]]) -> tuple[Path, Path]:
    return noisy_pairs["vanilla"]


@pytest.fixture(scope="session")
def trained_greedy(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Outputs of trained.REQUESTS, one at a time: the server without speculation."""
    log = tmp_path_factory.mktemp("baseline") / "log"
    with serve(trained.TARGET, trained.ARGS, log) as server:
        return generate_all(server, trained.REQUESTS, 1)
