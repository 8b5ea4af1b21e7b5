"""Text classifiers on runtimes compiled per input length (Arlo)."""
