"""The flat network's gradient by hand agrees with autograd's, as far as rounding lets it."""

import numpy as np
import pytest
import torch

from cloudsched.config import ClusterConfig
from cloudsched.models import flat_heads_gradient
from cloudsched.models.constrained import ConstrainedConfig, ConstrainedModel
from cloudsched.models.constrained_kernels import pack, unpack
from cloudsched.models.constrained_loss import ConstrainedLoss
from cloudsched.models.networks import ROW, NetworkConfig, ObservationSizes
from cloudsched.models.precision import take_products_in
from cloudsched.models.prepared import NEXT_ACTION, cut

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="without oneDNN autograd does it"
)
PRICE = torch.tensor(1.3)


def a_model(kind="flat"):
    torch.manual_seed(0)
    config = ConstrainedConfig(network=NetworkConfig(kind=kind, flat_width=64))
    model = ConstrainedModel(ObservationSizes.of(ClusterConfig()), config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.hear(torch.tensor([0.5, 0.8, 0.3, 0.9]), torch.tensor([0.7, 0.01, 0.04, 0.25]))
    return model, config


def results(model, config, columns, factor=1.0):
    count = len(columns["action"])
    batch = next(cut(model.prepare(columns), torch.arange(count), count))
    model.zero_grad(set_to_none=True)
    loss = model(batch, PRICE, config)
    (factor * loss.total).backward()
    return loss, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def by_hand_and_by_autograd(columns, monkeypatch):
    model, config = a_model()
    take_products_in(torch.bfloat16, model)
    assert flat_heads_gradient.is_for(model.heads)
    by_hand = results(model, config, columns)
    monkeypatch.setattr(flat_heads_gradient, "is_for", lambda _: False)
    return by_hand, results(model, config, columns)


def test_terms_and_gradients_are_those_of_autograd(columns, monkeypatch):
    (loss, gradients), (expected, others) = by_hand_and_by_autograd(columns, monkeypatch)
    for name in ConstrainedLoss.__dataclass_fields__:
        torch.testing.assert_close(
            getattr(loss, name).detach(),
            getattr(expected, name).detach(),
            rtol=2e-3,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert len(gradients) == 14
    for name, gradient in gradients.items():
        other = others[name]
        assert other.norm() > 1e-4, name
        assert (gradient - other).norm() < 0.01 * other.norm(), name


def test_it_errs_no_more_than_rounded_products_do(columns, monkeypatch):
    (_, gradients), (_, others) = by_hand_and_by_autograd(columns, monkeypatch)
    model, config = a_model()
    _, exact = results(model, config, columns)

    def error(found):
        return sum(float((found[name] - exact[name]).square().sum()) for name in exact) ** 0.5

    assert 0.0 < error(gradients) < 1.1 * error(others)


def test_the_actions_of_a_given_policy_are_followed(columns, monkeypatch):
    waiting = torch.full_like(columns["action"], ClusterConfig().num_actions - 1)
    given = {**columns, NEXT_ACTION: waiting}
    (loss, gradients), (expected, others) = by_hand_and_by_autograd(given, monkeypatch)
    torch.testing.assert_close(loss.estimated_cost, expected.estimated_cost, rtol=2e-3, atol=1e-6)
    name = "heads.value.weight"
    assert (gradients[name] - others[name]).norm() < 0.01 * others[name].norm()


def test_the_gradient_is_multiplied_by_what_the_loss_is_multiplied_by(columns):
    model, config = a_model()
    take_products_in(torch.bfloat16, model)
    _, once = results(model, config, columns)
    _, quarter = results(model, config, columns, factor=0.25)
    for name, gradient in once.items():
        torch.testing.assert_close(quarter[name], 0.25 * gradient)


def test_a_nan_is_not_hidden(columns):
    model, config = a_model()
    take_products_in(torch.bfloat16, model)
    with torch.no_grad():
        model.heads.out.bias[0] = torch.nan
    loss, gradients = results(model, config, columns)
    assert loss.total.isnan()
    assert gradients["heads.first.weight"].isnan().any()


def test_rows_may_come_from_where_nothing_was_rounded(columns):
    model, config = a_model()
    prepared, count = model.prepare(columns), len(columns["action"])
    batch = next(cut(prepared, torch.arange(count), count))
    assert batch[ROW].dtype == torch.float32
    take_products_in(torch.bfloat16, model)
    found = model(batch, PRICE, config)
    expected, _ = results(model, config, columns)
    assert torch.equal(found.total, expected.total)


def test_it_is_for_flat_networks_with_rounded_products_only():
    flat, _ = a_model()
    assert not flat_heads_gradient.is_for(flat.heads)
    for kind, is_for in (("flat", True), ("set", False)):
        model, _ = a_model(kind)
        take_products_in(torch.bfloat16, model)
        assert flat_heads_gradient.is_for(model.heads) == is_for


def test_bits_are_those_of_the_nearest_number():
    generator = np.random.default_rng(0)
    values = generator.standard_normal(5000).astype(np.float32) * np.float32(10.0) ** np.arange(
        -25, 25
    ).repeat(100)
    values = np.concatenate([values, [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38]]).astype(
        np.float32
    )
    halfway = (np.arange(1000, dtype=np.uint32) << 16 | 0x3F808000).view(np.float32)
    values = np.concatenate([values, halfway])
    bits, back = np.empty(len(values), np.uint16), np.empty(len(values), np.float32)
    pack(values, bits)
    unpack(bits, back)
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(back, expected)
