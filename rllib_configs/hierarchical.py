"""A supervisor over a power-minded and an SLA-minded sub-agent, each a set policy trained by PPO.

The supervisor earns the reward; violations cost the power-minded half of their price in it and the
SLA-minded four times. `--policy FOLDER#power` and `FOLDER#sla` are the sub-agents alone.

Run: `cloudsched train rllib_configs/hierarchical.py --steps 800000`

Expect, of three training seeds in `python -m tune.benchmark --budget small` on the 50 test seeds of
poisson: returns of -2,557, -2,614 and -2,620 at 2,435, 2,476 and 2,411 W and 0.32, 0.53 and 2.24 %
SLA violations; the tuned `headroom@poisson` has -2,461. The first supervisor always chooses the
SLA-minded and equals it (the power-minded alone violates 51 %), the second always the power-minded,
and is 9 behind the SLA-minded: the hierarchy gains nothing from having two. Two of the three did
worse the longer they learned; the bundle holds the best. On google_v2_sampled the clones that it
starts from never wake a server, and it fails (31 to 53 % violations). Since then what is kept may
be a hierarchy that always chooses the same sub-agent, if that does best on train seeds; this was
not measured again.
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
