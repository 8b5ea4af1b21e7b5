"""Turns an uncompiled sequence classifier into a package for one length, or for any up to a longest (Arlo §3.1).

Only the compiling process imports this module: TorchInductor alone takes 2 s and 85 MB.
"""

import json
from pathlib import Path

import torch
from torch._inductor import aoti_compile_and_package

from pliant.kernels.compiled_forward import unpack
from pliant.kernels.encoder.compiled_classifier import rows
from pliant.kernels.encoder.eager_classifier import EagerClassifier
from pliant.kernels.runtime_cache import SHORTEST_DYNAMIC, RuntimeSpec


def compile_into(folder: Path, model: EagerClassifier, spec: RuntimeSpec) -> None:
    """Write the package of `model` for what `spec` says, weights included, and runtime.json to `folder`.

    It takes `spec.batch` texts of exactly `spec.max_length` tokens or, if dynamic, SHORTEST_DYNAMIC to that many.

    Weights are frozen into the code, in the layout its matrix products want. Precompiled headers are left out: they
    cost 20 s and 300 MB once, and save 1 s a compile.
    """
    size = rows(model.facts["token_types"]), spec.batch, spec.max_length
    example = torch.ones(size, dtype=torch.int64)
    length = torch.export.Dim("length", min=SHORTEST_DYNAMIC, max=spec.max_length) if spec.dynamic else None
    with torch.no_grad():
        program = torch.export.export(model, (example,), dynamic_shapes=({2: length},), strict=False)
        archive = aoti_compile_and_package(
            program,
            package_path=str(folder / "model.pt2"),
            inductor_configs={"freezing": True, "aot_inductor.precompile_headers": False},
        )
    unpack(Path(archive))
    (folder / "runtime.json").write_text(json.dumps(model.facts))
