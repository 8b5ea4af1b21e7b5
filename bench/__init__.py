"""Benchmarks: workloads, baselines and one comparison per published idea."""
