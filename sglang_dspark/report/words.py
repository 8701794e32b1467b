"""What the figures of a report are called and how they are written, for every rendering."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dspark.report.distribution import Distribution
from sglang_dspark.report.summary import Missing, Report

NOTHING = "-"


@dataclass(frozen=True)
class Figure:
    """A number with its name; about: what it means, or why there is none."""

    name: str
    text: str
    about: str


def headlines(report: Report) -> tuple[Figure, ...]:
    """The five that matter."""
    width = report.run.gamma + 1
    steps = report.steps
    return (
        Figure(
            "accept length",
            f"{report.accept_length:.2f}",
            f"tokens committed a window, bonus included; 1 to {width}",
        ),
        Figure(
            "verify cost",
            f"{report.verify_cost:.2f}",
            "tokens verified for one committed; plain decoding: 1",
        ),
        Figure(
            "utilisation",
            percent(report.utilisation),
            _about(report.utilisation, "committed for what full windows would have committed"),
        ),
        Figure(
            "padding",
            percent(report.padding),
            _about(report.padding, "of the verify forwards' tokens, in no window"),
        ),
        Figure(
            "step time error",
            NOTHING if isinstance(steps, Missing) else percent(steps.error),
            _about(steps, "median of |predicted - measured| / measured"),
        ),
    )


def further(report: Report) -> tuple[Figure, ...]:
    """Others that are good to know."""
    calibration = report.calibration
    return (
        Figure(
            "rounds",
            f"{report.rounds:,}",
            f"of {report.requests / report.rounds:.1f} requests on average",
        ),
        Figure("tokens committed", f"{report.committed:,}", "prompts' first tokens not counted"),
        Figure("accept rate", percent(report.accept_rate), "accepted for a verified draft token"),
        Figure(
            "rounds without a draft",
            percent(report.plain),
            _about(report.plain, "plain decoding was expected to be faster"),
        ),
        _mean("budget", report.budgets, "draft tokens verified a round, on average"),
        _mean("verify forward", report.forwards, "tokens a round, padding included, on average"),
        _step_time(report),
        Figure(
            "calibration error (ECE)",
            NOTHING if isinstance(calibration, Missing) else percent(calibration.ece),
            _about(calibration, "of survivals by the draft alone, mean of positions"),
        ),
    )


def _mean(name: str, found: Distribution | Missing, about: str) -> Figure:
    text = NOTHING if isinstance(found, Missing) else f"{found.mean:.1f}"
    return Figure(name, text, _about(found, about))


def _step_time(report: Report) -> Figure:
    steps = report.steps
    if isinstance(steps, Missing):
        return Figure("step time, ms", NOTHING, steps.missing)
    measured, predicted = (milliseconds(t.median) for t in (steps.measured, steps.predicted))
    return Figure("step time, ms", measured, f"in the median; predicted: {predicted}")


def percent(value: float | Missing | None) -> str:
    if value is None or isinstance(value, Missing):
        return NOTHING
    return f"{100 * value:.1f} %"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def factor(value: float | None) -> str:
    """How many times as much."""
    return NOTHING if value is None else f"{value:.2f}"


def _about(figure: object, meaning: str) -> str:
    return figure.missing if isinstance(figure, Missing) else meaning
