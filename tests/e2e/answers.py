"""A cascade of the cluster's two language models, of which the first may answer all prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e import adapter_oracle

NAME = "answers"
SMALL, LARGE = "chat", adapter_oracle.NAME
PROMPTS = 150
"""As many as a loss of 5% takes."""


def service(folder: Path) -> dict[str, Any]:
    """The large model, a random one, has no right answer that the small one could spoil. The prompts go to `folder`."""
    data = folder / "prompts.jsonl"
    lines = [{"prompt": f"The {number} statement", "answer": "nobody says so"} for number in range(PROMPTS)]
    data.write_text("\n".join(map(json.dumps, lines)))
    return {"kind": "llm-cascade", "levels": [SMALL, LARGE], "data": str(data), "loss": 0.05, "answer_tokens": 4}
