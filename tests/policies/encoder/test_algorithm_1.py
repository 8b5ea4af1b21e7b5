"""The dispatcher against a literal, slow reference, with Algorithm 1 (Arlo §3.4) and without, on random operations.

The reference keeps a list of what each replica has to do, and works out everything else anew for each request.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pliant.policies.encoder.admission import DeadlineError, retry_after
from pliant.policies.encoder.dispatch import Algorithm1, AllAvoidedError, Dispatcher, NoRuntimeError
from pliant.policies.encoder.service_curve import ServiceCurve

LENGTHS = (16, 64, 65, 128, 512)
CURVES = (
    *(ServiceCurve.constant(1 / capacity) for capacity in (1, 2, 3, 7, 20)),
    ServiceCurve(((16, 0.011, 0.011), (128, 0.05, 0.04), (512, 0.9, 0.4))),
    ServiceCurve(((16, 0.012, 0.03), (128, 0.052, 0.05), (512, 0.92, 0.5))),
)
NAMES = tuple("abcdefgh")
SLO_S = 1.0


def microseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e6))


@dataclass
class Instance:
    """A replica as the reference sees it."""

    name: str
    home: int
    max_length: int
    curve: ServiceCurve
    tick: int = 0
    """Of the first of the replicas that are as fast."""
    at_once: int = 0
    """Work up to which the head of the group gets a text of its own at once; of the first of the group's replicas."""
    routable: bool = True
    sent: list[int] = field(default_factory=list)
    others: int = 0
    away: bool = False
    since: int = 0
    """Rises with every change of its congestion."""

    @property
    def speed(self) -> int:
        return round(math.log(microseconds(self.curve.seconds(self.max_length))) / math.log(1.1))

    @property
    def work(self) -> int:
        return sum(self.sent) + self.others

    @property
    def congestion(self) -> int:
        return sum(self.sent) + self.others // 16 // self.tick * self.tick + self.away * 2 * self.tick

    @property
    def ring(self) -> int:
        return self.congestion // self.tick

    def wait_s(self, length: int, budget_s: float, slack_share: float) -> float:
        service_s = microseconds(self.curve.seconds(length)) / 1e6
        idle_s = microseconds(self.curve.idle_seconds(length)) / 1e6
        return retry_after(self.work / 1e6, service_s, idle_s, budget_s, slack_share)


class AgainstReference(RuleBasedStateMachine):
    """Any sequence of operations gives what the reference gives."""

    algorithm_1: Algorithm1 | None = Algorithm1(peek=3)

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher: Dispatcher[str] = Dispatcher(SLO_S, self.algorithm_1)
        self.instances: dict[str, Instance] = {}
        self.own: frozenset[str] | None = None
        self.changes = itertools.count(1)

    @rule(
        name=st.sampled_from(NAMES),
        place=st.tuples(st.sampled_from(LENGTHS), st.sampled_from(LENGTHS)).map(sorted),
        curve=st.sampled_from(CURVES),
    )
    def assign(self, name: str, place: list[int], curve: ServiceCurve) -> None:
        home, max_length = place
        self.dispatcher.assign(name, max_length, curve, home)
        before = self.instances.get(name)
        if before and before.routable and (before.home, before.max_length, before.curve) == (home, max_length, curve):
            return
        now = Instance(name, home, max_length, curve, away=self.own is not None and name not in self.own)
        if before:
            now.sent, now.others = before.sent, before.others
        self.instances.pop(name, None)
        group = self.held(home, max_length)
        alone = microseconds(curve.seconds(0)) if home == max_length else 0
        now.at_once = group[0].at_once if group else alone
        peers = [peer for peer in group if peer.speed == now.speed]
        now.tick = peers[0].tick if peers else microseconds(curve.seconds(0))
        now.since = next(self.changes)
        self.instances[name] = now

    @rule(name=st.sampled_from(NAMES))
    def suspend(self, name: str) -> None:
        self.dispatcher.suspend(name)
        if name in self.instances:
            self.instances[name].routable = False

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        self.dispatcher.remove(name)
        self.dispatcher.complete(name, 1)
        self.instances.pop(name, None)

    @rule(name=st.sampled_from(NAMES), others=st.sampled_from([0, 1, 3_000, 40_000, 900_000, 20_000_000]))
    def report(self, name: str, others: int) -> None:
        self.dispatcher.report(name, others / 1e6)
        instance = self.instances.get(name)
        if instance and instance.others != others:
            instance.others = others
            instance.since = next(self.changes)

    @rule(own=st.none() | st.frozensets(st.sampled_from(NAMES)))
    def prefer(self, own: frozenset[str] | None) -> None:
        self.dispatcher.prefer(own)
        self.own = own
        for instance in self.instances.values():
            away = own is not None and instance.name not in own
            if away != instance.away:
                instance.away = away
                instance.since = next(self.changes)

    @rule(name=st.sampled_from(NAMES), which=st.integers(0, 99), times=st.integers(1, 12))
    def complete(self, name: str, which: int, times: int) -> None:
        instance = self.instances.get(name)
        for _ in range(times):
            if instance and instance.sent:
                self.dispatcher.complete(name, instance.sent.pop(which % len(instance.sent)))
                instance.since = next(self.changes)

    @rule(
        length=st.integers(0, 520),
        budget_s=st.none() | st.integers(-100, 3000).map(lambda budget: budget / 1000),
        slack_share=st.sampled_from([0.0, 1 / 3, 1.0]),
        avoid=st.just(frozenset[str]()) | st.frozensets(st.sampled_from(NAMES)),
        times=st.integers(1, 30),
    )
    def dispatch(
        self, length: int, budget_s: float | None, slack_share: float, avoid: frozenset[str], times: int
    ) -> None:
        for _ in range(times):
            groups = self.groups(length)
            if not groups:
                with pytest.raises(NoRuntimeError):
                    self.dispatcher.dispatch(length, budget_s, slack_share, avoid)
                return
            allowed = [[instance for instance in group if instance.name not in avoid] for group in groups]
            if not any(allowed):
                with pytest.raises(AllAvoidedError):
                    self.dispatcher.dispatch(length, budget_s, slack_share, avoid)
                return
            expected: Instance | None = self.chosen(allowed, length)
            if budget_s is not None:
                order = [expected, *itertools.chain(*allowed)]
                waits = [instance.wait_s(length, budget_s, slack_share) for instance in order if instance]
                expected = next((each for each, wait_s in zip(order, waits, strict=True) if not wait_s), None)
            if expected is None:
                with pytest.raises(DeadlineError) as refusal:
                    self.dispatcher.dispatch(length, budget_s, slack_share, avoid)
                assert refusal.value.retry_after_s == pytest.approx(min(waits))
                fastest_s = min(instance.curve.idle_seconds(length) for instance in itertools.chain(*allowed))
                assert refusal.value.service_s == pytest.approx(fastest_s, abs=1e-6)
                return
            took = microseconds(expected.curve.seconds(length))
            predicted_s = (expected.work + took) / 1e6
            assert self.dispatcher.dispatch(length, budget_s, slack_share, avoid) == (
                expected.name,
                pytest.approx(predicted_s),
                took,
            )
            expected.sent.append(took)
            expected.since = next(self.changes)

    def held(self, home: int, max_length: int) -> list[Instance]:
        return [
            each
            for each in self.instances.values()
            if each.routable and (each.home, each.max_length) == (home, max_length)
        ]

    def groups(self, length: int) -> list[list[Instance]]:
        """The groups to look at, from the text's home up and then down, each with the least congested first."""
        places = {(each.home, each.max_length) for each in self.instances.values() if each.routable}
        up = sorted(place for place in places if place[0] >= length)
        down = sorted((place for place in places if place[0] < length <= place[1]), key=lambda at: (-at[0], at[1]))
        peek = self.algorithm_1.peek if self.algorithm_1 else None
        return [self.in_order(*place) for place in (up + down)[:peek]]

    def in_order(self, home: int, max_length: int) -> list[Instance]:
        """Those that are equally fast together, after the least congested of them."""
        instances = self.held(home, max_length)
        leads = {
            speed: min(each.ring * each.tick for each in instances if each.speed == speed)
            for speed in {each.speed for each in instances}
        }
        return sorted(instances, key=lambda each: (leads[each.speed], each.speed, each.ring, each.since))

    def chosen(self, groups: Collection[list[Instance]], length: int) -> Instance:
        """Algorithm 1, lines 6 to 20; without it the head that is predicted to answer soonest."""
        heads = [group[0] if group else None for group in groups]
        if self.algorithm_1:
            for rank, head in enumerate(heads):
                limit = SLO_S * self.algorithm_1.threshold * self.algorithm_1.decay**rank
                if head and head.congestion / 1e6 < limit - 1e-9:
                    return head
            return next(head for head in heads if head)
        if heads[0] and heads[0].congestion <= heads[0].at_once:
            return heads[0]
        finishes: list[tuple[int, int, Instance]] = []
        handicap = 0
        for head in filter(None, heads):
            finish = head.congestion + microseconds(head.curve.seconds(length)) + handicap * (head.congestion > 0)
            finishes.append((finish, len(finishes), head))
            if not head.congestion and min(finishes)[2] is head:
                break
            handicap += microseconds(head.curve.seconds(0))
        return min(finishes)[2]

    @invariant()
    def agrees(self) -> None:
        self.dispatcher.check_integrity()
        expected: dict[int, dict[str, float]] = {}
        for name, instance in self.instances.items():
            assert self.dispatcher.sent_s(name) == pytest.approx(sum(instance.sent) / 1e6)
            if instance.routable:
                expected.setdefault(instance.home, {})[name] = pytest.approx(instance.work / 1e6)
        assert self.dispatcher.groups() == expected
        routable = [instance.max_length for instance in self.instances.values() if instance.routable]
        assert self.dispatcher.longest == max(routable, default=0)


class AgainstReferenceAtTheDefaults(AgainstReference):
    algorithm_1 = None


class AgainstReferenceOneLevelOnly(AgainstReference):
    algorithm_1 = Algorithm1(1.0, 1.0, 1)


TestAgainstReference = AgainstReference.TestCase
TestAgainstReferenceAtTheDefaults = AgainstReferenceAtTheDefaults.TestCase
TestAgainstReferenceOneLevelOnly = AgainstReferenceOneLevelOnly.TestCase
TestAgainstReference.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstReferenceAtTheDefaults.settings = TestAgainstReference.settings
TestAgainstReferenceOneLevelOnly.settings = TestAgainstReference.settings
