"""Improves a policy by trying other decisions on the same arrivals, millions of times."""
