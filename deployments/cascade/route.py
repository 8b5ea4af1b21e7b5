"""What the planner has chosen for a cascade, made ready to use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from pliant.config.cascade import level_at
from pliant.deployments.cascade.choice import Choice
from pliant.deployments.cascade.reroutes import Reroutes
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.messages import ImportanceRequest
from pliant.kernels.encoder.texts import Stop
from pliant.policies.cascade.candidates import Candidate
from pliant.policies.cascade.label_agreement import columns
from pliant.texts import Text


class Visit(NamedTuple):
    """Levels, one behind the other, for which one service reads a text in one go."""

    service: Classifier
    levels: range
    """Indices of the route's levels."""
    exits: tuple[int, ...]
    """Behind how many layers those are that are exits."""
    columns: list[int]
    """The service's labels in the order of the cascade's."""


class Route:
    """The levels that may read a text, one after another, and how sure is sure enough.

    `latency_s` is what each of the candidate's levels adds on average; `services` are those of the levels by name;
    `labels` are those of the cascade.
    """

    def __init__(
        self,
        candidate: Candidate,
        latency_s: Sequence[float],
        services: Mapping[str, Classifier],
        labels: Sequence[str],
        seed: int,
    ) -> None:
        self.levels = candidate.levels
        self.visits: list[Visit] = []
        ats = list(enumerate(map(level_at, candidate.levels)))
        for name, of_one in groupby(ats, key=lambda numbered: numbered[1].service):
            indices, places = zip(*of_one, strict=True)
            exits = tuple(at.exit for at in places if at.exit is not None)
            service = services[name]
            reads = range(indices[0], indices[-1] + 1)
            self.visits.append(Visit(service, reads, exits, list(columns(labels, service.labels))))
        self.policy = candidate.cascade(seed)
        self.alphas = candidate.alphas
        self._pruner = candidate.pruner
        self.latency_s = [sum(latency_s[index] for index in visit.levels) for visit in self.visits]
        """What each visit takes on average of a text that does not leave early."""

    def budget_s(self, index: int, left_s: float) -> float:
        """Of the `left_s` seconds that a text has left, those that visit `index` should take.

        Those after it get what they take on average, unless too little is left for itself: a text may well stop
        there. The more is left, the more there is.
        """
        after_s = sum(self.latency_s[index + 1 :])
        return max(left_s - after_s, min(left_s, 2 * self.latency_s[index]))

    def stops(self, text: Text, visit: Visit) -> tuple[Stop, ...]:
        """Where `text` may leave the model of a visit: where it is sure, or at the visit's last level in any case."""
        return tuple(
            Stop(after, self.policy.temperatures[level], self.policy.sure_from(text, level))
            if level < visit.levels[-1]
            else Stop(after, self.policy.temperatures[level], 0.0)
            for level, after in zip(visit.levels, visit.exits, strict=False)
        )

    def importance_request(self, text: Text, visit: Visit) -> ImportanceRequest | None:
        """The level by which texts are pruned tells which tokens are important, if the text will go on."""
        level = visit.levels[-1]
        if level != self._pruner:
            return None
        return ImportanceRequest(self.policy.temperatures[level], self.policy.sure_from(text, level))

    def most_characters(self, index: int) -> int:
        """Of a text that are read after visit `index`."""
        return max(visit.service.most_characters for visit in self.visits[index + 1 :])


class Gate:
    """Past it texts are read by the last level alone, and by the first one alone where that fails.

    `counted_by` has the tokenizer that the candidate's gate was measured with.
    """

    def __init__(self, tokens: int, share: float, counted_by: Classifier, route: Route, fallback: Route) -> None:
        self.route = route
        self.fallback = fallback
        self._tokens = tokens
        self._share = share
        self._counted_by = counted_by
        self._texts = 0

    async def lets_past(self, text: Text) -> bool:
        """Whether `text` is longer than it."""
        past = await self._counted_by.tokens(text) > self._tokens
        self._texts += past
        return past

    def facts(self) -> dict[str, float]:
        """For people: its length, the share of texts past it in the profile, and how many have been since."""
        return {"tokens": self._tokens, "profiled_share": self._share, "texts": self._texts}


def _alone(candidate: Candidate, level: int) -> Candidate:
    """One of its levels, to be routed by; what was measured is still that of all."""
    return replace(
        candidate,
        levels=(candidate.levels[level],),
        cutoffs=(),
        alphas=(),
        temperatures=(candidate.temperatures[level],),
        weights=((1.0,),),
        gate=None,
    )


class Serving:
    """The route that texts take, and the single level that answers them while its first one cannot, if there is one.

    `services` are those of the levels by name, that of the first level that was profiled first.
    """

    def __init__(self, choice: Choice, services: Mapping[str, Classifier], labels: Sequence[str], seed: int) -> None:
        self.choice = choice
        self.route = Route(choice.candidate, choice.latency_s, services, labels, seed)
        self.last = Route(_alone(choice.candidate, -1), self.route.latency_s[-1:], services, labels, seed)
        """The last level alone."""
        self.fallback = None
        if choice.fallback:
            mean_s = choice.fallback.mean_latency_s
            self.fallback = Route(choice.fallback, (mean_s,), services, labels, seed)
        self.reroutes = Reroutes(choice.candidate, choice.texts)
        self.gate = self._gate(choice, services, labels, seed)

    def _gate(
        self, choice: Choice, services: Mapping[str, Classifier], labels: Sequence[str], seed: int
    ) -> Gate | None:
        candidate = choice.candidate
        if candidate.gate is None:
            return None
        first = Route(_alone(candidate, 0), choice.latency_s[:1], services, labels, seed)
        return Gate(candidate.gate, candidate.gated_share, next(iter(services.values())), self.last, first)

    @property
    def starts(self) -> list[Classifier]:
        """The services that may read a text first."""
        return [route.visits[0].service for route in (self.route, self.fallback) if route]

    def troubles(self, asleep: Callable[[str], bool]) -> list[str]:
        """For people: which services of levels cannot take texts now, or would have to be woken for that."""
        services = dict.fromkeys([*(visit.service for visit in self.route.visits), *self.starts])
        return [
            f"{service.name} {_trouble(service, asleep(service.name))}"
            for service in services
            if service.down or not service.ready
        ]


def _trouble(service: Classifier, asleep: bool) -> str:
    if asleep:
        return "sleeps"
    return "is down" if service.down else "takes no long texts now"
