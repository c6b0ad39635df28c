"""PPO with the set policy: place jobs, wake servers and put them to sleep.

Run: `cloudsched train rllib_configs/ppo.py --seed 0`

Expect: after 2 million decisions (five to eight minutes on a core that others used too), on the 50
test seeds, where the tuned `headroom@poisson` has 2,357 W, 0.02 % SLA violations and a return of
-2,461: seeds 0, 1 and 2 2,324, 2,319 and 2,315 W, 0.22, 0.57 and 0.30 %, -2,443, -2,455 and -2,434
(paired 18 [12, 24], 6 [0, 11] and 28 [23, 32] better). The policies keep more work waiting (98.3 %
of the work is done against 99.7 %), which an episode's end forgives: an earlier policy's lead of 26
shrank to 21 [-6, 48] of 12,535 over 5,000 ticks.

With `--workload diurnal`, seed 0: 2,390 W, 2.98 %, -2,676, against 2,434 W, 0.45 % and -2,568 of
`headroom@diurnal` (paired -107 [-193, -39]): behind.
"""

from __future__ import annotations

from cloudsched.rl.algorithms.ppo import ClusterPPOConfig


def build() -> ClusterPPOConfig:
    """Return the settings of the run."""
    config = ClusterPPOConfig()
    config.environment(env_config={"preset": "default", "workload": "poisson", "load": 0.5})
    config.rl_module(model_config={"network": {"kind": "set"}})
    config.training(
        # Violations come up to thirty ticks after what caused them: at 0.99 a tick they count for a
        # quarter less than the power saved by it, and the policy keeps too few servers awake.
        gamma=0.995,
        lr=[[0, 1e-3], [600_000, 1e-3], [2_000_000, 3e-5]],  # stretched to the steps of a run
        entropy_coeff=[[0, 0.003], [1_200_000, 0.0]],
    )
    config.debugging(seed=0)
    return config
