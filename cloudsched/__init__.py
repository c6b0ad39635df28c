"""Learned scheduling for cloud clusters: which job runs where, and which servers sleep.

Importing the package makes `cloudsched/Cluster-v0` known to Gymnasium and loads nothing heavy.
"""

from cloudsched.envs.registration import register_environments

__version__ = "0.1.0"

register_environments()
