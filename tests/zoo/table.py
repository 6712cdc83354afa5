"""Writes ``docs/models.md`` from the zoo's own results: ``python -m tests.zoo.table``."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from lightning_lap2.gradients import StepCall, UnsupportedModelError
from lightning_lap2.gradients.clipping import FlatClipper
from lightning_lap2.gradients.engines import ENGINES, make_engine
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.suggest import suggest
from tests.zoo.cases import CASES, REFUSED, Case
from tests.zoo.compare import worst_error

COUNT = 4
TOLERANCE = 1e-5
PAGE = Path(__file__).parents[2] / "docs" / "models.md"

INTRODUCTION = """\
# Models

This page is written by `make models` (`python -m tests.zoo.table`) from the results of the test zoo: every family
below is built in a small configuration, and each example's gradient, its norms and the loss are compared with plain
autograd, one example at a time, in fp32. A number is the largest relative error over all of them. Losses are those
of users: means over the examples of a batch (classification with label smoothing, regression, multi-label), or over
the tokens that carry a label (language model).

"""

NOTES = """
## Which engine

All three show the step one example at a time, so which one runs changes time and memory only.

* `"ghost"` runs the unmodified `training_step` once for all examples of one shape, under `vmap`, on the module's own
  parameters, and takes one backward pass of the summed losses. No gradients of single examples are held, but for
  parameters that are used in a way without a rule (a bilinear form, an `EmbeddingBag`): those are used as one copy for
  each example, at that many times their memory. Checkpointed parts keep their activations.
* `"vmap"` holds the gradients of a chunk of examples. Under both, code that reads a value out of a tensor cannot run,
  and the error names the line and the layer.
* `"loop"` runs one example at a time. It is slow and runs nearly everything.
* `"auto"` (the default) goes from one to the next.

`"ghost"` refuses by name, and `"auto"` goes on with `"vmap"` or `"loop"`: batching rules of your own
(`autograd.Function.vmap`, `register_vmap`; `generate_vmap_rule = True` is fine), saved-tensor hooks, backward hooks of
layers, hooks on a tensor's gradient, and `torch.autograd.grad` inside the step (`torch.func.grad` is fine).

## Models of timm

`python -m tests.zoo.timm_models` (it needs timm and torchvision, which the tests do not) makes the same comparison on
whole models. With timm 1.0.31 and torch 2.14.1, ViT-tiny, DeiT-tiny, ConvNeXt-atto, Mixer-S32, Swin-tiny, and
ResNet-18 and EfficientNet-Lite0 with frozen BatchNorm were within 6.8e-7 under every engine.

## What one example at a time means for a step

* `self.log`, `self.log_dict` and torchmetrics objects are recorded and replayed once per batch, with the batch's
  values. A 0-dim float is logged as the mean over the examples whose value is finite, an integer tensor (a count) or
  a value under `reduce_fx="sum"` as the sum; where the trial at fit start could run the step on a whole batch as well,
  what is a sum and what a mean is learnt from that run. `metric.compute()`, arithmetic on what a metric returned, and a
  metric as the loss do what they do in plain training; such a value cannot become a plain number or decide a branch. A
  call that only some examples make is left out, with one warning.
* `.item()` gives a number that knows its values of all examples: log it, return it, compute with it. A condition,
  `float()` or `int()` is given where all examples agree (so `assert not torch.isnan(loss)` costs nothing); where they
  do not, `engine="auto"` goes on to `"loop"`, and an assertion that fails there ends the fit before the release.
* `.squeeze()` without a dimension keeps the batch dimension, as it does among several examples.
* A batch may hold tensors and anything else in tuples, lists, named tuples, dicts, dataclasses, attrs classes and
  `BatchEncoding`s. An object of another class (graph data, say), a boolean mask, a packed sequence, a gradient penalty
  go to `"loop"`; a class given to `register_batch_type` is taken apart for the faster engines.
* Examples of unlike shapes run in one group per shape. Padding collators with `pad_to_multiple_of` are told to pad to a
  multiple of 16, so that text falls into few groups.
* Plain Python attributes that the step changes (counters, lists) have the effect of one step per batch under `"vmap"`
  and `"ghost"`, and are refused by name under `"loop"`, where their value could depend on the data, as they are where
  the step has read a value on which its examples agree. Buffers and parameters written in the step, and tensors of the
  data kept on the module, are refused under every engine; so is a tensor of the data that was kept elsewhere (a global,
  a closure, a cache) when a later step reads it.
* Python's and NumPy's random numbers are drawn once per chunk under `"ghost"` and `"vmap"`; torch's (dropout) for each
  example.
* `x.shape[0]` is 1 inside the step (K under `augmentations=K`); where it is `batch_size=` of a log call or the `weight`
  of a MeanMetric, the real batch's size is put in.
* `self.logger` is not recorded: what a step writes there itself is written once per example under `"loop"`.
* In-batch losses (contrastive, mixup) have no meaning for one example; the trial refuses what it can see of them.
"""


def outcome(case: Case, engine: str) -> tuple[str, float]:
    """One cell of the table, and the error behind it (0 where there is none)."""
    module = case.build()
    try:
        error = worst_error(make_engine(engine, module), module, case.batch(COUNT), COUNT, each=False)
        if error < TOLERANCE:
            return "yes", error
        return f"wrong by {error:.0e}", error
    except UnsupportedModelError as refusal:
        return f"no: {_sentence(str(refusal))}", 0.0


def _sentence(message: str) -> str:
    """The reason of a refusal, without the line of the zoo that caused it and without the advice."""
    reason = re.search(r"\(engine='\w+'\): (.*?)\. Use ", message)
    if reason:
        return reason.group(1)
    message = re.sub(r"^Parameter '.*?' (is )?used by", "a parameter used by", message)
    return re.split(r"[.;] (?=[A-Z])|\n", message)[0].rstrip(".")


def refusal(case: Case) -> str:
    """The whole message with which the engines refuse a case of ``REFUSED``."""
    module = case.build(train=True)
    layout = ParameterLayout(module)
    try:
        make_engine("vmap", module).accumulate(
            StepCall((case.batch(2), 0), 2), layout, FlatClipper(1.0), layout.zeros()
        )
    except UnsupportedModelError as error:
        return str(error)
    raise AssertionError(f"{case.name} was not refused")


def page() -> str:
    """The whole of ``docs/models.md``."""
    names = list(ENGINES)
    lines = [f"| family | loss | {' | '.join(f'`{name}`' for name in names)} | largest error |"]
    lines.append("|---" * (len(names) + 3) + "|")
    for case in CASES:
        if not case.available:
            lines.append(f"| {case.name} | {case.loss} |{' not run |' * len(names)} |")
            continue
        cells = [outcome(case, name) for name in names]
        worst = max(error for _, error in cells)
        lines.append(f"| {case.name} | {case.loss} | {' | '.join(cell for cell, _ in cells)} | {worst:.0e} |")
    lines += ["", "## Refused under every engine", "", "| what | what is said |", "|---|---|"]
    lines += [f"| {case.name} | {refusal(case)} |" for case in REFUSED]
    lines += ["", "`lightning_lap2.suggest(model)` lists such layers with a drop-in and changes nothing:", "", "```"]
    for case in REFUSED:
        found = suggest(case.build(train=True))
        lines += [f"# {case.name}: {len(found)} such layers, the first:" if len(found) > 1 else f"# {case.name}:"]
        lines.append(str(found[0]))
    lines.append("```")
    return INTRODUCTION + "\n".join(lines) + "\n" + NOTES


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    PAGE.write_text(page())
