"""What "/metrics" says of language models and adapters."""

from __future__ import annotations

from typing import Any

from support.scripted import report

from pliant.deployments.kinds import loaded
from pliant.deployments.llm.report import ClassReport
from pliant.deployments.serving.status import exposition


def lines(**facts: Any) -> list[str]:
    given: Any = report(here=30, there=40)
    given |= {"served": 9, "squashed": 2, "preempted": 4}
    given["memory"] |= {"live": 5, "idle": 2, "hit": 640, "missed": 70, "evicted": 3}
    given["classes"] = [
        ClassReport(cut_off=0.5, quota=100, waiting=3, admitted=8, waited_s=1.5),
        ClassReport(cut_off=1.0, quota=200, waiting=1, admitted=1, waited_s=9.0),
    ]
    given["adapters"] |= {
        "resident": ["sql", "law"],
        "bytes": 4096,
        "hits": 5,
        "host_hits": 3,
        "host_bytes": 96,
        "evictions": {"memory": 6},
    }
    chat = {"kind": "llm", "ready": True, "replica_range": [1, 1], "replicas": {"r": given}, **facts}
    return exposition({"planner_reached": True, "services": {"chat": chat}}, loaded()).decode().splitlines()


def test_replicas_queues_and_adapters_are_told() -> None:
    told = lines(adapters=12)
    for line in (
        'pliant_llm_live_tokens{replica="r",service="chat"} 70.0',
        'pliant_llm_answers_total{replica="r",service="chat"} 9.0',
        'pliant_requests_squashed_total{replica="r",service="chat"} 2.0',
        'pliant_llm_preemptions_total{replica="r",service="chat"} 4.0',
        'pliant_llm_prefix_tokens_total{replica="r",result="hit",service="chat"} 640.0',
        'pliant_llm_prefix_tokens_total{replica="r",result="miss",service="chat"} 70.0',
        'pliant_llm_pages{replica="r",service="chat",state="live"} 5.0',
        'pliant_llm_pages{replica="r",service="chat",state="idle"} 2.0',
        'pliant_llm_prefix_pages_evicted_total{replica="r",service="chat"} 3.0',
        'pliant_queue_requests_waiting{class="0",replica="r",service="chat"} 3.0',
        'pliant_queue_wait_seconds_total{class="1",replica="r",service="chat"} 9.0',
        'pliant_adapters_resident{replica="r",service="chat"} 2.0',
        'pliant_adapter_bytes_resident{replica="r",service="chat"} 4096.0',
        'pliant_adapter_cache_hits_total{replica="r",service="chat"} 5.0',
        'pliant_adapter_host_hits_total{replica="r",service="chat"} 3.0',
        'pliant_adapter_host_bytes{replica="r",service="chat"} 96.0',
        'pliant_adapter_cache_evictions_total{reason="memory",replica="r",service="chat"} 6.0',
        'pliant_adapters_registered{service="chat"} 12.0',
    ):
        assert line in told, line


def test_without_adapters() -> None:
    assert not [line for line in lines() if line.startswith("pliant_adapters_registered{")]
