r"""From an attacker's right and wrong answers to a lower bound on epsilon, at a stated confidence. No torch.

Both bounds are of the (epsilon, delta) form: they use nothing of the mechanism but the claim

.. math::  P[M(D) \in E] \le e^\varepsilon P[M(D') \in E] + \delta \quad \text{for all neighbours } D, D'.

Shortcuts that fit one parameter of a Gaussian trade-off function (mu-GDP) to the error rates are tighter for Gaussian
noise and *wrong* for Laplace noise, whose trade-off function has another shape: they may put the "lower" bound above
the truth. There are none here.
"""

from __future__ import annotations

from lightning_lap2.audit.bounds.guesses import GuessesBound, guesses_bound, guesses_lower_bound, guesses_p_value
from lightning_lap2.audit.bounds.rates import Interval, RatesBound, clopper_pearson, rates_bound

__all__ = [
    "GuessesBound",
    "Interval",
    "RatesBound",
    "clopper_pearson",
    "guesses_bound",
    "guesses_lower_bound",
    "guesses_p_value",
    "rates_bound",
]
