"""What the constrained learner takes in: batches with their strained rows, next rows once each."""

import pytest
import torch

from cloudsched.config import ClusterConfig
from cloudsched.models.constrained import ConstrainedConfig, ConstrainedModel
from cloudsched.models.constrained_loss import ConstrainedLoss
from cloudsched.models.networks import ROW, NetworkConfig, ObservationSizes
from cloudsched.models.prepared import (
    FOLLOWING,
    NEXT,
    NEXT_NUMBER,
    OBSERVATION,
    ROWS,
    STRAINED_KIND,
    cut,
)

torch.set_num_threads(1)


def model_of(kind):
    torch.manual_seed(0)
    config = ConstrainedConfig(network=NetworkConfig(kind=kind, flat_width=16), precision="float32")
    model = ConstrainedModel(ObservationSizes.of(ClusterConfig()), config)
    for parameter in model.heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model, config


def test_a_batch_has_the_rows_it_would_have_had_on_its_own(columns):
    model, _ = model_of("set")
    order = torch.randperm(len(columns["action"]))
    prepared = model.prepare(columns)
    assert len(prepared[STRAINED_KIND]) > 100
    num_strained = 0
    for i, batch in enumerate(cut(prepared, order, 200)):
        rows = order[200 * i : 200 * i + 200]
        own = model.prepare({name: values[rows] for name, values in columns.items()})
        alone = next(cut(own, torch.arange(200), 200))
        does_count = batch[STRAINED_KIND] >= 0
        num_strained += int(does_count.sum())
        for name in OBSERVATION:
            assert len(batch[name]) == 200 + len(batch[STRAINED_KIND])
            assert len(batch[name]) % ROWS == len(batch[NEXT + name]) % ROWS == 0
            assert torch.equal(batch[name][:200], columns[name][rows])
            following = batch[NEXT + name][batch[FOLLOWING]]
            assert torch.equal(following, columns[NEXT + name][rows])
            # Strained rows come in another order.
            ours, theirs = batch[name][200:][does_count], alone[name][200:][: does_count.sum()]
            torch.testing.assert_close(ours.double().sum(0), theirs.double().sum(0))
    assert i == len(order) // 200 - 1
    assert num_strained > 0


def test_what_follows_several_rows_is_there_once(columns):
    model, _ = model_of("set")
    count = len(columns["action"])
    batch = next(cut(model.prepare(columns), torch.arange(count), count))
    assert int(batch[FOLLOWING].max()) + 1 == len(columns[NEXT_NUMBER].unique())
    assert len(batch[NEXT + "context"]) < len(columns[NEXT_NUMBER].unique()) + ROWS


@pytest.mark.parametrize("kind", ["set", "flat"])
def test_the_loss_does_not_depend_on_how_a_batch_was_prepared(columns, kind):
    model, config = model_of(kind)
    count, price = len(columns["action"]), torch.tensor(1.3)
    plain = {name: values for name, values in columns.items() if name != NEXT_NUMBER}
    expected = model(plain, price, config)
    expected.total.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad(set_to_none=True)
    found = model(next(cut(model.prepare(columns), torch.randperm(count), count)), price, config)
    found.total.backward()
    for name in ConstrainedLoss.__dataclass_fields__:
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-6
        )
    others = [p.grad for p in model.parameters() if p.requires_grad]
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient, rtol=1e-3, atol=1e-5)


def test_features_of_a_flat_network_are_condensed_to_what_changes(columns):
    model, _ = model_of("flat")
    observation = {name: columns[name] for name in OBSERVATION}
    condensed = model.heads.condensing()(observation)
    num_features = sum(columns[name][0].numel() for name in ("servers", "jobs", "context"))
    assert condensed[ROW].shape[1] == num_features - 5 * ClusterConfig().num_servers
    for found, expected in zip(model.heads(condensed), model.heads(observation), strict=True):
        torch.testing.assert_close(found, expected)
