"""The one place where illegal actions lose their probability, and the masked categorical.

Illegal actions get the lowest finite number of the type, not -inf: their probability is exactly
zero either way, but `0 * log 0` stays zero instead of NaN, in values and in gradients. So the
functions below are the plain categorical ones, and also hold with a single legal action. A row
without any legal action has no meaning; the simulator never gives one (`wait` or a placement is
always legal).
"""

from __future__ import annotations

import torch
from torch import Tensor


def mask_logits(logits_BA: Tensor, mask_BA: Tensor) -> Tensor:
    """Return the logits with illegal actions (mask 0) at the lowest finite number."""
    return logits_BA.masked_fill(mask_BA == 0, torch.finfo(logits_BA.dtype).min)


def log_probs(logits_BA: Tensor) -> Tensor:
    """Return (B, A) log-probabilities of masked logits."""
    return torch.log_softmax(logits_BA, dim=-1)


def log_total(logits_BA: Tensor) -> Tensor:
    """Return (B, 1) the log of the sum of exponentials.

    As `logsumexp`, which is ten times slower where illegal actions have the lowest number: their
    exponentials leave the range of fast ones.
    """
    return logits_BA.amax(dim=-1, keepdim=True) - log_probs(logits_BA).amax(dim=-1, keepdim=True)


def log_prob(log_probs_BA: Tensor, action_B: Tensor) -> Tensor:
    """Return (B,) log-probabilities of the actions taken."""
    return log_probs_BA.gather(-1, action_B.unsqueeze(-1)).squeeze(-1)


def entropy(log_probs_BA: Tensor) -> Tensor:
    """Return (B,) entropies over the legal actions, in nats."""
    return -(log_probs_BA.exp() * log_probs_BA).sum(dim=-1)


def sample(logits_BA: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw (B,) actions: a Gumbel draw added to each logit makes the largest a fair sample."""
    noise_BA = torch.empty_like(logits_BA).exponential_(generator=generator)
    return (logits_BA - noise_BA.log_()).argmax(dim=-1)


def most_likely(logits_BA: Tensor) -> Tensor:
    """Return (B,) legal actions of highest probability."""
    return logits_BA.argmax(dim=-1)


def likeliest_kind(logits_BA: Tensor, num_servers: int, num_jobs: int) -> Tensor:
    """Keep only the actions of the likeliest kind: placements, toggles or waiting.

    A plain argmax waits too often, because the probability of placing is split over many pairs. The
    argmax of what this returns first chooses the kind, then the action.
    """
    num_pairs = num_servers * num_jobs
    sizes = [num_pairs, logits_BA.shape[-1] - 1 - num_pairs, 1]
    parts = torch.split(logits_BA, sizes, dim=-1)
    # No parts but that of the toggles can be empty.
    none_B1 = torch.full_like(logits_BA[..., :1], torch.finfo(logits_BA.dtype).min)
    weights_BG = torch.cat(
        [log_total(part) if part.shape[-1] else none_B1 for part in parts], dim=-1
    )
    kind_B1 = weights_BG.argmax(dim=-1, keepdim=True)
    kind_of_A = torch.repeat_interleave(torch.tensor(sizes, device=logits_BA.device))
    return mask_logits(logits_BA, kind_of_A == kind_B1)


def epsilon_greedy(q_BA: Tensor, num_servers: int, num_jobs: int, epsilon: float) -> Tensor:
    """Return masked logits of a policy that explores with probability epsilon.

    Exploring, it draws the kind of action first (placements, toggles or waiting), then the action,
    so that it does not mostly toggle because there are many servers.
    """
    num_pairs = num_servers * num_jobs
    is_legal_BA = q_BA > torch.finfo(q_BA.dtype).min
    chance_BA = is_legal_BA.to(q_BA.dtype)
    for start, end in ((0, num_pairs), (num_pairs, q_BA.shape[-1] - 1)):
        part = chance_BA[:, start:end]
        part /= part.sum(dim=-1, keepdim=True).clamp(min=1.0)
    chance_BA *= epsilon / chance_BA.sum(dim=-1, keepdim=True)
    chance_BA.scatter_add_(
        -1, q_BA.argmax(dim=-1, keepdim=True), torch.full_like(q_BA[:, :1], 1.0 - epsilon)
    )
    return mask_logits(chance_BA.log(), chance_BA > 0.0)
