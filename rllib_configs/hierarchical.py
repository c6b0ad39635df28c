"""A supervisor over a power-minded and an SLA-minded sub-agent, each a set policy trained by PPO.

The supervisor earns the reward; violations cost the power-minded half of their price in it and the
SLA-minded four times. `--policy FOLDER#power` and `FOLDER#sla` are the sub-agents alone.

Run: `cloudsched train rllib_configs/hierarchical.py --steps 800000`

Expect what the tuned rule has, or a little more: both sub-agents begin as it. Three training seeds
of `python -m tune.benchmark --budget small` (800,000 decisions, a minute each on one core), 50 test
seeds, paired with the rule: poisson +2 [-1, +6], google_v2_sampled -0 [-2, +2], diurnal +0 (nothing
did better on train seeds than the start, so that is what is kept). What is kept may also be a
hierarchy that always chooses the same sub-agent, if that does best on train seeds, so it is no
worse there than either; nor was one worse than its better sub-agent on the test seeds of poisson.
"""

from __future__ import annotations

from cloudsched.rl.algorithms.hierarchical import HierarchicalConfig


def build() -> HierarchicalConfig:
    """Return the settings of the run."""
    config = HierarchicalConfig()
    config.environment(env_config={"preset": "default", "workload": "poisson", "load": 0.5})
    config.rl_module(model_config={"network": {"kind": "set"}})
    config.training(
        gamma=0.995,
        lr=[[0, 3e-4], [150_000, 3e-4], [500_000, 1e-5]],  # stretched to the steps of a run
        entropy_coeff=0.0,
        critic_first=100_000,  # or a critic that knows nothing yet spoils the rule
        rule="tuned",
        sla_weights={"power": 0.5, "sla": 4.0},
    )
    config.multi_agent(
        algorithm_config_overrides_per_module={
            "supervisor": HierarchicalConfig.overrides(lr=1e-3, entropy_coeff=0.001)
        }
    )
    config.debugging(seed=0)
    return config
