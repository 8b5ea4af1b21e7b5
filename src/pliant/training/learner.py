"""AdamW as small models learn with it: its rate rises to a peak and falls to nothing within a number of steps.

torch.optim's takes a second and a half of a processor to import torch's compiler, which nobody asked for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WARM_UP = 0.1
"""How long rates rise, as a share of the steps."""
_EPSILON = 1e-8


class Group(NamedTuple):
    """Weights that learn at one peak rate and decay alike."""

    weights: Sequence[Tensor]
    rate: float
    decay: float = 0.0


class _State(NamedTuple):
    """What is remembered of one weight."""

    mean: Tensor
    square: Tensor
    steps: Tensor


class Learner:
    """Takes `steps` steps with the weights of `groups`; what has no gradient stays as it is.

    Gradients are scaled down to a norm of `clip` if they are longer.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        steps: int,
        betas: tuple[float, float] = (0.9, 0.999),
        clip: float | None = None,
        warm_up: float = WARM_UP,
    ) -> None:
        self._groups = groups
        self._steps = steps
        self._betas = betas
        self._clip = clip
        self._warm_up = warm_up
        self._taken = 0
        self._states: dict[Tensor, _State] = {}

    @property
    def done(self) -> float:
        """The share of the steps that have been taken."""
        return self._taken / self._steps

    @torch.no_grad()
    def step(self) -> None:
        """Take a step along the gradients, and forget them."""
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_([weight for group in self._groups for weight in group.weights], self._clip)
        share = min(1.0, (self._taken + 1) / self._steps / self._warm_up) * (1 - self.done)
        for weights, rate, decay in self._groups:
            moved = [weight for weight in weights if weight.grad is not None]
            self._move(moved, share * rate, decay)
            for weight in moved:
                weight.grad = None
        self._taken += 1

    def _move(self, weights: Sequence[Tensor], rate: float, decay: float) -> None:
        if not weights:
            return
        for weight in weights:
            if weight not in self._states:
                count = torch.zeros((), device=weight.device)
                self._states[weight] = _State(torch.zeros_like(weight), torch.zeros_like(weight), count)
        means, squares, steps = (list(each) for each in zip(*map(self._states.__getitem__, weights), strict=True))
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            list(weights),
            [weight.grad for weight in weights if weight.grad is not None],
            means,
            squares,
            [],
            steps,
            lr=rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=decay,
            eps=_EPSILON,
            amsgrad=False,
            maximize=False,
        )
