"""Policies without learning."""
