"""Lets `transformers` and `timm` import where torchvision and torch were built for different machines."""

import functools
import importlib.util
import pathlib

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[object] = []  # declarations go when their library is collected


@functools.cache
def declare() -> None:
    """Make `import torchvision` work beside a torch that its C extension does not fit; otherwise do nothing.

    PyPI's torchvision is built for CUDA. Beside a CPU-only torch its C extension does not load, the operators it would
    have declared are missing, and `import torchvision`, which transformers does wherever torchvision is installed,
    fails with "operator torchvision::nms does not exist". Declaring the two operators that the import registers fake
    kernels for is enough: they stay uncallable, and nothing here calls them.

    Call it before importing transformers or timm. Only torch is imported, and only where torchvision is installed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    import torch

    extensions = pathlib.Path(spec.origin).parent.glob("_C.*")
    try:
        torch.ops.load_library(next(extensions))  # type: ignore[no-untyped-call]
    except (StopIteration, OSError):
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            library.define(operator + _SCHEMA)  # type: ignore[no-untyped-call]
        _kept.append(library)
