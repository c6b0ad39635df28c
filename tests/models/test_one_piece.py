"""Weights in one piece learn as they would have apart."""

import copy

import torch
from torch import nn

from cloudsched.models.one_piece import Weights


def test_a_step_on_one_piece_is_a_step_on_all_its_parts():
    torch.manual_seed(0)
    alone, online = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    slow = copy.deepcopy(online).requires_grad_(False)
    apart = copy.deepcopy((alone, online, slow))
    fast = list(online[2].parameters())
    weights = Weights.of(
        list(alone.parameters()),
        [*online[0].parameters(), *fast],
        list(slow.parameters()),
        num_fast=len(fast),
    )
    ordinary, quick = weights.groups()
    ours = torch.optim.Adam([{"params": [ordinary]}, {"params": [quick], "lr": 0.3}], lr=0.1)
    theirs = torch.optim.Adam(
        [
            {"params": [*apart[0].parameters(), *apart[1][0].parameters()]},
            {"params": list(apart[1][2].parameters()), "lr": 0.3},
        ],
        lr=0.1,
    )
    for _ in range(5):
        inputs = torch.randn(8, 3)
        weights.gradient.zero_()
        (alone(inputs) - online(inputs)).square().sum().backward()
        weights.clip_gradient(0.5)
        ours.step()
        weights.update_slow(0.2)
        theirs.zero_grad()
        (apart[0](inputs) - apart[1](inputs)).square().sum().backward()
        both = [*apart[0].parameters(), *apart[1].parameters()]
        assert nn.utils.clip_grad_norm_(both, 0.5) > 0.5
        theirs.step()
        for slowly, other in zip(apart[2].parameters(), apart[1].parameters(), strict=True):
            slowly.data.lerp_(other.data, 0.2)
    for one, other in zip((alone, online, slow), apart, strict=True):
        for part, expected in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(part, expected)


def test_loading_a_state_fills_the_one_piece():
    layer, slow = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    weights = Weights.of([], list(layer.parameters()), list(slow.parameters()), num_fast=0)
    layer.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert (weights.whole == 1.0).all()
