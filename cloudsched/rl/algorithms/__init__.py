"""Algorithms: sampling, learning and weight sync, wired."""
