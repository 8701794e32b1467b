"""Goodness-of-fit for distribution tests: fixed seeds, stated false-alarm rate."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from scipy import stats

from sglang_dspark.serving import Server

FALSE_ALARM = 1e-5  # probability that a right sampler fails one such test, were the seed not fixed


def g_test(samples: Sequence[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """p-value of the G-test of samples against an exact distribution.

    Outcomes expected fewer than 5 times are pooled into one cell, since the chi-squared limit does
    not hold for them. An outcome of probability zero gives p-value 0.
    """
    counts = Counter(samples)
    if any(exact.get(outcome, 0.0) <= 0.0 for outcome in counts):
        return 0.0
    observed, expected = [], []
    rare_observed, rare_expected = 0.0, 0.0
    for outcome, probability in exact.items():
        mean = probability * len(samples)
        if mean < 5:
            rare_observed += counts[outcome]
            rare_expected += mean
        else:
            observed.append(counts[outcome])
            expected.append(mean)
    if rare_expected >= 5:
        observed.append(rare_observed)
        expected.append(rare_expected)
    else:  # too small a cell for the limit: join the smallest of the others
        observed[-1] += rare_observed
        expected[-1] += rare_expected
    total = sum(observed) / sum(expected)
    result = stats.power_divergence(
        observed, [mean * total for mean in expected], lambda_="log-likelihood"
    )
    return float(result.pvalue)


def joint(tables: torch.Tensor, first: torch.Tensor, length: int) -> dict[tuple[int, ...], float]:
    """Exact joint distribution of a Markov chain: first [V], transitions [V, V]."""
    outcomes: dict[tuple[int, ...], float] = {(): 1.0}
    for step in range(length):
        grown = {}
        for prefix, probability in outcomes.items():
            row = first if step == 0 else tables[prefix[-1]]
            for token, p in enumerate(row.tolist()):
                if p > 0:
                    grown[(*prefix, token)] = probability * p
        outcomes = grown
    return outcomes


@torch.inference_mode()
def three_tokens(model: Any, prompt: list[int], vocab: int) -> dict[tuple[int, ...], float]:
    """Exact joint distribution of three tokens behind a prompt; model: of transformers."""
    pairs = list(itertools.product(range(vocab), repeat=2))
    batch = torch.tensor([[*prompt, a, b] for a, b in pairs])
    rows = model(batch).logits[:, len(prompt) - 1 :].double().softmax(-1)
    return {
        (a, b, c): float(rows[i, 0, a] * rows[i, 1, b] * rows[i, 2, c])
        for i, (a, b) in enumerate(pairs)
        for c in range(vocab)
    }


def sample_three(
    server: Server, prompt: list[int], count: int, **params: Any
) -> list[tuple[int, ...]]:
    """Three tokens from each of `count` requests; they ask for more, so that no window is cut."""
    sampling = {"max_new_tokens": 4, "ignore_eos": True, **params}
    payload = {"input_ids": [prompt] * count, "sampling_params": sampling}
    answers = server.post("/generate", payload, timeout_s=600)
    return [tuple(answer["output_ids"][:3]) for answer in answers]


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of a module in which one piece of source text, found exactly once, is replaced."""
    import sys

    source = module.__spec__.loader.get_source(module.__name__)  # type: ignore[union-attr]
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
    copy = ModuleType(module.__name__ + "_mutant")
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), copy.__dict__)
    return copy
