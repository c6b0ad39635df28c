"""The flat network's gradient by hand agrees with autograd's, as far as rounding lets it."""

import numpy as np
import pytest
import torch

from cloudsched.config import ClusterConfig
from cloudsched.models.constrained import ConstrainedConfig, ConstrainedModel
from cloudsched.models.constrained_kernels import pack, unpack
from cloudsched.models.constrained_loss import ConstrainedLoss
from cloudsched.models.flat_heads_gradient import FlatHeadsGradient
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


def whole_batch(model, columns):
    count = len(columns["action"])
    return next(cut(model.prepare(columns), torch.arange(count), count))


def by_autograd(model, config, columns):
    model.zero_grad(set_to_none=True)
    loss = model(whole_batch(model, columns), PRICE, config)
    loss.total.backward()
    return loss, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def by_hand(model, config, columns):
    take_products_in(torch.bfloat16, model)
    model.zero_grad(set_to_none=True)
    loss = write(model, config, whole_batch(model, columns))
    return loss, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def write(model, config, batch):
    assert FlatHeadsGradient.suits(model.heads)
    gradient = FlatHeadsGradient(model.heads, model.target, model.luck)
    return gradient.write(batch, model.scales(PRICE, config))


def by_hand_and_by_autograd(columns):
    model, config = a_model()
    return by_hand(model, config, columns), by_autograd(model, config, columns)


def test_terms_and_gradients_are_those_of_autograd(columns):
    (loss, gradients), (expected, others) = by_hand_and_by_autograd(columns)
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


def test_it_errs_no_more_than_rounded_products_do(columns):
    (_, gradients), (_, others) = by_hand_and_by_autograd(columns)
    model, config = a_model()
    _, exact = by_autograd(model, config, columns)

    def error(found):
        return sum(float((found[name] - exact[name]).square().sum()) for name in exact) ** 0.5

    assert 0.0 < error(gradients) < 1.1 * error(others)


def test_the_actions_of_a_given_policy_are_followed(columns):
    waiting = torch.full_like(columns["action"], ClusterConfig().num_actions - 1)
    given = {**columns, NEXT_ACTION: waiting}
    (loss, gradients), (expected, others) = by_hand_and_by_autograd(given)
    torch.testing.assert_close(loss.estimated_cost, expected.estimated_cost, rtol=2e-3, atol=1e-6)
    name = "heads.value.weight"
    assert (gradients[name] - others[name]).norm() < 0.01 * others[name].norm()


def test_it_goes_on_with_the_weights_that_the_network_has_by_then(columns):
    model, config = a_model()
    take_products_in(torch.bfloat16, model)
    batch = whole_batch(model, columns)
    held = FlatHeadsGradient(model.heads, model.target, model.luck)
    held.write(batch, model.scales(PRICE, config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    found = held.write(batch, model.scales(PRICE, config))
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    expected, others = by_hand(model, config, columns)
    assert torch.equal(found.total, expected.total)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name


def test_what_was_in_the_gradient_before_does_not_count(columns):
    model, config = a_model()
    _, once = by_hand(model, config, columns)
    once = {name: gradient.clone() for name, gradient in once.items()}
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(torch.nan)
    write(model, config, whole_batch(model, columns))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter.grad, once[name]), name


def test_a_nan_is_not_hidden(columns):
    model, config = a_model()
    with torch.no_grad():
        model.heads.out.bias[0] = torch.nan
    loss, gradients = by_hand(model, config, columns)
    assert loss.total.isnan()
    assert gradients["heads.first.weight"].isnan().any()


def test_rows_may_come_from_where_nothing_was_rounded(columns):
    model, config = a_model()
    batch = whole_batch(model, columns)
    assert batch[ROW].dtype == torch.float32
    take_products_in(torch.bfloat16, model)
    found = write(model, config, batch)
    expected, _ = by_hand(model, config, columns)
    assert torch.equal(found.total, expected.total)


def test_it_is_for_flat_networks_with_rounded_products_only():
    flat, _ = a_model()
    assert not FlatHeadsGradient.suits(flat.heads)
    for kind, suits in (("flat", True), ("set", False)):
        model, _ = a_model(kind)
        take_products_in(torch.bfloat16, model)
        assert FlatHeadsGradient.suits(model.heads) == suits


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
