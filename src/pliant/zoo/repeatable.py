"""How the zoo trains: on one thread, and the same weights every time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """More threads would mostly wait for each other: the layers are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """One thread, and random numbers from `seed`; the caller's are left alone."""
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(seed)
        yield
