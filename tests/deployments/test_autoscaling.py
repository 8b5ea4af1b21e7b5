"""Serve's side of autoscaling: counts are what the planner last said, and otherwise stay."""

from types import SimpleNamespace as Of
from typing import Any

from pliant.deployments.autoscaling import follow_planner


def context(target: int, metrics: dict[str, Any] | None = None) -> Any:
    return Of(target_num_replicas=target, raw_metrics=metrics)


class Id(str):
    @property
    def name(self) -> str:
        return str(self)


def test_the_latest_word_of_the_planner_counts() -> None:
    said = {
        "topics": {"old": [Of(timestamp=1, value=9)], "new": [Of(timestamp=2, value=4), Of(timestamp=3, value=5)]},
        "other": {"planner": []},
    }
    counts, state = follow_planner({Id("planner"): context(1, said), Id("topics"): context(2), Id("other"): context(7)})
    assert counts == {"planner": 1, "topics": 5, "other": 7}
    assert state == {}


def test_without_a_planner_nothing_changes() -> None:
    assert follow_planner({Id("topics"): context(2)})[0] == {"topics": 2}
    assert follow_planner({Id("planner"): context(1), Id("topics"): context(2)})[0] == {"planner": 1, "topics": 2}
