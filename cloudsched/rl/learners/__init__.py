"""Learners that update the networks."""
