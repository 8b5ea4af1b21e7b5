"""The head of a vision task."""

from typing import NamedTuple

from torch import Tensor


class Head(NamedTuple):
    """What turns a backbone's features into logits."""

    weight: Tensor
    """[labels, hidden]"""
    bias: Tensor
    """[labels]"""
