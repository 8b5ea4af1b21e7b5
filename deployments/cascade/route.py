"""What the planner has chosen for a cascade, made ready to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pliant.deployments.cascade.choice import Choice
from pliant.deployments.cascade.reroutes import Reroutes
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.messages import ImportanceRequest
from pliant.policies.cascade.candidates import Candidate
from pliant.policies.cascade.label_agreement import columns


class Route:
    """The levels that may read a text, one after another, and how sure is sure enough.

    `latency_s` is the mean of each of the candidate's levels on whole texts; `labels` are those of the cascade.
    """

    def __init__(
        self,
        candidate: Candidate,
        latency_s: Sequence[float],
        levels: Mapping[str, Classifier],
        labels: Sequence[str],
        seed: int,
    ) -> None:
        self.levels = [levels[name] for name in candidate.levels]
        self.policy = candidate.cascade(seed)
        self.alphas = candidate.alphas
        self.latency_s = tuple(latency_s)
        self.columns = [list(columns(labels, level.labels)) for level in self.levels]

    def budget_s(self, index: int, left_s: float) -> float:
        """Of the `left_s` seconds that a text has left, those in which level `index` should answer.

        The levels after it get what they take on average, unless too little is left for itself: a text may well stop
        there. The more is left, the more there is.
        """
        after_s = sum(self.latency_s[index + 1 :])
        return max(left_s - after_s, min(left_s, 2 * self.latency_s[index]))

    def importance_request(self, text: str) -> ImportanceRequest | None:
        """The first level tells which tokens are important if the text will go on, and lose words."""
        if not any(self.alphas):
            return None
        return ImportanceRequest(self.policy.temperatures[0], self.policy.sure_from(text, 0))

    def most_characters(self, index: int) -> int:
        """Of a text that are read by a level after `index`."""
        return max(level.most_characters for level in self.levels[index + 1 :])


class Serving:
    """The route that texts take, and the single level that answers them while its first one cannot, if there is one."""

    def __init__(self, choice: Choice, levels: Mapping[str, Classifier], labels: Sequence[str], seed: int) -> None:
        self.choice = choice
        self.route = Route(choice.candidate, choice.latency_s, levels, labels, seed)
        self.fallback = None
        if choice.fallback:
            mean_s = choice.fallback.mean_latency_s
            self.fallback = Route(choice.fallback, (mean_s,), levels, labels, seed)
        self.reroutes = Reroutes(choice.candidate, choice.texts)

    @property
    def starts(self) -> list[Classifier]:
        """The levels that may read a text first."""
        return [route.levels[0] for route in (self.route, self.fallback) if route]

    @property
    def troubles(self) -> list[str]:
        """For people: which levels cannot take texts now."""
        names = dict.fromkeys([*self.route.levels, *self.starts])
        return [
            f"{level.name} is down" if level.down else f"{level.name} takes no long texts now"
            for level in names
            if level.down or not level.ready
        ]
