"""The simulator: numpy and numba only."""
