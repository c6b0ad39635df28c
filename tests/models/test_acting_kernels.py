"""Compiled passes of acting agree with torch, and with the drawing of other networks."""

from __future__ import annotations

import numpy as np
import torch

from cloudsched.models.acting_kernels import choose, keep
from cloudsched.models.masking import mask_logits
from cloudsched.models.surrogate import invert

NUM_STEPS, NUM_ENVS, NUM_ACTIONS, WIDTH = 3, 20, 9, 16


def test_what_is_seen_is_kept_at_its_step_alone_and_rows_have_the_features_asked_for() -> None:
    generator = np.random.default_rng(0)
    shapes = {"servers": (4, 5), "jobs": (3, 2), "context": (7,), "action_mask": (NUM_ACTIONS,)}
    live = [
        generator.random((NUM_ENVS, *shape)).astype(np.int8 if name == "action_mask" else "f4")
        for name, shape in shapes.items()
    ]
    tables = [np.full((NUM_STEPS, *array.shape), 7, array.dtype) for array in live]
    whole = np.concatenate([array.reshape(NUM_ENVS, -1) for array in live[:3]], axis=1)
    changing = np.array([0, 3, 19, 20, 25, 26, 32])
    rows = np.zeros((NUM_ENVS, len(changing)), np.float32)
    keep(1, *live, changing, *tables, rows)
    np.testing.assert_array_equal(rows, whole[:, changing])
    for array, table in zip(live, tables, strict=True):
        np.testing.assert_array_equal(table[1], array)
        assert (table[[0, 2]] == 7).all()


def test_choices_are_those_drawn_from_all_masked_scores() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(WIDTH, NUM_ACTIONS)
    hidden = torch.randn(NUM_ENVS, WIDTH)
    mask = (torch.rand(NUM_STEPS, NUM_ENVS, NUM_ACTIONS) < 0.4).to(torch.int8)
    mask[:, :, 4] = 1
    uniform = torch.rand(NUM_STEPS, NUM_ENVS, dtype=torch.float64)
    uniform[1, 0], uniform[1, 1] = 0.0, 1.0 - 2.0**-53
    logits = mask_logits(layer(hidden), mask[1]).detach().numpy()
    expected, chances = np.zeros(NUM_ENVS, np.int64), np.zeros(NUM_ENVS, np.float32)
    invert(logits, uniform[1].numpy(), expected, chances)
    action = np.full((NUM_STEPS, NUM_ENVS), -1)
    log_prob = np.zeros((NUM_STEPS, NUM_ENVS), np.float32)
    choose(
        1,
        hidden.numpy(),
        layer.weight.detach().numpy(),
        layer.bias.detach().numpy(),
        mask.numpy(),
        uniform.numpy(),
        np.zeros(NUM_ACTIONS),
        action,
        log_prob,
    )
    np.testing.assert_array_equal(action[1], expected)
    np.testing.assert_allclose(log_prob[1], chances, atol=1e-5)
    assert (action[[0, 2]] == -1).all()
    assert len(set(expected.tolist())) > 3, "different actions are drawn"
