"""The masked logits of `SetNetwork` and their gradient in one pass over the legal actions.

In a large fleet nearly every waiting job fits on nearly every server. Torch keeps a dozen arrays
with a row for each such pair, far more than a cache holds; here a pair is done with at once. The
kernels work on the CPU; elsewhere the network takes its own way (`SetNetwork.score`), and
`tests/models/test_scoring.py` holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cloudsched.models.pairs import NUM_PAIR_FEATURES
from cloudsched.models.set_kernels import BLOCK, action_gradients, score_actions


class Scene(NamedTuple):
    """What the scores depend on beside embeddings and weights."""

    servers: NDArray[np.float32]  # (B, N, F)
    jobs: NDArray[np.float32]  # (B, K, F)
    mask: NDArray[np.int8]  # (B, A)
    num_resources: int
    is_balanced: bool

    @classmethod
    def of(cls, observation: Mapping[str, Tensor], num_resources: int, is_balanced: bool) -> Scene:
        """Return an observation as the kernels take it."""
        return cls(
            _array(observation["servers"]),
            _array(observation["jobs"]),
            _array(observation["action_mask"]),
            num_resources,
            is_balanced,
        )


class ActionScores(torch.autograd.Function):
    """Masked logits (B, A) from what servers, jobs and the cluster bring to them."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        server_out_BNP: Tensor,
        pair_job_BKP: Tensor,
        kind_B4: Tensor,
        feature_weight_P8: Tensor,
        pair_weight_1P: Tensor,
        pair_bias_1: Tensor,
        seen: Scene,
    ) -> Tensor:
        """Return the logits; the features of pairs are kept if a gradient will be asked for."""
        is_kept = any(ctx.needs_input_grad)
        num_rows, num_servers, _ = seen.servers.shape
        shape = (num_rows, num_servers * seen.jobs.shape[1]) if is_kept else (1, 1)
        features = torch.empty(*shape, NUM_PAIR_FEATURES)
        logits_BA = torch.empty(seen.mask.shape)
        weight_8P = feature_weight_P8.detach().t().contiguous()
        score_actions(
            _array(server_out_BNP),
            _array(pair_job_BKP),
            _array(kind_B4),
            weight_8P.numpy(),
            _array(pair_weight_1P[0]),
            _array(pair_bias_1),
            seen.servers,
            seen.jobs,
            seen.mask,
            seen.num_resources,
            seen.is_balanced,
            is_kept,
            features.numpy(),
            logits_BA.numpy(),
        )
        ctx.save_for_backward(server_out_BNP, pair_job_BKP, weight_8P, pair_weight_1P)
        ctx.features, ctx.seen = features, seen
        return logits_BA

    @staticmethod
    def backward(ctx: Any, logits_gradient_BA: Tensor) -> Any:  # type: ignore[override]
        """Return the gradients of all but the observation."""
        server_out_BNP, pair_job_BKP, weight_8P, pair_weight_1P = ctx.saved_tensors
        seen: Scene = ctx.seen
        num_pairs = pair_weight_1P.shape[1]
        server_gradient = torch.empty(server_out_BNP.shape)
        job_gradient = torch.empty(pair_job_BKP.shape)
        kind_gradient = torch.empty(len(seen.mask), 4)
        weight_gradient_8P = torch.zeros(weight_8P.shape)
        pair_gradient_1P, bias_gradient_1 = torch.zeros(1, num_pairs), torch.zeros(1)
        action_gradients(
            _array(server_out_BNP),
            _array(pair_job_BKP),
            weight_8P.numpy(),
            _array(pair_weight_1P[0]),
            seen.servers,
            seen.mask,
            2 * seen.num_resources + 5,
            ctx.features.numpy(),
            _array(logits_gradient_BA),
            np.empty((2, BLOCK, num_pairs), np.float32),
            server_gradient.numpy(),
            job_gradient.numpy(),
            kind_gradient.numpy(),
            weight_gradient_8P.numpy(),
            pair_gradient_1P[0].numpy(),
            bias_gradient_1.numpy(),
        )
        return (
            server_gradient,
            job_gradient,
            kind_gradient,
            weight_gradient_8P.t(),
            pair_gradient_1P,
            bias_gradient_1,
            None,
        )


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().contiguous().numpy()
