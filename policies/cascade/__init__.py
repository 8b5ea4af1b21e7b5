"""Decisions for cascades of text classifiers (Tabi)."""
