"""The executor's arena: pages that answers own or share, prefixes that stay behind them, and adapters (DESIGN §5).

Pages are taken from the front, and adapters lie behind them. Who has which is decided by `step_scheduler`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.chooser import joined, root_name
from pliant.deployments.llm.report import MemoryReport
from pliant.formats.adapter_info import AdapterRef
from pliant.policies.cluster.prefix_affinity import block, root_block
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.idle_memory import Costs, IdleMemory, Root
from pliant.policies.llm.pages import Pages
from pliant.policies.llm.prefixes import Prefix
from pliant.policies.llm.step_scheduler import StepScheduler

if TYPE_CHECKING:
    from pliant.deployments.llm.executor import Slots

_REPORTED = 256
"""Prefixes that a report names."""

PrefixRoot = Root[AdapterRef]
AnswerSteps = StepScheduler[Answer, AdapterRef]
AnswerMemory = IdleMemory[Answer, AdapterRef]


def arena(executor: Slots, cache: AdapterCache[AdapterRef], costs: Costs) -> AnswerMemory:
    """The pages of `executor`, beside the adapters of `cache`; `costs` say what it takes to bring things back."""
    pages: Pages[Answer, PrefixRoot] = Pages(executor.arena_bytes // executor.page_bytes, executor.page)
    return IdleMemory(pages, executor.page_bytes, executor.arena_bytes, cache, costs)


def report(steps: AnswerSteps) -> MemoryReport:
    """What pages hold."""
    memory, pages = steps.memory, steps.memory.pages
    return MemoryReport(
        page=pages.page_tokens,
        page_bytes=memory.page_bytes,
        pages=pages.count,
        live=pages.used,
        idle=pages.idle,
        hit=steps.hit,
        missed=steps.missed,
        evicted=memory.evicted,
    )


def digest(pages: Pages[Answer, PrefixRoot]) -> str:
    """Names of prefixes that are there, for gateways. For any thread."""
    return joined([_name(prefix) for prefix in pages.latest(_REPORTED)])


def _name(prefix: Prefix[PrefixRoot]) -> bytes:
    """As gateways name it."""
    unnamed = []
    at: Prefix[PrefixRoot] | None = prefix
    while at is not None and not at.name:
        unnamed.append(at)
        at = at.parent
    name = at.name if at else root_block(root_name(*prefix.root))
    for one in reversed(unnamed):
        name = one.name = block(name, one.tokens)
    return name
