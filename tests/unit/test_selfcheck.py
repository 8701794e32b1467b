"""A draft that never helps is told once, with what was resolved; a good one is not."""

from __future__ import annotations

import logging

from sglang_dspark.observe.selfcheck import ROUNDS, AcceptanceCheck


def run(caplog, accepted: list[list[int]]) -> list[str]:
    check = AcceptanceCheck("layers [0], head vanilla")
    with caplog.at_level(logging.WARNING):
        for batch in accepted:
            check.add(batch)
    return [record.getMessage() for record in caplog.records]


def test_a_useless_draft_is_told_once(caplog):
    messages = run(caplog, [[0, 0]] * ROUNDS * 3)
    assert len(messages) == 1
    assert "mean accept length 1.000" in messages[0] and "layers [0], head vanilla" in messages[0]


def test_no_verdict_before_enough_rounds(caplog):
    assert run(caplog, [[0]] * (ROUNDS - 1)) == []


def test_a_helpful_draft_is_not_told(caplog):
    assert run(caplog, [[0, 1, 0, 0]] * ROUNDS) == []
