"""A third mechanism by the recipe alone: trained with, its epsilon against an independent composition, its noise
against scipy's distribution."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import integrate, stats

from lightning_lap2 import Lap2Privacy
from lightning_lap2.accounting import Family, MajorizedAccountant, calibrate_noise_multiplier, register_mechanism
from lightning_lap2.accounting.release import Release
from lightning_lap2.accounting.routes.moments import real_table
from lightning_lap2.mechanism import Mechanism
from lightning_lap2.noise import check_noise, make_noise_source
from lightning_lap2.report import PrivacyReport
from tests.extending.recipes import follow
from tests.helpers import LIGHTNING_WARNINGS, classifier, loader, quiet_trainer

pytestmark = LIGHTNING_WARNINGS
DELTA = 1e-5


@pytest.fixture
def family() -> Family:
    found: Family = follow("A mechanism")["logistic"]
    return found


def randomised_response(x: float, q: float, steps: int) -> float:
    """Epsilon of ``steps`` sampled randomised responses with parameter x, by dp-accounting's grid of losses."""
    log = {True: -math.log1p(math.exp(-x)), False: -math.log1p(math.exp(x))}
    without = {0: log[True], 1: log[False]}
    mixed = {
        k: float(np.logaddexp(math.log1p(-q) + without[k], math.log(q) + without[1 - k])) if q < 1 else without[1 - k]
        for k in without
    }
    one = pld.from_two_probability_mass_functions(without, mixed, value_discretization_interval=1e-5, symmetric=False)
    found: float = one.self_compose(steps).get_epsilon_for_delta(DELTA)
    return found


@pytest.mark.parametrize(("m", "q", "steps"), [(2.0, 1.0, 4), (1.0, 0.1, 50), (4.0, 0.02, 300)])
def test_epsilon_against_an_independent_composition(family: Family, m: float, q: float, steps: int) -> None:
    accountant = MajorizedAccountant(mechanism="logistic")
    accountant.step(noise_multiplier=m, sample_rate=q, dimension=17, steps=steps)
    exact = randomised_response(1 / m, q, steps)
    assert exact * 0.999 <= accountant.epsilon(delta=DELTA) <= 1.25 * exact


@pytest.mark.parametrize("k", [1.5, 2.0, 8.0, 40.0])
def test_moments_are_above_those_of_the_density(family: Family, k: float) -> None:
    rho = 0.7
    noise = stats.logistic()
    integrand = lambda y: math.exp(k * noise.logpdf(y - rho) + (1 - k) * noise.logpdf(y))  # noqa: E731
    exact = math.log(integrate.quad(integrand, -60.0, 60.0, limit=400)[0])
    stated = float(real_table(np.array([k]), Release(1 / rho, 1.0, 5.0), "logistic", "tight")[0])
    assert exact <= stated <= k * rho


@pytest.mark.parametrize("source", ["aes", "torch"])
def test_noise_has_the_distribution(family: Family, source: Any) -> None:
    values = torch.zeros(200_001, dtype=torch.float64)
    make_noise_source(source, torch.device("cpu"), seed=4).add_(values, 0.5, "logistic", release=1)
    assert stats.kstest(values.numpy(), stats.logistic(scale=0.5).cdf).pvalue > 1e-3
    assert float(values.std()) == pytest.approx(0.5 * family.noise.standard_deviation, rel=0.01)


def test_the_log_density_is_the_distributions(family: Family) -> None:
    y = np.linspace(-40.0, 40.0, 81)
    np.testing.assert_allclose(family.noise.log_density(y), stats.logistic().logpdf(y), rtol=1e-12)


def test_training(family: Family, tmp_path: Path) -> None:
    """Epsilon is the accountant's, noise is what moves a parameter without a gradient, the report names it all."""
    privacy = Lap2Privacy(eps=3.0, delta=DELTA, mechanism="logistic", max_grad_norm=0.5)
    model = classifier(L, unused=20_000, learning_rate=1.0)
    trainer = quiet_trainer(L, privacy, max_steps=1, default_root_dir=tmp_path)
    trainer.fit(model, loader(64, 16))
    m = privacy.noise_multiplier
    assert m is not None
    accountant = MajorizedAccountant(mechanism="logistic")
    accountant.step(noise_multiplier=m, sample_rate=0.25, dimension=20_008)
    assert privacy.epsilon == accountant.epsilon(delta=DELTA) <= 3.0
    assert m == calibrate_noise_multiplier(
        eps=3.0, delta=DELTA, sample_rate=0.25, steps=1, dimension=20_008, mechanism="logistic"
    )
    noise = model.unused.detach().double().numpy() * 16  # divided by the expected batch size
    assert stats.kstest(noise, stats.logistic(scale=m * 0.5).cdf).pvalue > 1e-6
    report = PrivacyReport.from_dict(json.loads(json.dumps(privacy.report().to_dict())))
    assert report.mechanism == "logistic"
    assert any("mechanism 'logistic'" in caveat for caveat in report.caveats)


def test_ghost_is_refused_for_its_norm(family: Family) -> None:
    with pytest.raises(ValueError, match="mechanism='logistic' clips the l1 norm"):
        Lap2Privacy(eps=1.0, mechanism="logistic", engine="ghost")


def test_the_mechanisms_clipping_and_charge(family: Family) -> None:
    mechanism = Mechanism(name="logistic", max_grad_norm=2.0, noise_multiplier=1.5, layer_sizes=(3, 7))
    assert (mechanism.norm, mechanism.distribution, mechanism.layer_share) == ("l1", "logistic", 0.5)
    assert mechanism.noise.standard_deviation * mechanism.scale == pytest.approx(3.0 * math.pi / math.sqrt(3))


def test_a_name_is_taken_once_and_unknown_ones_are_refused_by_name(family: Family) -> None:
    with pytest.raises(ValueError, match="mechanism 'logistic' is known already.*start a new process"):
        register_mechanism(family)
    with pytest.raises(ValueError, match="mechanism 'laplace' is known already"):
        register_mechanism(dataclasses.replace(family, name="laplace"))
    other = dataclasses.replace(family.noise, standard_deviation=2.0)
    with pytest.raises(ValueError, match="noise 'logistic' is known already"):
        register_mechanism(dataclasses.replace(family, name="second", noise=other))
    with pytest.raises(ValueError, match="mechanism must be one of 'laplace', 'gaussian', 'laplace_l1', 'logistic'"):
        Lap2Privacy(eps=1.0, mechanism="cauchy")
    with pytest.raises(ValueError, match="bound must be 'tight' where mechanism='logistic', got 'joint'"):
        MajorizedAccountant(bound="joint", mechanism="logistic")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"standard_deviation": 1.5}, "standard_deviation is that of"),
        ({"log_density": lambda y: -np.abs(y)}, "log_density is that of"),
        ({"log_density": lambda y: np.where(y > 0, -y, 0.5 * y)}, "log_density is even"),
        ({"magnitude": lambda t: torch.tan(torch.pi / 2 * (1 - t)), "log_density": lambda y: -np.log1p(y * y)}, "2"),
        ({"magnitude": lambda t: -torch.log(t) - 1.0, "log_density": lambda y: -np.abs(y)}, r"\|Z\| >= 0"),
        (
            {
                "magnitude": lambda t: math.sqrt(2.0) * torch.erfinv(1.0 - t),
                "log_density": lambda y: -0.5 * y * y,
                "standard_deviation": 1.0,
            },
            "1-Lipschitz",
        ),
        (
            {
                "magnitude": lambda t: -4.0 * torch.log(t),
                "log_density": lambda y: -0.25 * np.abs(y),
                "standard_deviation": 4.0 * math.sqrt(2.0),
            },
            "hazard >= 0.5",
        ),
    ],
)
def test_noise_that_contradicts_itself_is_refused(family: Family, wrong: dict[str, Any], words: str) -> None:
    check_noise(family.noise)
    with pytest.raises(ValueError, match=words) as refusal:
        check_noise(dataclasses.replace(family.noise, **wrong))
    assert "noise 'logistic' is refused" in str(refusal.value)
