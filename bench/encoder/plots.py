"""Plots of the encoder benchmark: Arlo's latency CDF (Fig. 6) and latency against length (Fig. 2)."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Plot

from pliant.bench.load import Block

Blocks = dict[str, dict[int, list[Block]]]
"""Service -> number of clients -> a block for each repetition."""

_BIN = 16
"""Tokens over which latencies are summed up by their median."""


def latency_cdf(blocks: Blocks) -> Plot:
    """The share of requests that each service answered within a time, one panel for each number of clients."""
    counts = sorted({clients for by_clients in blocks.values() for clients in by_clients})
    plot, panels = plt.subplots(1, len(counts), figsize=(5 * len(counts), 4), sharey=True)
    for axes, clients in zip(panels, counts, strict=True):
        for name, by_clients in blocks.items():
            milliseconds = np.sort(_milliseconds(by_clients[clients]))
            axes.plot(milliseconds, np.linspace(0, 1, len(milliseconds)), label=name)
        axes.set(title=f"{clients} client(s)", xlabel="latency (ms)")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    panels[0].set_ylabel("share of requests")
    panels[0].legend()
    return plot


def latency_against_length(blocks: Blocks, lengths: np.ndarray) -> Plot:
    """Each request of a single client, and the median of each 16 tokens; `lengths` are those of the requests."""
    plot, axes = plt.subplots(figsize=(6, 4))
    bins = lengths // _BIN
    for name, by_clients in blocks.items():
        milliseconds = _milliseconds(by_clients[1])
        dots = axes.scatter(lengths, milliseconds, s=4, alpha=0.2)
        filled = np.unique(bins)
        medians = [np.median(milliseconds[bins == index]) for index in filled]
        axes.plot((filled + 0.5) * _BIN, medians, color=dots.get_facecolor()[0], alpha=1, label=name)
    axes.set(xlabel="tokens", ylabel="latency (ms), 1 client")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend()
    return plot


def _milliseconds(blocks: list[Block]) -> np.ndarray:
    return np.concatenate([block.latencies for block in blocks]) * 1e3
