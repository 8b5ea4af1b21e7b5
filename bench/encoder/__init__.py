"""Runtimes per length against padding and dynamic shapes, live and simulated: Arlo repeated."""
