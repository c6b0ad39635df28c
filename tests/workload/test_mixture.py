"""The mixture: each episode is one of its sites, by its seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from cloudsched.errors import CloudschedError
from cloudsched.workload.base import Workload
from cloudsched.workload.mixture import MixtureWorkload

Make = Callable[..., Workload]


def test_an_episode_is_that_of_the_site_it_draws(make: Make) -> None:
    mixture = make("mixture")
    assert isinstance(mixture, MixtureWorkload)
    for seed in range(6):
        name, load = mixture.site(seed)
        alone = make(name, load=load).jobs(seed, 200)
        drawn = mixture.jobs(seed, 200)
        assert np.array_equal(drawn.arrival_tick, alone.arrival_tick)
        assert np.array_equal(drawn.demand, alone.demand)


def test_every_workload_and_every_load_is_drawn_about_as_often(make: Make) -> None:
    mixture = make("mixture")
    assert isinstance(mixture, MixtureWorkload)
    sites = [mixture.site(seed) for seed in range(2800)]
    for part in (0, 1):
        counts = Counter(site[part] for site in sites)
        mean = len(sites) / len(counts)
        assert max(abs(count - mean) for count in counts.values()) < 5 * np.sqrt(mean)
    assert {round(load, 6) for _, load in sites} == {0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8}


def test_a_mixture_of_one_keeps_its_workload(make: Make) -> None:
    mixture = make("mixture", workloads=("poisson",), load_spread=0.0, load_steps=1)
    alone = make("poisson")
    assert np.array_equal(mixture.jobs(3, 100).demand, alone.jobs(3, 100).demand)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workloads": ()}, "at least one"),
        ({"workloads": ("swf",)}, "without files"),
        ({"workloads": ("mixture",)}, "without files"),
        ({"workloads": ("nonsense",)}, "nonsense"),
        ({"load_spread": 1.0}, "load_spread"),
        ({"load_steps": 0}, "load_steps"),
    ],
)
def test_nonsense_is_refused(make: Make, options: dict[str, object], message: str) -> None:
    with pytest.raises(CloudschedError, match=message):
        make("mixture", **options)
