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
        service_s, counts = self._resident(measured) if _resident(measured) else self._homes(measured)
        rates = {length: rate * count / counts.total() for length, count in counts.items()}
        in_time = value_curve(service_s, rates, self._slo_s, most, spread) / rate
        return Value(in_time, sum(each * service_s[length] for length, each in rates.items()))

    def _resident(self, reports: Collection[Report]) -> tuple[dict[int, float], Counter[int]]:
        """Every replica takes every text: one runtime, which takes what a text takes on average."""
        curves = [ServiceCurve(report["curve"], report["shares"]) for report in reports]
        work = sum(
            count * median(curve.work_seconds(length) for curve in curves) for length, count in self._lengths.items()
        )
        longest, total = max(self._lengths), self._lengths.total()
        return {longest: work / total}, Counter({longest: total})

    def _homes(self, reports: Collection[Report]) -> tuple[dict[int, float], Counter[int]]:
        """Every length that some replica holds is a runtime; a text is of the shortest that fits, or of the longest."""
        seconds: defaultdict[int, list[float]] = defaultdict(list)
        for report in reports:
            seconds[home(report)].append(ServiceCurve(report["curve"]).seconds(home(report)))
        lengths = sorted(seconds)
        counts: Counter[int] = Counter()
        for length, count in self._lengths.items():
            counts[lengths[min(bisect_left(lengths, length), len(lengths) - 1)]] += count
        return {length: median(each) for length, each in seconds.items()}, counts


def _resident(reports: Collection[Report]) -> bool:
    return all(report["resident"] for report in reports)
