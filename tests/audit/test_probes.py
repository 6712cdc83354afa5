"""What a probe places in a fit goes the way of every example, and what it sees is what was released."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_lap2 import Lap2Privacy
from lightning_lap2.audit.canaries import make_directions
from lightning_lap2.audit.probes import GradientProbe, LeaveOut, clipped_sum
from lightning_lap2.callback.probe import Probe
from lightning_lap2.gradients import ParameterLayout, UnsupportedModelError
from tests.scenarios.common import Classifier, data, flat, loader, trainer
from tests.scenarios.test_neighbours import Weighted

C = 0.05


class Watching(GradientProbe):
    """Keeps what is left of each release once all that is known is taken off."""

    noise: list[np.ndarray]

    def begin(self, release: Any) -> None:
        super().begin(release)
        self.noise = []

    def released(self, values: Tensor) -> None:
        y = values.double().numpy() * self.claim.normaliser - self._others.numpy()
        self.noise.append(y - self.directions.combine(self.claim.mechanism.clip_norm * self._times))
        super().released(values)


def fit(probe: Probe, *, steps: int = 6, accumulate: int = 1, batch: int = 12, **settings: Any) -> Lap2Privacy:
    torch.manual_seed(0)
    told = {"eps": float("inf"), "noise_multiplier": 1e-4, "max_grad_norm": C, "noise_seed": 1, **settings}
    callback = Lap2Privacy(**told)
    callback.attach(probe)
    trainer(callback, max_steps=steps, accumulate_grad_batches=accumulate).fit(
        Classifier(), loader(24, batch_size=batch)
    )
    return callback


def watching(included: list[bool], *, norm: Any = "l2", reveal: bool = True) -> Watching:
    layout = ParameterLayout(Classifier())
    directions = make_directions("gradient", 3, layout, norm, np.random.default_rng(0))
    return Watching([1, 5, 9], np.array(included), directions, reveal=reveal)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engine": "loop"},
        {"chunk_size": 2},
        {"accumulate": 3, "batch": 4},
        {"mechanism": "gaussian"},
        {"mechanism": "laplace_l1"},
        {"sampling": "none"},
    ],
    ids=lambda s: "-".join(map(str, s.values())) or "default",
)
def test_the_audits_own_sum_is_the_librarys_and_leaves_the_noise(settings: dict[str, Any]) -> None:
    """The noise is 1e-4 C here: any example or canary summed otherwise than the audit does would tower over it."""
    norm = "l1" if settings.get("mechanism") == "laplace_l1" else "l2"
    probe = watching([True, True, True], norm=norm)
    callback = fit(probe, **settings)
    noise = np.array(probe.noise) / (1e-4 * C)
    assert noise.shape == (6, callback.dimension)
    assert np.abs(noise).max() < 20
    expected = 1.0 if settings.get("mechanism") == "gaussian" else 2**0.5
    assert noise.std() == pytest.approx(expected, rel=0.12)
    # at so little noise each score says for certain whether its canary took part
    assert (probe.scores > 1e3).all()


def test_scores_tell_who_was_left_out() -> None:
    probe = watching([True, False, True])
    fit(probe)
    assert probe.absent == frozenset({5})
    assert (probe.scores > 0).tolist() == [True, False, True]
    single = make_directions("one_coordinate", 3, ParameterLayout(Classifier()), "l2", np.random.default_rng(0))
    alone = GradientProbe([1, 5, 9], np.array([True, False, True]), single, reveal=False)
    fit(alone)
    assert (alone.scores > 0).tolist() == [True, False, True]


def test_a_record_left_out_is_a_null_record() -> None:
    """The same release, to the bit, as with a record that has no gradient: batches, noise and plan do not move."""

    def move(absent: frozenset[int], removed: int | None, **settings: Any) -> Tensor:
        torch.manual_seed(0)
        x, y = data(24).tensors
        weight = torch.ones(24)
        if removed is not None:
            weight[removed] = 0.0
        module, probe = Weighted(lr=1.0), Probe()
        probe.absent = absent
        callback = Lap2Privacy(eps=float("inf"), noise_multiplier=1.0, noise_seed=3, **settings)
        callback.attach(probe)
        trainer(callback, max_steps=4).fit(module, DataLoader(TensorDataset(x, y, weight), batch_size=4))
        return flat(module)

    for settings in ({}, {"engine": "ghost"}, {"sampling": "none"}):
        whole = move(frozenset(), None, **settings)
        without = move(frozenset({6}), None, **settings)
        # summed in another order, a release differs in its last bits
        torch.testing.assert_close(without, move(frozenset(), 6, **settings), rtol=1e-6, atol=1e-6)
        assert (without - whole).abs().max() > 1e-3


def test_a_batch_of_which_all_are_left_out_is_an_empty_draw() -> None:
    probe = LeaveOut(list(range(24)), np.zeros(24, dtype=bool))
    callback = fit(probe)
    assert callback.steps == 6


def test_the_report_says_that_an_audit_took_part_and_a_second_fit_skips_the_trial() -> None:
    probe = LeaveOut([0], np.array([True]))
    callback = fit(probe)
    assert any("an audit took part" in text for text in callback.report().caveats)
    assert probe.trial is not None
    assert probe.trial.logged_names == {"loss"}
    again = LeaveOut([0], np.array([True]))
    again.trial = probe.trial
    assert fit(again).accountant == callback.accountant


def test_gradient_canaries_are_refused_where_they_cannot_take_part() -> None:
    with pytest.raises(UnsupportedModelError, match="gradient canary cannot take part"):
        fit(watching([True, True, True]), engine="ghost")
    layout = ParameterLayout(torch.nn.Linear(2, 2))
    wrong = make_directions("one_coordinate", 2, layout, "l2", np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"195 trainable scalars in the fit, 6 when it was made"):
        fit(GradientProbe([0, 1], np.array([True, True]), wrong, reveal=True))


def test_clipped_sum_leaves_out_what_is_not_finite() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 1.0], [float("inf"), 0.0], [0.0, 0.0]]).double()
    torch.testing.assert_close(clipped_sum(rows, 1.0, "l2"), torch.tensor([0.9, 1.2]).double())
    torch.testing.assert_close(clipped_sum(rows, 1.0, "l1"), torch.tensor([3 / 7 + 0.3, 4 / 7 + 0.4]).double())
