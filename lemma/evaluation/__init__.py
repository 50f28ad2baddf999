"""Evaluation: benchmarks, the runner, metrics with intervals, results on disk, and comparison of two evaluations."""
