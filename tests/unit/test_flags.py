"""Our own flags: each writes the variable that the server's processes read."""

from __future__ import annotations

import argparse
import os

import pytest

from sglang_dspark import config, flags


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment that ends with the test."""
    copy = dict(os.environ)
    monkeypatch.setattr(os, "environ", copy)
    return copy


def parse(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return parser.parse_args(args)


@pytest.mark.parametrize(
    ("flag", "value", "variable"),
    [
        ("--speculative-verify-mode", "compact", "SGLANG_RAGGED_VERIFY_MODE"),
        ("--speculative-verify-fallback", "static", "SGLANG_SPEC_VERIFY_FALLBACK"),
        ("--speculative-verify-tiers", "8,64,256", "SGLANG_SPEC_VERIFY_TIERS"),
        ("--speculative-verify-budget", "0.5", "SGLANG_SPEC_VERIFY_BUDGET"),
        ("--speculative-verify-min-gain", "0.1", "SGLANG_SPEC_VERIFY_MIN_GAIN"),
        ("--speculative-confidence-fit", "on", "SGLANG_SPEC_VERIFY_CONFIDENCE_FIT"),
        ("--speculative-verify-records", "r.jsonl", "SGLANG_SPEC_VERIFY_RECORDS"),
    ],
)
def test_a_flag_writes_its_variable_and_wins_over_it(environ, flag, value, variable):
    environ[variable] = "other"
    parsed = parse(flag, value)
    assert environ[variable] == value
    assert getattr(parsed, flag.removeprefix("--").replace("-", "_")) == value


def test_a_flag_that_is_left_out_leaves_its_variable_alone(environ):
    before = {**environ, "SGLANG_SPEC_VERIFY_TIERS": "4"}
    environ.update(before)
    parse("--speculative-verify-budget", "random")
    assert environ == {**before, "SGLANG_SPEC_VERIFY_BUDGET": "random"}


def test_every_flag_has_a_variable_of_its_own():
    assert len({flag.variable for flag in flags.FLAGS}) == len(flags.FLAGS)
    assert all(flag.variable.startswith(flags.PREFIX) for flag in flags.FLAGS[1:])


@pytest.mark.parametrize("mode", list(config.VerifyMode))
def test_every_mode_can_be_asked_for(environ, mode):
    parse("--speculative-verify-mode", mode)
    assert config.verify_mode(environ) is mode
    assert set(flags.MODE.choices) == set(config.VerifyMode)


def test_a_typo_stops_the_parser(environ, capsys):
    with pytest.raises(SystemExit):
        parse("--speculative-verify-mode", "compcat")
    message = capsys.readouterr().err
    for word in ("--speculative-verify-mode", "'compcat'", "static", "compact", "cap-accept"):
        assert word in message
    assert flags.MODE.variable not in environ
