"""The process of one rank above 0: it loads its share of a decoder, and then does what rank 0 does (see `crew`)."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import torch

from pliant.errors import PliantError
from pliant.kernels.decoder.crew import Setting
from pliant.kernels.decoder.executor import DTYPES, Executor, kernels_for
from pliant.kernels.decoder.kv_pages import KVPages
from pliant.kernels.decoder.model import Decoder
from pliant.kernels.decoder.ranks import RankError, Ranks
from pliant.kernels.decoder.sampling import Sampler
from pliant.kernels.decoder.weights import SavedWeights


def main() -> None:
    line = Connection(int(sys.argv[1]))
    try:
        serve(line)
    except (EOFError, OSError):
        return  # rank 0 has ended
    except RankError as error:
        sys.exit(f"a rank ends: {error}")


def serve(line: Connection) -> None:
    """Obey until rank 0 closes the line, which raises EOFError."""
    setting: Setting = line.recv()
    line.send(None)
    device = setting.device_of_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = Ranks(setting.meeting, setting.rank, setting.count, setting.limit_s, device)
    try:
        run = load(setting, ranks)
    except (PliantError, ValueError) as error:
        line.send(error)
        raise EOFError from None
    line.send(None)
    while True:
        method, arguments = line.recv()
        if method == "install":
            key, adapter_ranks, values, dtype = arguments
            blob = torch.empty(values, dtype=dtype)
            ranks.receive(blob)
            arguments = key, adapter_ranks, blob
        elif method == "compute":
            step, tokens = arguments
            arguments = step, torch.from_numpy(tokens).to(device)
        getattr(run, method)(*arguments)


@torch.inference_mode()
def load(setting: Setting, ranks: Ranks) -> Executor:
    """An executor of this rank's share. What it samples is nobody's."""
    device, dtype = setting.device_of_rank(), DTYPES[setting.dtype]
    weights = SavedWeights(setting.folder, dtype, device, setting.rank, setting.count, setting.quantize)
    kernels, _ = kernels_for(device, setting.threads, setting.quantize)
    arena = setting.arena_bytes
    slots, longest, stored = setting.slots, setting.max_length, weights.kv_dtype
    kv = KVPages(weights.shape, slots, longest, dtype, device, kernels, arena, arena, stored)
    sampler = Sampler(setting.slots, weights.whole.vocab, device, setting.max_length)
    return Executor(Decoder(weights, kernels, kv, ranks), sampler, setting.most_rank)


if __name__ == "__main__":
    main()
