"""A vision service's profile as if it had been measured."""

from __future__ import annotations

from pliant.cli.vision_profile import VisionProfile

PROFILE = VisionProfile(
    name="digits",
    model="zoo/digits-vit",
    device="cpu, float32",
    gammas=(-5, 0, 2),
    batches=(1, 4, 8, 64),
    seconds=((0.001, 0.002, 0.004, 0.020), (0.0011, 0.003, 0.005, 0.030), (0.0012, 0.004, 0.006, 0.040)),
    memory_bytes=((10, 40, 80, 2_500_000), (10, 40, 80, 3_500_000), (10, 40, 80, 4_500_000)),
    accuracies={"digit": {-5: 0.8, 0: 0.9, 2: 0.95}, "parity": {-5: 0.7, 0: 0.71}},
    useless={2: 0},
)
