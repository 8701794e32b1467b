"""The cost model's fit, and the three kinds of table file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cost_tables import (
    CostModel,
    Fingerprint,
    RoundCost,
    TableError,
    fit,
    load_table,
    save_table,
)
from cost_tables.model import Cells, relative_errors

MODEL = CostModel(
    bias=0.01,
    request_knots=(1.0, 8.0, 32.0),
    request_seconds=(0.0, 0.004, 0.01),
    token_knots=(1.0, 64.0, 256.0),
    token_seconds=(0.0, 0.001, 0.05),
    seconds_per_context_token=1e-7,
    draft_knots=(1.0, 32.0, 224.0),
    draft_seconds=(0.0, 0.002, 0.02),
)
CHAIN = replace(MODEL, seconds_per_draft_step=0.003, seconds_per_attended_token=2e-8)
PLACE = Fingerprint("cpu", "m", "float32", 1, 7, "host")


def cells(noise: float, seed: int = 0, model: CostModel = MODEL) -> Cells:
    rng = np.random.default_rng(seed)
    rows = [
        (r, r * m, r * d, r * c)
        for r in (1, 2, 4, 8, 16, 32)
        for m in (1, 2, 4, 8)
        for d in (1, 4, 7)
        for c in (10, 1000)
    ]
    exact = np.array([model.seconds(r, np.array([m]), c, d)[0] for r, m, d, c in rows])
    seconds = exact * (1 + noise * rng.standard_normal(len(exact)))
    return Cells(*np.array(rows, dtype=float).T, seconds)


def test_a_fit_finds_what_made_the_cells() -> None:
    exact = cells(0.0)
    assert np.median(relative_errors(fit(exact), exact)) < 0.01
    noisy, held_out = cells(0.03), cells(0.0, seed=1)
    assert np.median(relative_errors(fit(noisy), held_out)) < 0.03


def test_a_fit_tells_drafted_tokens_from_verified_ones() -> None:
    drafted, tokens = np.array([8.0, 32.0, 56.0, 128.0, 224.0]), np.array([1.0, 16.0, 64.0, 256.0])
    for model, tolerance in ((fit(cells(0.0)), 1e-3), (fit(cells(0.01)), 0.002)):
        draft = model.seconds(8, np.full(5, 64.0), 0.0, drafted)
        verify = model.seconds(8, tokens, 0.0, 32.0)
        for found, expected in (
            (draft, MODEL.seconds(8, np.full(5, 64.0), 0.0, drafted)),
            (verify, MODEL.seconds(8, tokens, 0.0, 32.0)),
        ):
            assert np.diff(found) == pytest.approx(np.diff(expected), abs=tolerance)


def test_a_chain_pays_for_its_steps_and_attention_for_what_it_looks_at() -> None:
    """By hand: 4 requests, 3 steps of a chain, 8 verify tokens of 4 · 500 context tokens."""
    plain, chain = (m.seconds(4, np.array([8.0]), 2000.0, 12.0)[0] for m in (MODEL, CHAIN))
    assert chain - plain == pytest.approx(3 * 0.003 + 8 * 500 * 2e-8)
    fewer = CHAIN.seconds(4, np.full(2, 8.0), 2000.0, np.array([4.0, 12.0]))
    alone = MODEL.seconds(4, np.full(2, 8.0), 2000.0, np.array([4.0, 12.0]))
    assert np.diff(fewer - alone) == pytest.approx(2 * 0.003)


def test_a_fit_tells_steps_of_a_chain_from_drafted_tokens() -> None:
    """And what attention computes from what it reads."""
    model = fit(cells(0.0, model=CHAIN))
    assert model.seconds_per_draft_step == pytest.approx(0.003, rel=0.1)
    assert model.seconds_per_attended_token == pytest.approx(2e-8, rel=0.1)
    assert model.seconds_per_context_token == pytest.approx(1e-7, rel=0.1)
    without = fit(cells(0.0))
    assert without.seconds_per_draft_step < 1e-4 and without.seconds_per_attended_token < 1e-9


def test_a_fit_never_falls() -> None:
    """Noise that makes more tokens look cheaper."""
    measured = cells(0.3, seed=2)
    model = fit(measured)
    tokens = np.arange(1.0, 400.0)
    assert (np.diff(model.seconds(4, tokens, 100.0)) >= -1e-12).all()
    assert (np.diff(model.seconds(4, np.full(399, 9.0), 100.0, tokens)) >= -1e-12).all()
    assert model.seconds_per_context_token >= 0


def test_beyond_the_last_knot_more_tokens_cost_more() -> None:
    inside, outside = MODEL.seconds(8, np.array([256.0, 512.0]), 0.0)
    assert outside - inside == pytest.approx(0.049 / 192 * 256)
    inside, outside = MODEL.seconds(8, np.full(2, 8.0), 0.0, np.array([224.0, 448.0]))
    assert outside - inside == pytest.approx(0.018 / 192 * 224)


def test_rounds_without_a_draft_have_no_draft_part() -> None:
    measured = replace(cells(0.0), drafted=np.zeros(len(cells(0.0))))
    model = fit(measured)
    assert (model.draft_knots, model.draft_seconds) == ((0.0,), (0.0,))
    one, other = (model.seconds(4, np.array([8.0]), 0.0, drafted) for drafted in (0.0, 99.0))
    assert one == other


def test_a_table_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    save_table(path, MODEL, PLACE, 0.02, cells=48)
    table = load_table(path)
    assert (
        table.cost == RoundCost(MODEL) and table.fingerprint == PLACE and table.median_error == 0.02
    )
    fitted = fit(cells(0.01, model=CHAIN))
    plain = replace(MODEL, draft_knots=(0.0,), draft_seconds=(0.0,))
    assert fitted.draft_seconds[-1] > 0 and fitted.seconds_per_draft_step > 0
    save_table(path, fitted, PLACE, 0.02, cells=48, plain=plain)
    assert load_table(path).cost == RoundCost(fitted, plain)
    other = Fingerprint("gpu", "m", "float32", 1, 5, "host")
    assert PLACE.differences(other) == ["device: cpu against gpu", "gamma: 7 against 5"]


def test_what_a_table_does_not_know_of_costs_nothing(tmp_path: Path) -> None:
    content = broken()
    del content["model"]["seconds_per_draft_step"]
    (tmp_path / "t.json").write_text(json.dumps(content))
    cost = load_table(tmp_path / "t.json").cost.drafted
    assert isinstance(cost, CostModel) and cost.seconds_per_draft_step == 0


def test_sglangs_tables_load(tmp_path: Path) -> None:
    """Written by SGLang's own classes, and they cost what SGLang says."""
    from sglang.srt.speculative.dspark_components.dspark_sps import (
        SpsAdditiveCostTable,
        SpsCostTable,
    )

    steps = SpsCostTable([1, 8, 64], [100.0, 80.0, 20.0], 64)
    (tmp_path / "s.json").write_text(steps.to_json())
    cost = load_table(tmp_path / "s.json").cost.drafted
    tokens = np.array([1.0, 7.0, 8.0, 63.0, 64.0, 100.0])
    expected = [1 / steps.lookup(int(t)) for t in tokens]
    for drafted in (0.0, 500.0, 10 * tokens):  # to SGLang a draft is a part of the step
        assert cost.seconds(1, tokens, 0.0, drafted).tolist() == pytest.approx(expected)

    additive = SpsAdditiveCostTable(0.01, [1, 8], [-0.002, 0.001], [1, 16, 64], [0.0, 0.003, 0.02])
    (tmp_path / "a.json").write_text(additive.to_json())
    cost = load_table(tmp_path / "a.json").cost.drafted
    for requests in (1, 4, 8):
        for budget in (0, 5, 40):
            expected_s = additive.step_time(num_reqs=requests, budget=budget)
            tokens = np.array([float(requests + budget)])
            for drafted in (0.0, 500.0):
                found = cost.seconds(requests, tokens, 0.0, drafted)[0]
                assert found == pytest.approx(expected_s)


def broken(*missing: str, **changes: Any) -> dict[str, Any]:
    """A file of ours with fields changed or, in the model, missing."""
    model = {
        "bias": 0.01,
        "request_knots": [1],
        "request_seconds": [0],
        "token_knots": [1, 8],
        "token_seconds": [0, 0.01],
        "seconds_per_context_token": 0,
        "draft_knots": [1, 8],
        "draft_seconds": [0, 0.01],
        "seconds_per_draft_step": 0,
    }
    top = {
        "format": "sglang-dspark cost table",
        "version": 1,
        "fingerprint": vars(PLACE),
        "median_error": 0.1,
        "cells": 5,
    }
    for name, value in changes.items():
        (model if name in model else top)[name] = value
    for name in missing:
        del model[name]
    return {**top, "model": model}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not readable JSON"),
        ("[]", "must hold a JSON object, but holds a list"),
        (json.dumps(broken(format="other")), "format is 'other'; must be"),
        (json.dumps(broken(version=2)), "version is 2; this release reads version 1"),
        (json.dumps(broken(token_seconds=[0, -1])), "token_seconds is .* must not be negative"),
        (json.dumps(broken(token_seconds=[0])), "token_knots has 2 entries and token_seconds 1"),
        (json.dumps(broken(token_knots=[8, 1])), "token_knots is .* must ascend"),
        (json.dumps(broken("draft_knots")), "field draft_knots is missing"),
        (json.dumps(broken("draft_seconds")), "field draft_seconds is missing"),
        (json.dumps(broken(draft_knots=5)), "draft_knots is 5; must be a list of numbers"),
        (json.dumps(broken(draft_seconds=[0])), "draft_knots has 2 entries and draft_seconds 1"),
        (json.dumps(broken(draft_knots=[8, 8])), "draft_knots is .* must ascend"),
        (json.dumps(broken(draft_seconds=[0.01, 0])), "draft_seconds is .* must not"),
        (json.dumps(broken(bias=float("nan"))), "bias holds nan; must be a finite number"),
        (
            json.dumps(broken(seconds_per_draft_step=-1)),
            "seconds_per_draft_step is -1.0; must be a finite number, not negative",
        ),
        (json.dumps(broken(bias="1")), "bias holds '1'; must be a finite number"),
        (json.dumps(broken(bias=0.0)), "takes no time"),
        (json.dumps({"sample_batch_tokens": [1]}), "field sample_steps_per_sec is missing"),
        (
            json.dumps({"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [1, 1]}),
            "sample_batch_tokens is .* must ascend",
        ),
        (json.dumps({"bias_seconds": 1}), "field alpha_seconds is missing"),
    ],
)
def test_bad_tables_say_what_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(TableError, match=message) as error:
        load_table(path)
    assert str(error.value).startswith(str(path))
    with pytest.raises(TableError, match="no such file"):
        load_table(tmp_path / "none.json")


def test_noise_that_leaves_no_bias_makes_a_model_all_the_same() -> None:
    """Times that grow faster than the context ask for a bias below 0, and get none; a server that
    measures itself must start nevertheless."""
    one = np.ones(2)
    cells = Cells(one, one, np.zeros(2), np.array([10.0, 1000.0]), np.array([0.001, 0.2]))
    model = fit(cells)
    assert model.bias == pytest.approx(0.01 * 0.001)
    assert model.seconds_per_context_token > 1e-4
