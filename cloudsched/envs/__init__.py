"""Gymnasium environments of the cluster."""
