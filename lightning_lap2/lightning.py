"""``Lap2Privacy`` for the ``lightning.pytorch`` namespace."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_lap2.callback.hooks import Lap2Hooks


class Lap2Privacy(Lap2Hooks, pl.Callback):
    r"""Makes ``trainer.fit`` differentially private; the LightningModule stays as it is.

    Each step releases ``(sum of clipped per-example gradients + noise) / expected batch size`` and nothing else:
    l2 clipping to C, i.i.d. Laplace noise of scale ``b = noise_multiplier * C`` on every trainable scalar (the Lap2
    mechanism of Mohammady et al., arXiv 2602.23516), Poisson sampling at a rate known exactly, a ledger charged
    before the parameters change and kept in the checkpoint, and a stop at the budget.

    Args:
        eps: the budget; the spent epsilon never exceeds it. ``inf`` sets none (and needs a noise multiplier).
        delta: in (0, 1), and below 1/N.
        max_grad_norm: C, the l2 norm that each example's gradient is clipped to (with noise: a thousandth less, which
            pays for rounding; docs/guarantee.md, section 11); with adaptive clipping where C starts.
        noise_multiplier: scale / C. ``None``: calibrated so that the planned run spends ``eps`` and no more. Given:
            training goes on until the budget is gone. ``0.0`` only with ``eps=inf``: no noise, no guarantee.
        mechanism: ``"laplace"``; ``"gaussian"`` (l2 clip) and ``"laplace_l1"`` (l1 clip) are baselines; or one that
            was registered (docs/extending.md), as for ``clipping``.
        bound: ``"tight"`` (valid, the default), ``"joint"`` (valid, looser), ``"published"`` (the paper's printed
            bound, for reproduction only: it is not valid).
        sampling: ``"poisson"`` replaces the train loader's sampling. ``"none"`` keeps the loader's own order, without
            amplification: one release at q = 1 is charged per pass over the data (zero-out adjacency).
        clipping: ``"flat"``: one norm over all parameters. ``"automatic"``: every gradient is scaled to a norm just
            below C. ``"per_layer"``: each module's own parameters are clipped to C / sqrt(layers) (C / layers in l1).
            ``"adaptive"``: C follows a quantile of the gradients' norms by a noisy count, which the budget pays for.
        engine: ``"auto"``: for each group of examples of one shape the first of these that takes it; all show the step
            one example at a time, so they differ in time and memory only. ``"ghost"`` (one backward pass, no
            per-example gradients kept), ``"vmap"`` (per-example gradients by ``torch.func``, in chunks), ``"loop"``
            (plain autograd, one example after the other: slow, runs nearly anything).
        chunk_size: examples per pass of ``"ghost"`` and ``"vmap"``; ``None``: chosen. Speed and memory only.
        augmentations: K views per example (De et al. 2022, arXiv 2204.13650, "augmentation multiplicity"). The data
            set is asked K times for each drawn record, so that its random transforms give K views; ``training_step``
            sees K rows per record, side by side. The K views are one example: their mean gradient is clipped.
            Sampling rate, batch size and guarantee are those of K = 1; a step costs K times as much.
        noise_source: ``"aes"`` (cryptographic; ``"auto"`` on the CPU), ``"torch"`` (the device's generator;
            ``"auto"`` on accelerators).
        noise_seed: ``None``: noise and draws from the operating system's entropy, untouched by
            ``seed_everything``. An integer makes both reproducible, and the run not private.
        assume_nothing_spent: resume from a checkpoint that holds no ledger, declaring that its training spent
            nothing of this data's budget.
        allow_feedback: let schedulers and callbacks watch values computed from training data without noise.
        on_record_error: ``"raise"``: an error in reading a record or in the step on it ends the fit, as in plain
            Lightning; ``"zero"``: that record counts as one without a gradient, and the report says so.
        public_state: names of attributes of the module (``"scale"``, ``"net.centres"``) and of settings
            (``"param_groups"``, ``"should_stop"``, ``"max_epochs"``) that hooks change and that you vouch hold nothing
            of the training records. The report names them.
        target_quantile: of adaptive clipping, in (0, 1): the fraction of gradients that C is to leave as they are.
            ``None``: 0.5.
        clip_learning_rate: of adaptive clipping: C is multiplied by exp(-rate * (noisy fraction - target)).
            ``None``: 0.2.
        count_noise_scale: of adaptive clipping: noise on the number of gradients below C, in examples (b of Laplace,
            sigma of Gaussian noise). ``None``: a twentieth of the expected batch size.
        unit: whose privacy it is: the name of an attribute, method or column of the train data set that gives one id
            (integer or string) per record, or a function from the data set to such ids. Users are drawn in place of
            records, ``batch_size`` counts users, and the guarantee is for one user with all records. ``None``: a
            record is a unit.
        records_per_unit: K records of each drawn user, drawn afresh without replacement (of a user with fewer some
            again), whose K rows are one example: the gradient of their loss is clipped. ``None``: 1.

    Attributes:
        clipping_threshold: C of the next release; ``max_grad_norm`` unless clipping is adaptive.
        noise_multiplier, scale, sample_rate, expected_batch_size, dimension, planned_steps: the plan, once fit started.
        steps, epsilon, accountant: what has been spent.

    Raises:
        TypeError, ValueError: an argument's type or value, by name, in the constructor; a setting of the Trainer,
            loader, module or optimizer under which the guarantee is not proven, by name, before the first step.

    Logs ``privacy/epsilon`` every step (an upper bound of what is spent), with adaptive clipping
    ``privacy/max_grad_norm`` as well, and writes ``privacy_report.json`` and
    ``.md`` when training ends, however it ends.

    What is spent belongs to the weights: a module that was trained privately is marked with its ledger, and a fit with
    another callback goes on from there. Deep copies of a callback share its ledger.

    Example::

        trainer = L.Trainer(max_epochs=10, callbacks=[Lap2Privacy(eps=1.0)])
        trainer.fit(model, train_dataloader)
    """

    _pl = pl
