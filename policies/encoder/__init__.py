"""Decisions for text classifiers on runtimes of several lengths (Arlo)."""
