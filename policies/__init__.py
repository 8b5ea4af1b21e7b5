"""Decisions: pure Python and NumPy, no torch, ray, clock or I/O."""
