"""Benchmarks, run as `cloudsched bench ...`."""
