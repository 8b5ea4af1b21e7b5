"""The random numbers that tokens are drawn by. `triton_sampling` computes the same ones, bit by bit, on a GPU."""

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
ODD = 0x9E3779B9 - 2**32
MIX_3 = 0x7FEB352D
MIX_4 = 0x846CA68B - 2**32


def uniform(seed: Tensor, index: Tensor, tokens: Tensor) -> Tensor:
    """Random numbers within (0, 1), float32 of 23 bits: [n, m] for seed [n], index [n] and tokens [1 or n, m].

    All are int64. Splitmix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014) makes a key
    of seed and index, and two rounds of a 32-bit mixer (Wellons, "Prospecting for hash functions", 2018) hash the
    token with its halves: half as much work as 64 bits for what is done for every token of a vocabulary.
    """
    key = _mix_64(_mix_64(seed + GOLDEN) + (index + 1) * GOLDEN)[:, None]
    low, high = key.int(), (key >> 32).int()
    bits = _mix_32(_mix_32(tokens.int() * ODD + low) ^ high)
    return _unsigned_shift(bits, 9).float().add_(0.5).mul_(2.0**-23)


def _mix_64(bits: Tensor) -> Tensor:
    """Splitmix64's finaliser, on int64, which wraps as unsigned numbers do."""
    bits = (bits ^ _unsigned_shift(bits, 30)) * MIX_1
    bits = (bits ^ _unsigned_shift(bits, 27)) * MIX_2
    return bits ^ _unsigned_shift(bits, 31)


def _mix_32(bits: Tensor) -> Tensor:
    bits = (bits ^ _unsigned_shift(bits, 16)) * MIX_3
    bits = (bits ^ _unsigned_shift(bits, 15)) * MIX_4
    return bits ^ _unsigned_shift(bits, 16)


def _unsigned_shift(bits: Tensor, places: int) -> Tensor:
    width = 8 * bits.element_size()
    return (bits >> places) & ((1 << (width - places)) - 1)
