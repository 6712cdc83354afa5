"""Log likelihood ratios against scipy's densities."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from lightning_lap2.accounting import GAUSSIAN, LAPLACE, Family
from lightning_lap2.audit.scores import log_mixture, log_ratio


@pytest.mark.parametrize(("family", "noise"), [(LAPLACE, stats.laplace), (GAUSSIAN, stats.norm)])
def test_log_ratio_is_that_of_the_densities(family: Family, noise: stats.rv_continuous) -> None:
    rng = np.random.default_rng(0)
    y, g = 3 * rng.normal(size=(40, 5)), rng.normal(size=(40, 5))
    expected = (noise.logpdf(y - g) - noise.logpdf(y)).sum(axis=-1)
    np.testing.assert_allclose(log_ratio(y, g, family.noise), expected, rtol=1e-10, atol=1e-12)


def test_log_mixture_is_the_coins_and_does_not_overflow() -> None:
    ratio = np.array([-3.0, 0.0, 2.5])
    np.testing.assert_allclose(log_mixture(ratio, 0.3), np.log(0.7 + 0.3 * np.exp(ratio)), rtol=1e-12)
    np.testing.assert_array_equal(log_mixture(ratio, 1.0), ratio)
    np.testing.assert_array_equal(log_mixture(ratio, 0.0), 0.0)
    extremes = log_mixture(np.array([-1e6, 1e6]), 0.25)
    np.testing.assert_allclose(extremes, [np.log(0.75), 1e6 + np.log(0.25)])
