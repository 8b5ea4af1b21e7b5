"""ONNX Runtime behind litserve, as one would serve a classifier with it.

`python -m pliant.bench.encoder.litserve_server` batches what arrives together, and ends when its standard input does.
"""

import argparse
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import litserve
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

from pliant.models import sources


class _Classifier(litserve.LitAPI):
    """Texts to their most probable label; one thread a worker."""

    def __init__(self, folder: Path, onnx: Path, **options: Any) -> None:
        super().__init__(**options)
        self._folder = folder
        self._onnx = onnx

    def setup(self, device: str) -> None:
        self._tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        self._labels = sources.describe(self._folder).labels
        options = onnxruntime.SessionOptions()  # type: ignore[attr-defined]
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(self._onnx, options)  # type: ignore[attr-defined]

    def decode_request(self, request: dict[str, Any], **_: Any) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(request["inputs"]).ids
        return ids

    def predict(self, x: list[Sequence[int]], **_: Any) -> list[np.ndarray]:
        inputs = np.zeros((2, len(x), max(2, *map(len, x))), np.int64)
        for row, ids in enumerate(x):
            inputs[0, row, : len(ids)] = ids
            inputs[1, row, : len(ids)] = 1
        logits: np.ndarray = self._session.run(None, {"inputs": inputs})[0]
        return list(logits)

    def encode_response(self, output: np.ndarray, **_: Any) -> list[list[dict[str, Any]]]:
        shares = np.exp(output - output.max())
        best = int(output.argmax())
        return [[{"label": self._labels[best], "score": float(shares[best] / shares.sum())}]]


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--onnx", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--wait", type=float, required=True, help="seconds for a batch to fill")
    given = parser.parse_args()
    threading.Thread(target=_end_with_input, daemon=True).start()
    api = _Classifier(sources.fetch(given.model), given.onnx, max_batch_size=given.batch, batch_timeout=given.wait)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=given.workers)
    server.run(host="127.0.0.1", port=given.port, generate_client_file=False, log_level="error")


def _end_with_input() -> None:
    """Not by sys.stdin, whose lock the processes that litserve forks would wait for."""
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgid(0), signal.SIGTERM)


if __name__ == "__main__":
    main()
