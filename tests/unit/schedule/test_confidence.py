"""Confidence from the draft's own distribution, fitted while serving: what it learns, what not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sglang_dspark.drafters.evidence import BOUND, F, evidence
from sglang_dspark.schedule import confidence as module
from sglang_dspark.schedule.calibration import survivals
from sglang_dspark.schedule.confidence import MAX_WEIGHT, NEWS, ConfidenceFit, confidence_logits

GAMMA = 5
Floats = npt.NDArray[np.float64]
Windows = Callable[[Floats], npt.NDArray[np.int64]]

# --- the formula ---------------------------------------------------------------------------------


def test_a_confidence_depends_on_its_own_position_alone() -> None:
    """So a window of ℓ + 1 tokens knows q_1 .. q_ℓ, whatever is drawn from q_ℓ or drafted later."""
    generator = torch.Generator().manual_seed(2)
    x, head = torch.randn(3, GAMMA, F, generator=generator), torch.randn(3, GAMMA)
    parameters = torch.randn(2, GAMMA, F + 2, generator=generator)
    before = confidence_logits(x, head, parameters)
    for k in range(GAMMA):
        changed, changed_head = x.clone(), head.clone()
        changed[1, k], changed_head[1, k] = 7.0, -7.0
        after = confidence_logits(changed, changed_head, parameters)
        differs = after != before
        assert differs[1, k] and differs.sum() == 1


def test_a_confidence_by_hand() -> None:
    """Two of three positions drafted; request 0 is greedy, request 1 sampled."""
    parameters = torch.tensor(
        [
            [[1.0, 2.0, 0.1], [3.0, 4.0, 0.2], [90.0, 90.0, 90.0]],
            [[5.0, 6.0, 0.3], [7.0, 8.0, 0.4], [90.0, 90.0, 90.0]],
        ]
    )
    x, head = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]), torch.tensor([[0.5, 1.0], [1.5, 2.0]])
    found = confidence_logits(x, head, parameters, torch.tensor([False, True]))
    expected = torch.tensor([[1 + 1 + 0.1, 6 + 4 + 0.2], [15 + 9 + 0.3, 28 + 16 + 0.4]])
    torch.testing.assert_close(found, expected)
    greedy = torch.tensor([[2.1, 10.2], [3 + 3 + 0.1, 12 + 8 + 0.2]])
    torch.testing.assert_close(confidence_logits(x, head, parameters), greedy)
    without = confidence_logits(x, None, parameters[..., [0, 2]])
    torch.testing.assert_close(without, greedy - head * torch.tensor([2.0, 4.0]))


# --- the confidence as it starts -----------------------------------------------------------------


def test_a_head_starts_as_itself() -> None:
    generator = torch.Generator().manual_seed(3)
    x, head = torch.randn(6, GAMMA, F) * 5, torch.randn(6, GAMMA, generator=generator) * 9
    for frozen in (False, True):
        parameters = torch.from_numpy(ConfidenceFit(GAMMA, head=True, frozen=frozen).parameters())
        sampled = torch.arange(6) % 2 == 0
        for told in (None, sampled):
            assert torch.equal(confidence_logits(x, head, parameters, told), head)


def test_without_a_head_it_starts_as_the_greatest_probability() -> None:
    logits = torch.randn(6, 3, 40, generator=torch.Generator().manual_seed(4)) * 3
    q = logits.softmax(dim=-1).amax(dim=-1)
    parameters = torch.from_numpy(ConfidenceFit(GAMMA, head=False).parameters())
    found = confidence_logits(evidence(logits), None, parameters)
    torch.testing.assert_close(found.sigmoid(), q, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(survivals(found), q.cumprod(1), atol=1e-4, rtol=1e-4)


# --- learning ------------------------------------------------------------------------------------


class World:
    """Rounds whose acceptance follows a known logistic model.

    slopes: of the evidence (and of the head, if there are F + 1). bias: [GAMMA]. shift: (of the
    first slope, of all biases) for sampled requests.
    """

    def __init__(
        self, slopes: list[float], bias: list[float], shift: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.slopes, self.bias = np.array(slopes), np.array(bias)
        self.shift, self.rng = shift, np.random.default_rng(0)

    @property
    def head(self) -> bool:
        return len(self.slopes) > F

    def draw(self, requests: int, windows: Windows | None = None) -> dict[str, Any]:
        """Keyword arguments of `learn`; every window is whole, or what `windows` makes of log-odds
        [R, GAMMA]."""
        rng = self.rng
        x = rng.normal(0.0, 2.0, (requests, len(self.bias), len(self.slopes)))
        sampled = rng.random(requests) < (0.5 if any(self.shift) else 0.0)
        logits = x @ self.slopes + self.bias
        logits += sampled[:, None] * (self.shift[0] * x[:, :, 0] + self.shift[1])
        kept = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
        accepted = kept.cumprod(axis=1).sum(axis=1)
        whole = np.full(requests, len(self.bias) + 1)
        verified = whole if windows is None else windows(x[:, :, 0])
        return {
            "evidence": x[:, :, :F],
            "head_logits": x[:, :, F] if self.head else None,
            "windows": verified,
            "accepted": np.minimum(accepted, verified - 1),
            "sampled": sampled,
        }


def learned(
    world: World, rounds: int, requests: int = 64, windows: Windows | None = None
) -> Floats:
    """Parameters [2, gamma, P], the mean of the last half of the rounds."""
    fit, found = ConfidenceFit(len(world.bias), world.head), []
    for i in range(rounds):
        fit.learn(**world.draw(requests, windows))
        if i >= rounds // 2:
            found.append(fit.parameters().astype(np.float64))
    return np.mean(found, axis=0)


# Of 20 seeds the worst errors were 0.03 (slopes) and 0.17 (biases of positions 4 and 5, which few
# rounds reach; 0.3 where windows are trimmed too).
SLOPE_ERROR, BIAS_ERROR = 0.05, 0.2
TRUTH = [0.7], [-0.6, 0.2, 0.5, 0.9, 1.0]


def assert_learned(
    found: Floats, slopes: list[float], bias: list[float], error: float = BIAS_ERROR
) -> None:
    assert found[:, :-1] == pytest.approx(np.tile(slopes, (GAMMA, 1)), abs=SLOPE_ERROR)
    assert found[:, -1] == pytest.approx(np.array(bias), abs=error)


def test_it_recovers_the_model_without_a_head() -> None:
    assert_learned(learned(World(*TRUTH), rounds=300)[0], *TRUTH)


def test_it_recovers_the_model_with_a_head() -> None:
    slopes, bias = [0.7, 0.3], TRUTH[1]
    assert_learned(learned(World(slopes, bias), rounds=300)[0], slopes, bias)


def test_sampled_requests_are_told_apart() -> None:
    slopes, bias = TRUTH
    found = learned(World(slopes, bias, shift=(-0.4, -0.5)), rounds=400)
    assert_learned(found[0], slopes, bias)
    assert_learned(found[1], [slopes[0] - 0.4], [b - 0.5 for b in bias])


def trimmed(log_odds: Floats) -> npt.NDArray[np.int64]:
    """Windows that end before the first doubtful token, as a scheduler's do."""
    kept: npt.NDArray[np.int64] = (log_odds[:, 1:] > -0.5).cumprod(axis=1).sum(axis=1)
    return 2 + kept


def first_only(log_odds: Floats) -> npt.NDArray[np.int64]:
    return np.full(len(log_odds), 2)


def test_trimmed_windows_do_not_bias_it() -> None:
    assert_learned(learned(World(*TRUTH), rounds=600, windows=trimmed)[0], *TRUTH, error=0.3)


def test_what_was_not_verified_or_not_reached_is_not_read() -> None:
    """The fit does not change by a bit, whatever stands at positions that were not observed."""
    world, rng = World(*TRUTH), np.random.default_rng(5)
    fits = [ConfidenceFit(GAMMA, head=False) for _ in range(2)]
    for _ in range(20):
        done = world.draw(32, windows=trimmed)
        fits[0].learn(**done)
        position = np.arange(GAMMA)
        unseen = position >= done["windows"][:, None] - 1
        unseen |= position > done["accepted"][:, None]
        assert unseen.any()
        done["evidence"][unseen] = rng.normal(0, 9, (int(unseen.sum()), F))
        fits[1].learn(**done)
    assert np.array_equal(fits[0].parameters(), fits[1].parameters())


def test_the_last_reached_position_is_a_rejection() -> None:
    """One request, window 4: two accepted, the third rejected, the rest unknown."""
    fit = ConfidenceFit(GAMMA, head=False)
    fit.learn(np.zeros((1, GAMMA, F)), None, np.array([4]), np.array([2]), np.zeros(1, dtype=bool))
    bias = fit.parameters()[0, :, -1]
    assert bias[0] > 0 and bias[1] > 0 and bias[2] < bias[1]
    whole = ConfidenceFit(GAMMA, head=False)  # all that was verified is accepted: no rejection
    whole.learn(
        np.zeros((1, GAMMA, F)), None, np.array([3]), np.array([2]), np.zeros(1, dtype=bool)
    )
    assert (whole.parameters()[0, :, -1] > 0).all()


def test_neighbours_speak_for_positions_without_outcomes() -> None:
    """Only the first token is ever verified; the others move with it, the farther the less."""
    bias = learned(World([1.0], [-1.5] * GAMMA), 100, windows=first_only)[0, :, -1]
    assert bias[0] == pytest.approx(-1.5, abs=0.1)
    assert (np.diff(bias) > 0).all() and bias[-1] < -0.75


def test_shorter_blocks_are_learned_from() -> None:
    world = World([0.7], TRUTH[1][:2])
    fit = ConfidenceFit(GAMMA, head=False)
    for _ in range(200):
        fit.learn(**world.draw(64))
    found = fit.parameters()[0, :2]
    assert found[:, 0] == pytest.approx(0.7, abs=SLOPE_ERROR)
    assert found[:, 1] == pytest.approx(TRUTH[1][:2], abs=BIAS_ERROR)


def test_it_follows_a_change_of_text() -> None:
    before, after = World([1.0], [1.0] * GAMMA), World([0.5], [-1.0] * GAMMA)
    fit = ConfidenceFit(GAMMA, head=False)
    for world, rounds in ((before, 300), (after, 150)):
        for _ in range(rounds):
            fit.learn(**world.draw(64))
    found = fit.parameters()[0, 0]
    assert found.tolist() == pytest.approx([0.5, -1.0], abs=0.15)


def test_what_is_forgotten_returns_to_the_prior() -> None:
    """Positions that are not verified any more keep no old opinion for ever."""
    fit, world = ConfidenceFit(2, head=False), World([1.0], [0.0, -3.0])
    for _ in range(100):
        fit.learn(**world.draw(64))
    learnt = fit.parameters()[0, 1, -1]
    for _ in range(1000):
        fit.learn(**world.draw(64, windows=first_only))
    forgotten = fit.parameters()[0, 1, -1]
    assert learnt < -2.5 and forgotten > learnt + 1.0


@pytest.mark.parametrize("head", [False, True])
def test_rounds_are_learned_by_the_formula(head: bool) -> None:
    """Against the module's formulas, observation by observation, with a dense x."""
    world = World([0.7, 0.3] if head else [0.7], TRUTH[1], shift=(-0.2, 0.1))
    fit, slopes = ConfidenceFit(GAMMA, head), F + head
    prior, mean = fit._prior.copy(), fit._prior.copy()
    a0 = fit._prior_precision.copy()
    a = a0.copy()
    for _ in range(5):
        done = world.draw(8, windows=trimmed)
        seen = []
        for r in range(8):
            for k in range(min(int(done["windows"][r]) - 1, int(done["accepted"][r]) + 1)):
                inputs = list(done["evidence"][r, k]) + (
                    [done["head_logits"][r, k]] if head else []
                )
                shifted = [*inputs, 1.0] if done["sampled"][r] else [0.0] * (slopes + 1)
                position = [float(k == j) for j in range(GAMMA)]
                x = np.array([*inputs, *shifted, *position])
                seen.append((x, float(done["accepted"][r] > k), 1 / (1 + math.exp(-mean @ x))))
        forgotten = 1 - math.exp(-len(seen) / module.MEMORY)
        a = a + forgotten * (a0 - a) + sum(p * (1 - p) * np.outer(x, x) for x, _, p in seen)
        gradient = sum((y - p) * x for x, y, p in seen) + forgotten * a0 @ (prior - mean)
        step = np.linalg.solve(a, gradient)
        mean = mean + step * min(1.0, module.MAX_STEP / max(abs(step @ x) for x, _, _ in seen))
        fit.learn(**done)
        found = fit.parameters()
        expected = np.tile(np.append(mean[:slopes], 0.0), (2, GAMMA, 1))
        expected[:, :, -1] = mean[-GAMMA:]
        expected[1] += mean[slopes : 2 * slopes + 1]
        np.testing.assert_allclose(found, expected, atol=1e-5)


# --- robustness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["evidence", "head_logits"])
def test_what_is_not_finite_is_ignored(bad: float, where: str) -> None:
    """As if that position had not been observed; the request's others count."""
    world = World([0.7, 0.3], TRUTH[1])
    one, other = (ConfidenceFit(GAMMA, head=True) for _ in range(2))
    for _ in range(10):
        done = world.draw(16)
        done["accepted"][:] = GAMMA
        shorter = dict(done, windows=np.where(np.arange(16) == 3, GAMMA, done["windows"]))
        other.learn(**shorter)
        done[where] = done[where].copy()
        done[where][3, GAMMA - 1] = bad
        one.learn(**done)
    assert np.array_equal(one.parameters(), other.parameters())
    everything = dict(world.draw(4))
    everything["evidence"] = np.full((4, GAMMA, F), bad)
    one.learn(**everything)
    assert np.array_equal(one.parameters(), other.parameters())


@pytest.mark.parametrize("head", [False, True])
def test_no_outcomes_make_it_run_away(head: bool) -> None:
    """Contradictory extremes, huge heads, batches of one and of 256: bounded, and never NaN."""
    rng = np.random.default_rng(6)
    fit = ConfidenceFit(GAMMA, head)
    for i in range(600):
        requests = (1, 256)[i % 2]
        sign = rng.choice([-1.0, 1.0])
        fit.learn(
            np.full((requests, GAMMA, F), sign * (BOUND, 1e30)[i % 3 == 0]),
            np.full((requests, GAMMA), -sign * 1e30) if head else None,
            np.full(requests, GAMMA + 1),
            np.full(requests, 0 if sign > 0 else GAMMA),  # the opposite of what was said
            rng.random(requests) < 0.5,
        )
        parameters = fit.parameters()
        assert np.isfinite(parameters).all() and np.abs(parameters).max() <= 2 * MAX_WEIGHT
    # It has learned that the evidence lies, and believes again when that changes.
    assert fit.parameters()[0, 0, 0] < 0.3
    world = World([1.0, 0.0] if head else [1.0], [0.0] * GAMMA)
    for _ in range(300):
        fit.learn(**world.draw(64))
    assert fit.parameters()[0, 0, 0] == pytest.approx(1.0, abs=0.3)


def test_one_round_moves_no_confidence_by_more_than_a_step() -> None:
    world = World([-2.0], [-4.0] * GAMMA)
    fit = ConfidenceFit(GAMMA, head=False)
    for _ in range(20):
        done = world.draw(256)
        x = torch.from_numpy(done["evidence"]).float()
        reached = np.arange(GAMMA) <= done["accepted"][:, None]
        before = confidence_logits(x, None, torch.from_numpy(fit.parameters()))
        fit.learn(**done)
        after = confidence_logits(x, None, torch.from_numpy(fit.parameters()))
        assert (after - before)[torch.from_numpy(reached)].abs().max() <= module.MAX_STEP + 1e-4


def test_what_separates_perfectly_stays_bounded() -> None:
    rng, fit = np.random.default_rng(7), ConfidenceFit(GAMMA, head=False)
    for _ in range(300):
        kept = rng.random((64, GAMMA)) < 0.5
        accepted = kept.cumprod(axis=1).sum(axis=1)
        x = np.where(kept, 0.1, -0.1)[:, :, None]
        fit.learn(x, None, np.full(64, GAMMA + 1), accepted, np.zeros(64, dtype=bool))
    assert fit.parameters()[0, 0, 0] == MAX_WEIGHT


def test_a_huge_head_teaches_no_more_than_a_sure_one() -> None:
    fits = [ConfidenceFit(GAMMA, head=True) for _ in range(2)]
    for fit, size in zip(fits, (1e9, BOUND), strict=True):
        for accepted in (0, 1, 0, GAMMA):
            fit.learn(
                np.zeros((4, GAMMA, F)),
                np.full((4, GAMMA), size),
                np.full(4, GAMMA + 1),
                np.full(4, accepted),
                np.zeros(4, dtype=bool),
            )
    assert np.array_equal(fits[0].parameters(), fits[1].parameters())


def test_a_frozen_fit_learns_nothing() -> None:
    fit = ConfidenceFit(GAMMA, head=True, frozen=True)
    start = fit.parameters()
    world = World([0.2, 0.1], [-1.0] * GAMMA)
    for _ in range(20):
        fit.learn(**world.draw(64))
    assert np.array_equal(fit.parameters(), start) and fit.news() is None


def test_it_is_deterministic() -> None:
    found = [learned(World(*TRUTH), rounds=30) for _ in range(2)]
    assert np.array_equal(*found)


def test_small_changes_are_not_news() -> None:
    fit, world = ConfidenceFit(GAMMA, head=False), World(*TRUTH)
    assert fit.news() is None
    handed_out, times = fit.parameters(), 0
    for _ in range(200):
        fit.learn(**world.draw(64))
        news = fit.news()
        if news is None:
            assert np.abs(fit.parameters() - handed_out).max() < NEWS
        else:
            assert news.dtype == np.float32 and np.array_equal(news, fit.parameters())
            handed_out, times = news, times + 1
    assert 5 < times < 200


def test_it_is_calibrated_where_it_is_asked() -> None:
    """Predict, then learn: of what was said to survive with 60 %, 60 % did (within 0.02)."""
    world, fit = World([0.6], [-0.8, 0.1, 0.4, 0.6, 0.6]), ConfidenceFit(GAMMA, head=False)
    said, kept = [], []
    for i in range(400):
        done = world.draw(64, windows=trimmed)
        x = torch.from_numpy(done["evidence"]).float()
        chances = confidence_logits(x, None, torch.from_numpy(fit.parameters())).sigmoid().numpy()
        position = np.arange(GAMMA)
        seen = position < done["windows"][:, None] - 1
        seen &= position <= done["accepted"][:, None]
        if i >= 20:
            said.append(chances[seen])
            kept.append((position < done["accepted"][:, None])[seen])
        fit.learn(**done)
    predicted, happened = np.concatenate(said), np.concatenate(kept)
    for low in np.arange(0.1, 0.9, 0.1):
        inside = (predicted >= low) & (predicted < low + 0.1)
        assert happened[inside].mean() == pytest.approx(predicted[inside].mean(), abs=0.02)
