"""Learned scheduling for cloud clusters: which job runs where, and which servers sleep.

Importing the package registers `cloudsched/Cluster-v0` with Gymnasium and loads nothing heavy.
"""

from gymnasium.envs.registration import register, registry

__version__ = "0.1.0"

if "cloudsched/Cluster-v0" not in registry:
    register(
        id="cloudsched/Cluster-v0",
        entry_point="cloudsched.envs.cluster:ClusterEnv",
        vector_entry_point="cloudsched.envs.cluster:ClusterVectorEnv",
    )
