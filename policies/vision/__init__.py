"""Decisions for vision transformers that trade tokens for time (OTAS)."""
