"""What replicas of other versions report is shown as far as it is understood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pliant.deployments.encoder.metrics import encoder_metrics
from pliant.deployments.llm.metrics import llm_metrics
from pliant.deployments.vision.metrics import vision_metrics


@pytest.mark.parametrize("metrics", [encoder_metrics, llm_metrics, vision_metrics])
def test_a_report_with_other_keys(metrics: Callable[[Any], Any]) -> None:
    reports = {"old": {}, "new": {"version": 7, "unheard_of": {"deep": 1}}}
    shown = list(metrics({"service": {"plan": {}, "replicas": reports, "tasks": [], "adapters": 0}}))
    assert shown
