"""The constructor: every refusal names the argument, its value and the legal set."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_lap2 import Lap2Privacy

ADAPTIVE: dict[str, Any] = {"clipping": "adaptive"}
FREE: dict[str, Any] = {"eps": math.inf, "noise_multiplier": 0.0}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"eps": 0.0}, ValueError, "eps must be positive, got 0.0"),
        ({"eps": -1.0}, ValueError, "eps must be positive, got -1.0"),
        ({"eps": math.nan}, ValueError, "eps must be a number, got nan"),
        ({"eps": "much"}, TypeError, "eps must be a number, got 'much'"),
        ({"eps": True}, TypeError, "eps must be a number, got True"),
        ({"delta": 0.0}, ValueError, "delta must lie strictly between 0 and 1, got 0.0"),
        ({"delta": 1.0}, ValueError, "delta must lie strictly between 0 and 1, got 1.0"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm must be positive, got -1.0"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm must be positive, got 0"),
        ({"max_grad_norm": math.inf}, ValueError, "max_grad_norm=inf needs noise_multiplier=0.0"),
        ({"max_grad_norm": math.inf, "noise_multiplier": 1.0}, ValueError, "max_grad_norm=inf leaves the noise"),
        ({"noise_multiplier": -0.1}, ValueError, "noise_multiplier must not be negative, got -0.1"),
        ({"noise_multiplier": math.inf}, ValueError, "noise_multiplier must be finite, got inf"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier must be a number, got nan"),
        ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier=0.0 spends an infinite epsilon, but eps=1.0"),
        ({"eps": math.inf}, ValueError, "eps=inf sets no budget to calibrate the noise for"),
        ({"mechanism": "cauchy"}, ValueError, "mechanism must be one of 'laplace', 'gaussian', 'laplace_l1'"),
        ({"bound": "loose"}, ValueError, "bound must be one of 'tight', 'joint', 'published', got 'loose'"),
        ({"bound": "joint", "mechanism": "gaussian"}, ValueError, "bound='joint' is a bound for mechanism='laplace'"),
        ({"sampling": "shuffle"}, ValueError, "sampling must be one of 'poisson', 'none', got 'shuffle'"),
        ({"clipping": "none"}, ValueError, "clipping must be one of 'flat', 'automatic', 'per_layer', 'adaptive'"),
        ({"target_quantile": 0.5}, ValueError, "target_quantile=0.5 has no meaning for clipping='flat'"),
        ({"clip_learning_rate": 0.2, "clipping": "automatic"}, ValueError, "no meaning for clipping='automatic'"),
        ({"count_noise_scale": 3.0, "clipping": "per_layer"}, ValueError, "count_noise_scale=3.0 has no meaning"),
        ({"target_quantile": 1.0, **ADAPTIVE}, ValueError, "target_quantile must lie strictly between 0 and 1, got 1"),
        ({"target_quantile": "half", **ADAPTIVE}, TypeError, "target_quantile must be a number, got 'half'"),
        ({"clip_learning_rate": 0.0, **ADAPTIVE}, ValueError, "clip_learning_rate must be positive and finite"),
        ({"count_noise_scale": 0.0, **ADAPTIVE}, ValueError, "count_noise_scale must be positive and finite, got 0.0"),
        ({"count_noise_scale": math.inf, **ADAPTIVE}, ValueError, "count_noise_scale must be positive and finite"),
        (
            {"eps": math.inf, "noise_multiplier": 0.0, "count_noise_scale": 1.0, **ADAPTIVE},
            ValueError,
            "count_noise_scale=1.0 with noise_multiplier=0.0",
        ),
        ({**FREE, "max_grad_norm": math.inf, **ADAPTIVE}, ValueError, "max_grad_norm=inf with clipping='adaptive'"),
        ({**FREE, "max_grad_norm": math.inf, "clipping": "automatic"}, ValueError, "max_grad_norm=inf with clipping="),
        ({"bound": "published", **ADAPTIVE}, ValueError, "bound='published' is a formula for one vector"),
        ({"bound": "published", "clipping": "per_layer"}, ValueError, "bound='published' is a formula for one vector"),
        ({"bound": "joint", "mechanism": "gaussian", **ADAPTIVE}, ValueError, "bound='joint' is a bound for mechanism"),
        ({"engine": "hooks"}, ValueError, "engine must be one of 'auto', 'ghost', 'vmap', 'loop', got 'hooks'"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"chunk_size": 2.5}, TypeError, "chunk_size must be an integer, got 2.5"),
        ({"augmentations": 0}, ValueError, "augmentations must be at least 1, got 0"),
        ({"augmentations": 2.0}, TypeError, "augmentations must be an integer, got 2.0"),
        ({"augmentations": True}, TypeError, "augmentations must be an integer, got True"),
        ({"engine": "ghost", "mechanism": "laplace_l1"}, ValueError, "engine='ghost' computes l2 norms"),
        ({"noise_source": "randn"}, ValueError, "noise_source must be one of 'auto', 'aes', 'torch', got 'randn'"),
        ({"noise_seed": -1}, ValueError, "noise_seed must be at least 0, got -1"),
        ({"noise_seed": "1"}, TypeError, "noise_seed must be an integer, got '1'"),
        ({"allow_feedback": "yes"}, TypeError, "allow_feedback must be True or False, got 'yes'"),
        ({"assume_nothing_spent": 1}, TypeError, "assume_nothing_spent must be True or False, got 1"),
    ],
)
def test_constructor_refuses_by_name(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        Lap2Privacy(**{"eps": 1.0, **arguments})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"clipping": "automatic", "bound": "published"},
        {"clipping": "per_layer", "bound": "joint"},
        {**FREE, "clipping": "per_layer", "max_grad_norm": math.inf},
        {"bound": "joint", **ADAPTIVE, "target_quantile": 0.9, "clip_learning_rate": 1, "count_noise_scale": 7.5},
        {**FREE, **ADAPTIVE},
        *(
            {"clipping": clipping, "mechanism": mechanism, "engine": engine, "sampling": sampling}
            for clipping in ("automatic", "per_layer", "adaptive")
            for mechanism, engine in (("laplace", "ghost"), ("gaussian", "ghost"), ("laplace_l1", "vmap"))
            for sampling in ("poisson", "none")
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::lightning_lap2.accounting.UnsoundBoundWarning")
def test_constructor_accepts_what_is_sound(arguments: dict[str, Any]) -> None:
    callback = Lap2Privacy(**{"eps": 1.0, **arguments})
    assert callback.clipping_threshold == callback.max_grad_norm


def test_infinite_budget_may_be_written_as_a_string() -> None:
    assert math.isinf(Lap2Privacy(eps="inf", noise_multiplier=0.0).eps)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["noise_multiplier", "scale", "sample_rate", "expected_batch_size", "dimension"])
def test_plan_is_unknown_before_fit(name: str) -> None:
    with pytest.raises(RuntimeError, match="is known once fit has started"):
        getattr(Lap2Privacy(eps=1.0), name)


def test_fresh_callback_has_spent_nothing() -> None:
    callback = Lap2Privacy(eps=1.0)
    assert callback.steps == 0
    assert callback.epsilon == 0.0
    assert "has not trained anything" in str(callback.report())
