"""What replicas of an encoder earn: texts within the SLO, by the lengths that arrive and the times observed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection
from statistics import median

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.messages import Report, home
from pliant.deployments.serving.messages import News
from pliant.deployments.serving.valuer import Value
from pliant.policies.encoder.service_curve import ServiceCurve
from pliant.policies.encoder.value_curve import value_curve

_REMEMBERED = 4096
"""Texts, by whose lengths those to come are judged."""


class TextValuer:
    """A `serving.valuer.Valuer`."""

    def __init__(self, config: EncoderConfig) -> None:
        self._slo_s = config.slo_ms / 1e3
        self._lengths: Counter[int] = Counter()

    def hear(self, news: News) -> None:
        self._lengths += news.arrived
        while self._lengths.total() > _REMEMBERED:
            self._lengths = Counter({length: count // 2 for length, count in self._lengths.items() if count > 1})

    def value(self, reports: Collection[Report], rate: float, spread: float, most: int) -> Value | None:
        measured = [report for report in reports if report["curve"]]
        if not measured or not self._lengths:
            return None
        service_s, counts = self._groups(measured)
        rates = {length: rate * count / counts.total() for length, count in counts.items()}
        in_time = value_curve(service_s, rates, self._slo_s, most, spread) / rate
        return Value(in_time, sum(each * service_s[length] for length, each in rates.items()))

    def _groups(self, reports: Collection[Report]) -> tuple[dict[int, float], Counter[int]]:
        """By the homes of replicas, what the texts take that are theirs, on average, and their number.

        A text is of the shortest home that it fits into, or of the longest. Replicas that all take every text are one
        group.
        """
        longest = max(self._lengths)
        alike = all(report["resident"] or report["max_length"] >= longest for report in reports)
        curves: defaultdict[int, list[ServiceCurve]] = defaultdict(list)
        for report in reports:
            at = longest if alike else home(report)
            curves[at].append(ServiceCurve(report["curve"], report["shares"]))
        homes = sorted(curves)
        work = dict.fromkeys(homes, 0.0)
        counts: Counter[int] = Counter()
        for length, count in self._lengths.items():
            at = homes[min(bisect_left(homes, length), len(homes) - 1)]
            counts[at] += count
            work[at] += count * median(curve.work_seconds(length) for curve in curves[at])
        alone = {at: median(curve.work_seconds(at) for curve in curves[at]) for at in homes if not counts[at]}
        return {at: work[at] / counts[at] for at in homes if counts[at]} | alone, counts
