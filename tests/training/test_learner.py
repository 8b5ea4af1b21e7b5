"""The learner of small models, against torch's own optimizer and schedule."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from pliant.training.learner import WARM_UP, Group, Learner

STEPS, RATE, DECAY, BETAS = 20, 0.1, 0.3, (0.9, 0.95)


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).requires_grad_() for size in ((4, 3), (3,), (2, 2))]


def lose(matrix: Tensor, bias: Tensor, late: Tensor, step: int) -> None:
    """Give gradients, to `late` not before half of the steps."""
    loss = 10 * (matrix.square().sum() + (bias - step).square().sum())
    (loss + late.square().sum() if step >= STEPS // 2 else loss).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_it_takes_the_steps_of_torchs_adamw(clip: float | None) -> None:
    ours, theirs = weights(), weights()
    learner = Learner([Group(ours[:1], RATE, DECAY), Group(ours[1:], RATE)], STEPS, BETAS, clip)
    groups = [{"params": theirs[:1], "weight_decay": DECAY}, {"params": theirs[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=BETAS)
    for step in range(STEPS):
        assert learner.done == step / STEPS
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / STEPS / WARM_UP) * (1 - step / STEPS)
        for given in (ours, theirs):
            lose(*given, step)
        if clip:
            torch.nn.utils.clip_grad_norm_(theirs, clip)
        optimizer.step()
        optimizer.zero_grad()
        learner.step()
        assert all(weight.grad is None for weight in ours)
        for found, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, wanted)
    assert learner.done == 1.0


def test_it_does_not_import_torchs_compiler() -> None:
    code = (
        "import sys, torch; from pliant.training.learner import Group, Learner; w = torch.ones(2, requires_grad=True);"
        "w.sum().backward(); Learner([Group([w], 1.0)], 1, clip=1.0).step(); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
