"""Flover repeated: one fused decode loop against what serves a language model otherwise (Flover §VI)."""
