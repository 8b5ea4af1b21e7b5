"""`python -m pliant.bench.threads.passes SECONDS`: passes of a small encoder on two threads; their mean seconds."""

from __future__ import annotations

import sys
import time

import torch

THREADS = 2
_LAYERS, _WIDTH, _HEADS, _TEXTS, _TOKENS = 4, 256, 4, 4, 64


@torch.inference_mode()
def main(seconds: float) -> None:
    """Say the mean of the passes that fit into so many seconds, of three at least.

    Not the median: it is now and then that both threads are given the same processor, and then for many passes.
    """
    torch.set_num_threads(THREADS)
    layers = [torch.nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, batch_first=True) for _ in range(_LAYERS)]
    encoder, hidden = torch.nn.Sequential(*layers).eval(), torch.randn(_TEXTS, _TOKENS, _WIDTH)
    encoder(hidden)
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        began = time.perf_counter()
        encoder(hidden)
        taken.append(time.perf_counter() - began)
    print(sum(taken) / len(taken))


if __name__ == "__main__":
    main(float(sys.argv[1]))
