"""Rotary positions (RoPE): the cosines and sines that turn each pair of a head's dimensions by its token's position.

The formulas are those of transformers, in the same order of float32 operations, so that tokens come out equal.
"""

import math

import torch
from torch import Tensor

from pliant.models.decoder_shape import Rope


def rotation(rope: Rope, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 to `length`, float32 [length, head_dim]; each row's halves are the same."""
    frequencies = _frequencies(rope, head_dim)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=1)
    scale = _attention_factor(rope)
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position for each pair of dimensions, [head_dim / 2]."""
    turns = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / turns
    match rope.kind:
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, turns, head_dim)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, and those between blended."""
    wavelength = 2 * math.pi / plain
    longest = rope.original_length / rope.low_frequency
    shortest = rope.original_length / rope.high_frequency
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    kept = (rope.original_length / wavelength - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
    blended = (1 - kept) * stretched / rope.factor + kept * stretched
    return torch.where((wavelength >= shortest) & (wavelength <= longest), blended, stretched)


def _yarn(rope: Rope, turns: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn often are kept, those that turn seldom stretched, with a ramp between."""

    def dimension(rotations: float) -> float:
        """Where along the head a pair makes so many rotations within the original length."""
        return head_dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.fast_turns), dimension(rope.slow_turns)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * turns) * (1 - kept) + 1.0 / turns * kept


def _attention_factor(rope: Rope) -> float:
    """What yarn multiplies cosines and sines with, to keep attention sharp over longer texts."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
