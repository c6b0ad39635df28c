"""Adapters to Ray RLlib: runner, modules, learners and algorithms."""
