"""Our dashboards: one for the whole cluster, one for each kind, one for tenants."""

from __future__ import annotations

from pliant.dashboards.boards.cascade import CASCADES
from pliant.dashboards.boards.cluster import CLUSTER
from pliant.dashboards.boards.encoder import TEXTS
from pliant.dashboards.boards.llm import LANGUAGE_MODELS
from pliant.dashboards.boards.tenants import TENANTS
from pliant.dashboards.boards.vision import VISION

BOARDS = (CLUSTER, TEXTS, CASCADES, LANGUAGE_MODELS, VISION, TENANTS)
