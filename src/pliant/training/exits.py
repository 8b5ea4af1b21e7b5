"""Trains exits of an encoder, which stays as it is: a linear classifier behind each of some layers (DeeBERT)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

_STEPS = 100
_DECAY = 1e-3


def fit(states: NDArray[np.float32], truth: NDArray[np.int64], labels: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 weights [labels, hidden] and biases [labels] of one exit, by what it reads [n, hidden] and is to say [n].

    States are centred and scaled for training; weights are those for states as they come.
    """
    read = torch.from_numpy(states).double()
    middle, scale = read.mean(0), read.std(0).clamp_min(1e-6)
    read = (read - middle) / scale
    wanted = torch.from_numpy(truth)
    weight = torch.zeros(labels, read.shape[1], dtype=torch.double, requires_grad=True)
    bias = torch.zeros(labels, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        wrong = functional.cross_entropy(read @ weight.T + bias, wanted) + _DECAY * weight.square().sum()
        wrong.backward()  # type: ignore[no-untyped-call]
        return wrong

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    weights = (weight / scale).detach()
    biases = bias.detach() - weights @ middle
    return weights.float().numpy(), biases.float().numpy()
