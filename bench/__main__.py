"""python -m bench NAME: ours against what a user would pick instead, on this machine."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pliant.bench.gpu.compare import main as gpu
from pliant.errors import PliantError

if TYPE_CHECKING:
    from pliant.bench.report import Report

_BENCHES = {
    "start": "pliant.bench.start.compare",
    "router": "pliant.bench.router.compare",
    "edge": "pliant.bench.edge.compare",
    "threads": "pliant.bench.threads.compare",
    "fuzz": "pliant.bench.fuzz.compare",
    "encoder": "pliant.bench.encoder.compare",
    "llm": "pliant.bench.llm.compare",
    "adapters": "pliant.bench.adapters.compare",
    "pages": "pliant.bench.pages.compare",
    "route": "pliant.bench.route.compare",
    "cascade": "pliant.bench.cascade.compare",
    "llm-cascade": "pliant.bench.llm_cascade.compare",
    "vision": "pliant.bench.vision.compare",
    "tenants": "pliant.bench.tenants.compare",
    "chaos": "pliant.bench.chaos.compare",
    "overload": "pliant.bench.overload.compare",
    "soak": "pliant.bench.soak.compare",
    "cluster": "pliant.bench.budget.compare",
    "budget": "pliant.bench.budget.live",
}
"""NAME -> the module whose `run` takes Options and gives a Report."""


def main() -> None:
    """Run one benchmark, print its figures and write them to a folder; `gpu` has arguments of its own, and runs where
    little is installed."""
    if sys.argv[1:2] == ["gpu"]:
        sys.exit(gpu(sys.argv[2:]))
    from pliant.bench.load import LoadError
    from pliant.bench.report import Options, load_average, machine, write

    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=("gpu", *_BENCHES))
    parser.add_argument("--quick", action="store_true", help="end within minutes on two idle cores")
    parser.add_argument("--data", type=Path, help="a folder of public data sets; without it, the zoo's own texts")
    parser.add_argument(
        "--cells",
        nargs="+",
        metavar="CELL",
        help="of chaos only these faults, of cascade only these tasks, of vision only these parts",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--gpu",
        type=Path,
        metavar="FOLDER",
        help="adapters, encoder, pages and vision simulate the GPU that was measured, too",
    )
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="receives NAME.json and plots")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    facts = machine()
    options = Options(asked.quick, asked.data, asked.device, asked.out, asked.cells, asked.gpu)
    try:
        report: Report = importlib.import_module(_BENCHES[asked.name]).run(options)
    except (LoadError, PliantError) as error:
        sys.exit(str(error))
    write(asked.name, report, {**facts, "load_after": load_average()}, asked.out)


def _end(number: int, _frame: FrameType | None) -> None:
    """Stop what was started, too."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
