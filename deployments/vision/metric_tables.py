"""What replicas of vision services report, as metrics: the same on Ray's pages and on the gateway's."""

from __future__ import annotations

from pliant.deployments.serving.metric_table import Described, Table

REPLICA: Table = {
    "gamma": Described(False, "pliant_vision_gamma", "Tokens added to each layer, or merged, in the last batch."),
    "waiting": Described(False, "pliant_vision_images_waiting", "Images that wait for their batch to run."),
    "slowdown": Described(
        False, "pliant_vision_slowdown", "What batches take of late, as a multiple of what the profile says."
    ),
    "decision_p99_ms": Described(
        False, "pliant_vision_decision_p99_milliseconds", "99th percentile of choosing what runs next, of late."
    ),
    "utility": Described(True, "pliant_vision_utility", "Expected utility of the answers in time, summed up."),
}
GAMMAS: Table = {
    "batches": Described(True, "pliant_vision_batches", "Batches that were computed."),
    "images": Described(True, "pliant_vision_batch_images", "Images in these batches."),
    "compute_s": Described(True, "pliant_vision_compute_seconds", "What these batches took."),
}
FATES = ("in_time", "late", "evicted", "shed", "failed")
FATE = Described(True, "pliant_vision_images", f"Images by fate: {', '.join(FATES)}.")
