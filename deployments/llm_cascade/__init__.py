"""Cascades of language models: a small one answers what it is sure enough of."""
