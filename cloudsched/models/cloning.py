"""Behaviour cloning: a network learns to decide as another policy does, and what that is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cloudsched.config import Settings
from cloudsched.envs.scenario import Scenario
from cloudsched.models.masking import log_prob, log_probs, mask_logits, most_likely
from cloudsched.models.rollout import RolloutCollector, training_env
from cloudsched.policy import Policy


@dataclass(frozen=True, kw_only=True)
class CloningConfig(Settings):
    """How to clone."""

    num_rounds: int = 30
    """Rollouts, each followed by `num_epochs` passes over it."""
    num_steps: int = 128
    """Decisions of each cluster in a rollout."""
    num_epochs: int = 4
    """Passes over a rollout."""
    minibatch_size: int = 1024
    """Decisions of one gradient step."""
    learning_rate: float = 1e-3
    """Adam's learning rate."""
    value_weight: float = 0.5
    """Weight of the critic's loss."""
    student_share: float = 0.5
    """Share of clusters in which the student acts and the teacher only tells what it would do; the
    student so learns to come back from where its own mistakes lead (DAgger)."""
    gamma: float = 0.99
    """Discount of a tick, for the critic."""

    def __post_init__(self) -> None:
        for name in ("num_rounds", "num_steps", "num_epochs", "minibatch_size"):
            self._integer(name, low=1)
        for name in ("student_share", "gamma"):
            self._number(name, low=0.0, high=1.0)
        for name in ("learning_rate", "value_weight"):
            self._number(name, low=0.0)


@dataclass(frozen=True, kw_only=True)
class CloningRound:
    """Where cloning stands after a round; means over its minibatches."""

    policy: float
    """Cross-entropy with the teacher, in nats."""
    value: float
    agreement: float
    """Share of decisions whose likeliest action is the teacher's."""


def clone(
    network: nn.Module,
    teacher: Policy,
    scenario: Scenario,
    seeds: Sequence[int],
    config: CloningConfig,
    report: Callable[[CloningRound], None],
) -> None:
    """Train a network on a teacher's decisions.

    Args:
        network: from observations to masked logits and values; changed in place.
        teacher: decides from the observation alone.
        seeds: arrivals of the first episodes, one cluster for each; train seeds only.
    """
    env = training_env(len(seeds), **scenario.to_dict())
    collector = RolloutCollector(env, num_steps=config.num_steps, gamma=config.gamma, lambda_=0.97)
    collector.reset(list(seeds))
    teacher.reset(env.num_envs)
    lesson = _Lesson(network, teacher, round(config.student_share * env.num_envs))
    optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate, eps=1e-5)
    for _ in range(config.num_rounds):
        lesson.answers.clear()
        columns = collector.collect(lesson)
        answer_B = torch.stack(lesson.answers[: config.num_steps]).flatten()
        terms = []
        for _ in range(config.num_epochs):
            for rows in torch.split(torch.randperm(len(answer_B)), config.minibatch_size):
                logits_BA, value_B = network({k: v[rows] for k, v in columns.observation.items()})
                policy = -log_prob(log_probs(logits_BA), answer_B[rows]).mean()
                value = 0.5 * (value_B - columns.value_target[rows]).square().mean()
                optimizer.zero_grad()
                (policy + config.value_weight * value).backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
                optimizer.step()
                agreement = (most_likely(logits_BA) == answer_B[rows]).float().mean()
                terms.append(torch.stack([policy.detach(), value.detach(), agreement]))
        mean_policy, mean_value, mean_agreement = torch.stack(terms).mean(dim=0).tolist()
        report(CloningRound(policy=mean_policy, value=mean_value, agreement=mean_agreement))


class _Lesson:
    """A network for the collector that acts as student or teacher, and keeps what the teacher said.

    The student acts in the first `num_students` clusters; elsewhere the teacher's action is the
    only legal one.
    """

    def __init__(self, network: nn.Module, teacher: Policy, num_students: int) -> None:
        self._network = network
        self._teacher = teacher
        self._num_students = num_students
        self.answers: list[Tensor] = []

    def __call__(self, observation: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits_EA, value_E = self._network(observation)
        arrays = {name: table.numpy() for name, table in observation.items()}
        answer_E = torch.from_numpy(self._teacher.act(arrays).copy())
        self.answers.append(answer_E)
        is_allowed_EA = torch.zeros_like(logits_EA).scatter_(1, answer_E.unsqueeze(1), 1.0)
        is_allowed_EA[: self._num_students] = 1.0
        return mask_logits(logits_EA, is_allowed_EA), value_E
