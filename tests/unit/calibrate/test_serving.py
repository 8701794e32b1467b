"""Serving with a calibration: what windows are sized by, with the online fit and without."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import micro
from cost_tables import FlatCost, RoundCost
from cuda_graph import TierGrid
from sglang_dspark.config import ScheduleConfig, TargetModel, VerifyMode, resolve
from sglang_dspark.drafters.base import DraftBlock
from sglang_dspark.errors import ConfigError
from sglang_dspark.schedule.agree import Alone
from sglang_dspark.schedule.calibration import Scaling
from sglang_dspark.schedule.cost_source import CostSource
from sglang_dspark.schedule.rounds import Belief, FinishedRound
from sglang_dspark.schedule.scheduler import Decision
from sglang_dspark.schedule.windows import WindowScheduler

GAMMA, REQUESTS = 3, 4
TEMPERATURES = (2.0, 0.5, 1.5)


class Serving:
    """The schedule of a server, and rounds of it."""

    def __init__(
        self,
        head: bool,
        fit: str,
        temperatures: tuple[float, ...] | None,
        shifts: tuple[float, ...] = (0.0,) * GAMMA,
    ) -> None:
        scaling = None if temperatures is None else Scaling(temperatures, shifts)
        config: Any = SimpleNamespace(
            gamma=GAMMA,
            mode=VerifyMode.COMPACT,
            draft=SimpleNamespace(has_confidence_head=head),
            schedule=ScheduleConfig(scaling=scaling, confidence_fit=fit),
        )
        pool = SimpleNamespace(req_to_token=torch.zeros(REQUESTS, 8))
        cpu = torch.device("cpu")
        self.windows = WindowScheduler(config, pool, cpu, Alone(), overlap=True)
        self.windows.use_grid(TierGrid.choose(8, GAMMA, 4), captured=False)
        self.windows.start(CostSource(RoundCost(FlatCost(0.01)), "none"))
        self._generator = torch.Generator().manual_seed(0)
        self.head: torch.Tensor | None = torch.empty(0) if head else None
        self.draft()

    def draft(self) -> None:
        """New blocks."""
        self.evidence = torch.randn(REQUESTS, GAMMA, 1, generator=self._generator) * 3
        if self.head is not None:
            self.head = torch.randn(REQUESTS, GAMMA, generator=self._generator) * 3

    @property
    def logits(self) -> torch.Tensor:
        """What the draft says by itself."""
        return self.evidence[..., 0] if self.head is None else self.head

    def believe(self, depth: int = GAMMA) -> Belief:
        head = None if self.head is None else self.head[:, :depth]
        tokens = torch.zeros(REQUESTS, depth, dtype=torch.int64)
        block = DraftBlock(tokens, None, self.evidence[:, :depth], head)
        state: Any = SimpleNamespace(anchors=torch.zeros(REQUESTS), sampling=None, context=0.0)
        plan = self.windows.plan(Decision(depth, REQUESTS * depth, 0), block, state)
        assert plan.belief is not None
        return plan.belief

    def learn(self, rounds: int = 40, accepted: Any = 0) -> None:
        """Rounds of the same blocks that accept so many tokens, of each or each its own."""
        rows = np.arange(REQUESTS)
        for _ in range(rounds):
            belief = self.believe()
            head = None if belief.head_logits is None else belief.head_logits.double().numpy()
            assert belief.evidence is not None
            self.windows.learn(
                FinishedRound(
                    decision=Decision(GAMMA, REQUESTS * GAMMA, 0),
                    rows=rows,
                    generations=rows,
                    seconds=None,
                    tokens=REQUESTS * (GAMMA + 1),
                    full=False,
                    survivals=belief.survivals.double().numpy(),
                    windows=np.full(REQUESTS, GAMMA + 1),
                    accepted=np.full(REQUESTS, accepted),
                    ceiling=np.full(REQUESTS, 0),
                    broken=np.zeros(REQUESTS, dtype=bool),
                    evidence=belief.evidence.double().numpy(),
                    head_logits=head,
                    sampled=np.zeros(REQUESTS, dtype=bool),
                )
            )


def calibrated(logits: torch.Tensor) -> torch.Tensor:
    return (logits / torch.tensor(TEMPERATURES)).sigmoid().cumprod(dim=1)


heads = pytest.mark.parametrize("head", [False, True], ids=["no-head", "head"])


@heads
@pytest.mark.parametrize("fit", ["auto", "on", "off"])
def test_a_calibration_divides_what_the_draft_says(head, fit):
    """The head's logits, or the log-odds of a draft without one, in the first round."""
    serving = Serving(head, fit, TEMPERATURES)
    torch.testing.assert_close(serving.believe().survivals, calibrated(serving.logits))
    shallow = serving.believe(depth=2).survivals
    torch.testing.assert_close(shallow, calibrated(serving.logits)[:, :2])


@heads
@pytest.mark.parametrize("fit", ["auto", "on", "off"])
def test_a_shift_is_added_to_what_was_divided(head, fit):
    shifts = (0.5, -1.0, 2.0)
    serving = Serving(head, fit, TEMPERATURES, shifts)
    logits = serving.logits / torch.tensor(TEMPERATURES) + torch.tensor(shifts)
    expected = logits.sigmoid().cumprod(dim=1)
    torch.testing.assert_close(serving.believe().survivals, expected)
    torch.testing.assert_close(serving.believe(depth=2).survivals, expected[:, :2])


@heads
@pytest.mark.parametrize("fit", ["auto", "on", "off"])
def test_without_one_it_starts_as_the_draft_says(head, fit):
    serving = Serving(head, fit, None)
    expected = serving.logits.sigmoid().cumprod(dim=1)
    torch.testing.assert_close(serving.believe().survivals, expected)


@heads
@pytest.mark.parametrize(
    ("fit", "temperatures", "moves"),
    [
        ("auto", None, True),
        ("auto", TEMPERATURES, False),
        ("on", None, True),
        ("on", TEMPERATURES, True),
        ("off", None, False),
        ("off", TEMPERATURES, False),
    ],
)
def test_the_online_fit_runs_when_it_should(head, fit, temperatures, moves):
    serving = Serving(head, fit, temperatures)
    before = serving.believe().survivals
    serving.learn(accepted=0)
    after = serving.believe().survivals
    if moves:
        assert (after[:, 0] < before[:, 0]).all() and after[:, 0].mean() < before[:, 0].mean() / 2
    else:
        assert torch.equal(after, before)
    told = serving.windows.describe()["confidence fit"]
    assert told == ("online" if moves else "off")


@heads
@pytest.mark.parametrize("shift", [0.0, -1.5])
def test_the_fit_leaves_a_right_calibration_as_it_is(head, shift):
    """It learns from what it is applied to: logits that are divided and shifted already."""
    serving = Serving(head, "on", (4.0,) * GAMMA, (shift,) * GAMMA)
    rng = np.random.default_rng(0)
    for _ in range(200):
        serving.draft()
        kept = rng.random((REQUESTS, GAMMA)) < (serving.logits / 4.0 + shift).sigmoid().numpy()
        serving.learn(rounds=1, accepted=kept.cumprod(axis=1).sum(axis=1))
    differences = []
    for _ in range(50):
        serving.draft()
        right = (serving.logits / 4.0 + shift).sigmoid()[:, 0]
        differences.append((serving.believe().survivals[:, 0] - right).abs().mean().item())
    assert np.mean(differences) < 0.04


@heads
def test_records_hold_what_the_draft_said_before_any_calibration(head):
    serving = Serving(head, "on", TEMPERATURES)
    serving.learn()
    belief = serving.believe()
    assert belief.evidence is not None and torch.equal(belief.evidence, serving.evidence)
    if head:
        assert belief.head_logits is not None and torch.equal(belief.head_logits, serving.head)


# --- what it is resolved from --------------------------------------------------------------------

TARGET = TargetModel(micro.HIDDEN, micro.VOCAB, micro.TARGET_LAYERS)
MODE, FIT = "SGLANG_RAGGED_VERIFY_MODE", "SGLANG_SPEC_VERIFY_CONFIDENCE_FIT"
RECORDS = "SGLANG_SPEC_VERIFY_RECORDS"


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return micro.write_random(tmp_path_factory.mktemp("pair"))[1]


def resolved(draft, environ=None, **changes):
    args = SimpleNamespace(
        speculative_algorithm="DSPARK",
        speculative_draft_model_path=str(draft),
        speculative_num_draft_tokens=None,
        speculative_dspark_block_size=None,
        speculative_num_steps=None,
        speculative_eagle_topk=None,
        **changes,
    )
    return resolve(args, TARGET, {MODE: "compact", **(environ or {})})


def refused(draft, environ, **changes) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(draft, environ, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_fit_is_automatic(draft, tmp_path):
    assert resolved(draft).schedule.fits_online
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"temperatures": [1.5] * 7}))
    path = {"speculative_dspark_confidence_sts_path": str(file)}
    assert not resolved(draft, **path).schedule.fits_online
    assert resolved(draft, {FIT: "on"}, **path).schedule.fits_online
    assert not resolved(draft, {FIT: "off"}).schedule.fits_online


def test_a_calibration_of_another_draft_stops_the_server(draft, tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"temperatures": [1.5] * 7, "algorithm": "EAGLE3"}))
    message = refused(draft, {}, speculative_dspark_confidence_sts_path=str(file))
    for word in ("--speculative-dspark-confidence-sts-path", "EAGLE3", "DSPARK", str(file)):
        assert word in message


@pytest.mark.parametrize("value", ["", "yes", "Auto"])
def test_a_fit_that_nobody_knows(draft, value):
    message = refused(draft, {FIT: value})
    for word in ("--speculative-confidence-fit", repr(value), "auto, on, off"):
        assert word in message


def test_the_fit_means_nothing_in_static_mode(draft):
    message = refused(draft, {MODE: "static", FIT: "on"})
    assert "--speculative-confidence-fit" in message and "static" in message


@pytest.mark.parametrize("mode", ["static", "compact", "cap-accept"])
def test_every_mode_can_be_recorded(draft, tmp_path, mode):
    path = tmp_path / "r.jsonl"
    found = resolved(draft, {MODE: mode, RECORDS: str(path)})
    assert found.records == path and found.wants_evidence
    assert not path.exists()  # opened by the one process that writes it
    without = resolved(draft, {MODE: mode})
    assert without.records is None and without.wants_evidence == (mode != "static")


def test_records_that_cannot_be_written_stop_the_start(draft, tmp_path):
    (tmp_path / "old").write_text("something")
    for value, words in (
        ("", "must be the name of a file"),
        (str(tmp_path / "no" / "r"), "does not exist"),
        (str(tmp_path), "a folder"),
        (str(tmp_path / "old"), "holds something already"),
    ):
        message = refused(draft, {RECORDS: value})
        assert "--speculative-verify-records is " in message and words in message


def test_replicas_are_not_recorded(draft, tmp_path):
    message = refused(draft, {RECORDS: str(tmp_path / "r")}, dp_size=2)
    assert "--speculative-verify-records with --dp-size 2" in message
