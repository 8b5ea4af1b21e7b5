"""Compiles a vision transformer's forward pass under one gamma; `packages` runs this in a process of its own.

Only that process imports this module: TorchInductor alone takes 2 s and 85 MB.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import aoti_compile_and_package

from pliant.background import work_in_background
from pliant.kernels.compiled_forward import unpack
from pliant.kernels.vision.model import ImageFeatures, load_model
from pliant.kernels.vision.packages import Forward, open_package
from pliant.kernels.vision.vit import TokenAdaptiveViT
from pliant.models.vision_info import VisionInfo

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""How far compiled features may always lie from exact ones, in units of the largest or 1, whichever is more. A package
that `verify` does not accept is never used."""
_BATCHES = (1, 2, 3, 16)
_SAMPLE = 8
"""Rows that are compared in batches of each size, at least."""


def compile_into(folder: Path, features: ImageFeatures, info: VisionInfo, most_rows: int) -> None:
    """Write the package of `features`, weights included, for 1 to `most_rows` rows to `folder`.

    A batch of 1 cannot be asked of torch.export beside others, which would compile for it alone. The code for 2 or more
    computes it nevertheless, which `verify` makes sure of.
    """
    rows = torch.export.Dim("rows", min=2, max=most_rows)
    inputs = _inputs(features, info, most_rows)
    with torch.no_grad():
        program = torch.export.export(features, inputs, dynamic_shapes=[{0: rows}] * len(inputs), strict=False)
        archive = aoti_compile_and_package(
            program,
            package_path=str(folder / "model.pt2"),
            inductor_configs={"freezing": True, "aot_inductor.precompile_headers": False},
        )
    unpack(Path(archive))


def verify(forward: Forward, features: ImageFeatures, exact: ImageFeatures, info: VisionInfo, most_rows: int) -> None:
    """Raise if compiled features are wrong, given the eager ones in the same dtype and `exact` ones in float32.

    Where tokens are merged, half of the rows may be far off: of two pairs that are equally alike up to rounding, each
    may choose another. In bfloat16 most eager ones are, too; compiled ones may lie twice as far from the exact.
    """
    dtype = str(features.dtype).removeprefix("torch.")
    for rows in sorted({min(rows, most_rows) for rows in (*_BATCHES, most_rows)}):
        batches = [_inputs(features, info, rows, seed) for seed in range(-(-_SAMPLE // rows))]
        expected = torch.cat([exact(*inputs) for inputs in batches])

        def distance(forward: Forward, batches: Any = batches, expected: Tensor = expected) -> float:
            found = torch.cat([forward(*inputs).float() for inputs in batches])
            far = (found - expected).abs().amax(1) / max(1.0, float(expected.abs().max()))
            return float(far.median() if features.gamma < 0 else far.max())

        eager = 0.0 if exact is features else distance(features)
        if not (compiled := distance(forward)) <= max(TOLERANCE[dtype], 2 * eager):
            raise ArithmeticError(
                f"compiled features differ by {compiled:.1e} from exact ones at {rows} rows, eager ones by {eager:.1e}"
            )


def _inputs(features: ImageFeatures, info: VisionInfo, rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Random images and, if gamma takes them, prompts."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (rows, info.height, info.width, info.channels), generator=generator, dtype=torch.uint8)
    if features.gamma <= 0:
        return (images,)
    prompts = torch.randn(rows, info.layers, features.gamma, info.hidden, generator=generator)
    return images, prompts.to(features.dtype)


def main() -> None:
    """Compile one package and check its features."""
    parser = argparse.ArgumentParser(prog="python -m pliant.kernels.vision.compiler", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="holds config.json and model.safetensors in timm's format")
    parser.add_argument("--gamma", type=int, required=True, help="tokens added to every layer, or below 0 merged")
    parser.add_argument("--dtype", required=True, help="float32 or bfloat16")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads of one forward pass")
    parser.add_argument("--most-rows", type=int, required=True, help="images of the largest batch")
    parser.add_argument("--into", type=Path, required=True, help="an existing folder, which receives the package")
    given = parser.parse_args()
    work_in_background()
    torch.set_num_threads(given.threads)
    info, model = load_model(given.folder, given.dtype, "cpu")
    features = exact = ImageFeatures(TokenAdaptiveViT(model), info, given.gamma)
    compile_into(given.into, features, info, given.most_rows)
    if given.dtype != "float32":
        exact = ImageFeatures(TokenAdaptiveViT(load_model(given.folder, "float32", "cpu")[1]), info, given.gamma)
    with torch.inference_mode():
        verify(open_package(given.into), features, exact, info, given.most_rows)


if __name__ == "__main__":
    main()
