"""A supervisor over a power-minded and an SLA-minded sub-agent, each a set policy trained by PPO.

The supervisor earns the reward; violations cost the power-minded half of their price in it and the
SLA-minded four times. `--policy FOLDER#power` and `FOLDER#sla` are the sub-agents alone.

Run: `cloudsched train rllib_configs/hierarchical.py --steps 400000`

Expect, measured before critics spoke in `symlog`: one training seed, the policy after 65,536
decisions, best on train seeds: on the 50 test seeds a return of -2,545 at 2,411 W and 0.60 % SLA
violations, exactly those of the SLA-minded alone, because the supervisor always chooses it. The
power-minded alone is poor: -6,743, 38 % violations. So the hierarchy equals its better half and
gains nothing from the other, and training on made it worse (20 % violations on train seeds after
229,376). The tuned `headroom@poisson` has -2,461.
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
        critic_first=100_000,  # or what was cloned is soon forgotten
        sla_weights={"power": 0.5, "sla": 4.0},
        teachers={"power": "power_aware+headroom@poisson", "sla": "power_aware+headroom"},
    )
    config.multi_agent(
        algorithm_config_overrides_per_module={
            "supervisor": HierarchicalConfig.overrides(lr=1e-3, entropy_coeff=0.001)
        }
    )
    config.debugging(seed=0)
    return config
