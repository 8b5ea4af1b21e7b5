"""The dispatcher against a literal, slow Algorithm 1 (Arlo §3.4), driven by the same random operations.

Its last step is ours: where all are busy, the request goes where it costs least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pliant.policies.encoder.admission import DeadlineError
from pliant.policies.encoder.dispatch import Dispatcher, NoRuntimeError

LENGTHS = (16, 64, 65, 128, 512)
CAPACITIES = (1, 2, 3, 7, 20)
NAMES = tuple("abcdefgh")


@dataclass
class Instance:
    """A replica as the reference sees it; its service time is 1/capacity of an SLO of one second."""

    max_length: int
    capacity: int
    outstanding: int = 0
    routable: bool = True

    @property
    def congestion(self) -> tuple[float, int]:
        return self.outstanding / self.capacity, -self.capacity

    def patience(self, budget: Fraction, utility: Fraction) -> int | None:
        """How many requests may be before one with this budget; None when it is lost even on an idle replica."""
        service = Fraction(1, self.capacity)
        return math.floor(utility * (budget - service) / service) if budget >= service else None

    def admits(self, budget: Fraction, utility: Fraction) -> bool:
        patience = self.patience(budget, utility)
        return patience is not None and self.outstanding <= patience


def candidates(instances: dict[str, Instance], length: int, peek: int) -> list[list[str]]:
    """Algorithm 1, lines 2 to 5: the levels to look at, each as its replicas with the least congested first."""
    held = sorted({i.max_length for i in instances.values() if i.routable and i.max_length >= length})
    return [
        sorted(
            (name for name, i in instances.items() if i.routable and i.max_length == max_length),
            key=lambda name: instances[name].congestion,
        )
        for max_length in held[:peek]
    ]


def algorithm_1(instances: dict[str, Instance], queues: list[list[str]], threshold: float, decay: float) -> str:
    """Algorithm 1, lines 6 to 20: the replica to dispatch to."""
    for queue in queues:
        head = instances[queue[0]]
        if head.outstanding / head.capacity < threshold:
            return queue[0]
        threshold = threshold * decay
    heads = [queue[0] for queue in queues]
    return min(heads, key=lambda name: (instances[name].outstanding + 2) * (1 / instances[name].capacity))


class AgainstReference(RuleBasedStateMachine):
    """Any sequence of operations gives what the reference gives, up to ties between equal replicas."""

    threshold, decay, peek = 0.85, 0.9, 3

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher: Dispatcher[str] = Dispatcher(1.0, self.threshold, self.decay, self.peek)
        self.instances: dict[str, Instance] = {}

    @rule(name=st.sampled_from(NAMES), max_length=st.sampled_from(LENGTHS), capacity=st.sampled_from(CAPACITIES))
    def assign(self, name: str, max_length: int, capacity: int) -> None:
        self.dispatcher.assign(name, max_length, 1 / capacity)
        before = self.instances.get(name)
        self.instances[name] = Instance(max_length, capacity, before.outstanding if before else 0)

    @rule(name=st.sampled_from(NAMES))
    def suspend(self, name: str) -> None:
        self.dispatcher.suspend(name)
        if name in self.instances:
            self.instances[name].routable = False

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        self.dispatcher.remove(name)
        self.instances.pop(name, None)

    @rule(name=st.sampled_from(NAMES), times=st.integers(1, 12))
    def complete(self, name: str, times: int) -> None:
        for _ in range(times):
            self.dispatcher.complete(name)
        if name in self.instances:
            self.instances[name].outstanding = max(0, self.instances[name].outstanding - times)

    @rule(length=st.integers(0, 520), times=st.integers(1, 30))
    def dispatch(self, length: int, times: int) -> None:
        for _ in range(times):
            queues = candidates(self.instances, length, self.peek)
            if not queues:
                with pytest.raises(NoRuntimeError):
                    self.dispatcher.dispatch(length)
                return
            expected = algorithm_1(self.instances, queues, self.threshold, self.decay)
            self.same_up_to_ties(self.dispatcher.dispatch(length), expected)

    @precondition(lambda self: any(instance.routable for instance in self.instances.values()))
    @rule(
        length=st.integers(0, 64),
        budget=st.fractions(Fraction(-1, 10), 3, max_denominator=60),
        utility=st.sampled_from([Fraction(0), Fraction(1, 3), Fraction(1)]),
        times=st.integers(1, 30),
    )
    def dispatch_in_time(self, length: int, budget: Fraction, utility: Fraction, times: int) -> None:
        for _ in range(times):
            queues = candidates(self.instances, length, self.peek)
            if not queues:
                return
            first = algorithm_1(self.instances, queues, self.threshold, self.decay)
            order = [first] + [name for queue in queues for name in queue]
            expected = next((name for name in order if self.instances[name].admits(budget, utility)), None)
            if expected is None:
                with pytest.raises(DeadlineError) as refusal:
                    self.dispatcher.dispatch(length, float(budget), float(utility))
                assert refusal.value.retry_after_s == pytest.approx(self.soonest(order, budget, utility))
                return
            self.same_up_to_ties(self.dispatcher.dispatch(length, float(budget), float(utility)), expected)

    def soonest(self, names: list[str], budget: Fraction, utility: Fraction) -> float:
        waits = [math.inf]
        for instance in map(self.instances.__getitem__, names):
            patience = instance.patience(budget, utility)
            if patience is not None:
                waits.append((instance.outstanding - patience) / instance.capacity)
        return min(waits)

    def same_up_to_ties(self, chosen: str, expected: str) -> None:
        assert self.instances[chosen] == self.instances[expected]
        self.instances[chosen].outstanding += 1

    @invariant()
    def agrees(self) -> None:
        self.dispatcher.check_integrity()
        expected: dict[int, dict[str, int]] = {}
        for name, instance in self.instances.items():
            assert self.dispatcher.outstanding(name) == instance.outstanding >= 0
            if instance.routable:
                expected.setdefault(instance.max_length, {})[name] = instance.outstanding
        assert self.dispatcher.levels() == expected
        assert self.dispatcher.longest == max(expected, default=0)


class AgainstReferenceAtTheDefaults(AgainstReference):
    peek = 6


class AgainstReferenceOneLevelOnly(AgainstReference):
    threshold, decay, peek = 1.0, 1.0, 1


TestAgainstReference = AgainstReference.TestCase
TestAgainstReferenceAtTheDefaults = AgainstReferenceAtTheDefaults.TestCase
TestAgainstReferenceOneLevelOnly = AgainstReferenceOneLevelOnly.TestCase
TestAgainstReference.settings = settings(max_examples=60, stateful_step_count=40)
TestAgainstReferenceAtTheDefaults.settings = TestAgainstReference.settings
TestAgainstReferenceOneLevelOnly.settings = TestAgainstReference.settings
