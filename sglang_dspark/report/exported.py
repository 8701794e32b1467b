"""The metrics of observe/metrics.py, read back from the text of a /metrics page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from sglang_dspark.errors import ConfigError
from sglang_dspark.observe.metrics import PREFIX
from sglang_dspark.report.distribution import Distribution, bucket_quantile
from sglang_dspark.report.refinement import Kind
from sglang_dspark.report.steps import AllTimes, Times
from sglang_dspark.report.tally import Totals

Sample = tuple[dict[str, str], float]  # labels, value


@dataclass(frozen=True)
class Histogram:
    """ends: of its buckets, ascending, the last infinite. counts: in each. total: of what was
    observed."""

    ends: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def times(self) -> Times:
        """Of seconds, some of which were observed."""
        median, p90 = (bucket_quantile(self.ends, self.counts, share) for share in (0.5, 0.9))
        assert median is not None and p90 is not None
        return Times(self.total / sum(self.counts), median, p90)


@dataclass(frozen=True)
class Exported:
    """samples: by name without our prefix, as many as there are label sets."""

    samples: dict[str, list[Sample]]

    def totals(self) -> Totals:
        budgets, forwards = self._histogram("verify_budget"), self._histogram("verify_tier")
        return Totals(
            rounds=self._sum("rounds_total"),
            plain=self._sum("rounds_total", drafted="false"),
            windows=self._by_tokens("verify_windows_total"),
            commits=self._by_tokens("accept_lengths_total"),
            ceilings=self._by_tokens("accept_ceilings_total"),
            budgets=Distribution.of_buckets(budgets.ends, budgets.counts, budgets.total),
            forwards=Distribution.of_buckets(forwards.ends, forwards.counts, forwards.total),
            computed=round(forwards.total),
            padding=self._sum("padding_tokens_total"),
        )

    def corrections(self) -> dict[Kind, float]:
        """Seconds for one that the table says, by tokens and whether drafted, as of the last
        round of each."""
        return {
            (int(labels["tier"]), labels["drafted"] == "true"): factor
            for labels, factor in self.samples.get("step_time_correction", ())
        }

    def step_times(self) -> AllTimes | None:
        """None: no round had both times."""
        predicted = self._histogram("predicted_step_seconds")
        measured = self._histogram("measured_step_seconds", predicted="true")
        if not sum(predicted.counts) or not sum(measured.counts):
            return None
        return AllTimes(sum(measured.counts), predicted.times(), measured.times())

    def _matching(
        self, name: str, labels: dict[str, str]
    ) -> Iterable[tuple[dict[str, str], float]]:
        wanted = labels.items()
        return (found for found in self.samples.get(name, ()) if wanted <= found[0].items())

    def _sum(self, name: str, **labels: str) -> int:
        return round(sum(value for _, value in self._matching(name, labels)))

    def _by_tokens(self, name: str) -> dict[int, int]:
        counts: Counter[int] = Counter()
        for labels, value in self._matching(name, {}):
            counts[int(labels["tokens"])] += round(value)
        return dict(counts)

    def _histogram(self, name: str, **labels: str) -> Histogram:
        """Prometheus' buckets hold all that is not above their end."""
        below: Counter[float] = Counter()
        for found, value in self._matching(f"{name}_bucket", labels):
            below[float(found["le"])] += round(value)
        ends = sorted(below)
        starts = [0, *(below[end] for end in ends[:-1])]
        total = sum(value for _, value in self._matching(f"{name}_sum", labels))
        counts = tuple(below[end] - start for end, start in zip(ends, starts, strict=True))
        return Histogram(tuple(ends), counts, total)


def parse_metrics(url: str, text: str | None) -> Exported | None:
    """None: there is no page, or nothing of ours on it. ConfigError: it is another kind of page."""
    samples: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text or ""):
            for sample in family.samples:
                if sample.name.startswith(PREFIX):
                    name = sample.name.removeprefix(PREFIX)
                    samples.setdefault(name, []).append((sample.labels, sample.value))
    except ValueError as error:
        raise ConfigError(f"{url}/metrics: is no page of Prometheus metrics ({error})") from None
    return Exported(samples) if samples else None
