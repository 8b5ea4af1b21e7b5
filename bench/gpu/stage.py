"""python -m pliant.bench.gpu.stage NAME --out DIR [--dry]: one stage, in this process; `compare` starts it and limits
its time."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from pliant.bench.gpu import bare
from pliant.bench.gpu.record import Record


def main() -> None:
    """Run the stage, which notes what fails in it; another status than 0 says that it could not begin."""
    parser = argparse.ArgumentParser(prog="python -m pliant.bench.gpu.stage", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    if given.dry:
        bare.hide()
    import torch

    from pliant.bench.gpu.scale import Scale

    if not (given.dry or torch.cuda.is_available()):
        sys.exit("torch finds no GPU that CUDA can use; --dry tries the stages on a CPU")
    scale = Scale(torch.device("cpu" if given.dry else "cuda"), given.dry)
    torch.manual_seed(0)
    record = Record(given.out / f"{given.name}.json", given.name, " ".join(sys.argv), scale.facts())
    with record.part("stage"):
        importlib.import_module(f"pliant.bench.gpu.{given.name}").run(record, scale)


if __name__ == "__main__":
    main()
