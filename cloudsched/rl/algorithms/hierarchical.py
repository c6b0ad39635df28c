"""A supervisor that chooses between a power-minded and an SLA-minded sub-agent: three modules."""

from __future__ import annotations

from typing import Any

from gymnasium.spaces import Discrete
from ray.rllib.algorithms.algorithm_config import NotProvided
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from torch import nn

from cloudsched.errors import ConfigError
from cloudsched.models.hierarchy import (
    MODULES,
    POWER,
    SLA,
    SUB_AGENTS,
    SUPERVISOR,
    HierarchyNetwork,
)
from cloudsched.models.hierarchy_rollout import HierarchyCollector
from cloudsched.models.rollout import Columns as RolloutColumns
from cloudsched.rl.algorithms.ppo import ClusterPPO, ClusterPPOConfig
from cloudsched.rl.modules.cluster import ClusterModule
from cloudsched.rl.modules.supervisor import SupervisorModule
from cloudsched.rl.runner import BatchedEnvRunner


class HierarchyEnvRunner(BatchedEnvRunner):
    """Samples with all three modules and returns what each one learns from."""

    def _make_collector(self, **arguments: Any) -> HierarchyCollector:
        return HierarchyCollector(self.env, sla_weights=self.config.sla_weights, **arguments)

    def make_module(self) -> None:
        """Build the modules; their weights come from the learners before the first sample."""
        spec = self.config.get_multi_rl_module_spec(spaces=self.get_spaces(), inference_only=True)
        self.module = spec.build()
        self.module.foreach_module(lambda _, module: module.to(self._device))

    def get_spaces(self) -> dict[str, Any]:
        """Return the spaces of the environment and of each module, as RLlib names them."""
        spaces = dict(super().get_spaces())
        if self.env is not None:
            observation = self.env.single_observation_space
            spaces |= {name: (observation, self.env.single_action_space) for name in SUB_AGENTS}
            spaces[SUPERVISOR] = (observation, Discrete(len(SUB_AGENTS)))
        return spaces

    def _collect(self) -> dict[str, RolloutColumns]:
        assert isinstance(self._collector, HierarchyCollector)
        assert self.module is not None
        networks = {name: self._acting(self.module[name]) for name in MODULES}
        columns = self._collector.collect_all(networks)
        return {name: part for name, part in columns.items() if len(part.action)}


class HierarchicalConfig(ClusterPPOConfig):
    """Settings of `Hierarchical`: those of PPO, for all three modules.

    `algorithm_config_overrides_per_module` of RLlib's `multi_agent()` sets modules apart.
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class=algo_class or Hierarchical)
        self.sla_weights = {POWER: 0.5, SLA: 4.0}
        self.env_runners(env_runner_cls=HierarchyEnvRunner)
        self.multi_agent(policies=set(MODULES), policy_mapping_fn=_same_name)
        self.rl_module(
            rl_module_spec=MultiRLModuleSpec(
                rl_module_specs={
                    SUPERVISOR: RLModuleSpec(module_class=SupervisorModule),
                    **{name: RLModuleSpec(module_class=ClusterModule) for name in SUB_AGENTS},
                }
            )
        )

    def training(  # type: ignore[override]
        self,
        *,
        sla_weights: dict[str, float] = NotProvided,
        **kwargs: Any,
    ) -> HierarchicalConfig:
        """Set hyper-parameters.

        Args:
            sla_weights: what SLA violations cost the sub-agents, times their price in the reward.
            kwargs: PPO's, but `initial_weights`. With a `rule`, both sub-agents begin as it.
        """
        if kwargs.get("initial_weights", NotProvided) not in (None, NotProvided):
            raise ConfigError("initial_weights: a hierarchy starts from a `rule` instead.")
        super().training(**kwargs)
        names = " and ".join(map(repr, SUB_AGENTS))
        if sla_weights is not NotProvided:
            if set(sla_weights) != set(SUB_AGENTS):
                raise ConfigError(
                    f"sla_weights={sla_weights!r}: expected a number for each of {names}."
                )
            self.sla_weights = dict(sla_weights)
        return self


class Hierarchical(ClusterPPO):
    """Multi-agent PPO; the three modules learn from what they did themselves."""

    @classmethod
    def get_default_config(cls) -> HierarchicalConfig:
        """Return the settings."""
        return HierarchicalConfig()

    def policy_network(self) -> nn.Module:
        """Return the three networks as one."""
        return HierarchyNetwork({name: self.get_module(name).network for name in MODULES})


def _same_name(agent_id: str, *_: Any, **__: Any) -> str:
    """Map each agent to the module of its name."""
    return agent_id
