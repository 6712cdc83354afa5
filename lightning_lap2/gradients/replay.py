"""The second half of recording: the traces of one batch put together, and the recorded calls made once.

See :mod:`lightning_lap2.gradients.recorder` for what becomes of each kind of value.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.recorder import LogEvent, MetricEvent, MetricValue, Slot, Trace, map_leaves


class Replay:
    """The traces of one batch, put together.

    Args:
        traces: one per call of the step.
        tensors: for each trace its tensors with a leading dimension over the examples of that call.
        count: examples in the batch; 0 for an empty draw, whose template adds nothing to any mean or metric.
    """

    def __init__(self, traces: Sequence[Trace], tensors: Sequence[Sequence[Tensor]], count: int) -> None:
        self.traces, self.tensors, self.count = traces, tensors, count

    def run(self) -> Any:
        """Makes the recorded calls, once; returns what ``training_step`` would have returned for the batch."""
        results: list[Any] = []
        with torch.no_grad():
            for same in self._events():
                first = same[0]
                if isinstance(first, LogEvent):
                    self._log(first, [e.value for e in same if isinstance(e, LogEvent)], results)
                    results.append(None)
                else:
                    results.append(self._metric(first, same))
            return self._output(results)

    def _events(self) -> list[tuple[LogEvent | MetricEvent, ...]]:
        """Corresponding events of all traces."""
        first = [_shape(e) for e in self.traces[0].events]
        for trace in self.traces[1:]:
            if [_shape(e) for e in trace.events] != first:
                raise UnsupportedModelError(
                    "training_step makes different log or metric calls for different examples, so there is no "
                    "value for the batch: call self.log and metrics for every example, outside `if`s on the data"
                )
        return list(zip(*(t.events for t in self.traces), strict=True))

    def _log(self, event: LogEvent, values: list[Any], results: list[Any]) -> None:
        options = dict(event.options)
        if self.count == 0:
            options["batch_size"] = 0
        elif options.get("batch_size") is not None:
            options["batch_size"] = options["batch_size"] * self.count
        value = event.value
        if isinstance(value, Slot):
            value = self._mean(value)
        elif isinstance(value, MetricValue):
            value = value.resolve(results)
        elif isinstance(value, bool | int | float):
            value = _common_number(f"self.log({event.name!r}, ...) logs", values)
        if event.name is None:
            event.owner.log_dict(value, **options)  # type: ignore[operator]
        else:
            event.owner.log(event.name, value, **options)  # type: ignore[operator]

    def _metric(self, event: MetricEvent, same: Sequence[LogEvent | MetricEvent]) -> Any:
        if isinstance(event.metric, SumMetric):
            self._check_sum(event)
        columns = zip(*(_leaves((e.args, e.kwargs)) for e in same if isinstance(e, MetricEvent)), strict=True)
        what = f"{type(event.metric).__name__} is given"
        args, kwargs = map_leaves(
            lambda leaf: self._metric_argument(leaf, next(columns), what), (event.args, event.kwargs)
        )
        if isinstance(event.metric, MeanMetric):
            # a weight such as x.shape[0] is 1 in the trace, like batch_size=
            kwargs = {k: self._rescaled(v) if k == "weight" else v for k, v in kwargs.items()}
            args = (*args[:1], *map(self._rescaled, args[1:]))
        if self.count == 0:
            # the value is wanted for the log call, the metric must not see the template
            return copy.deepcopy(event.metric)(*args, **kwargs) if event.forward else None
        return event.metric(*args, **kwargs) if event.forward else event.metric.update(*args, **kwargs)  # type: ignore[operator]

    def _rescaled(self, weight: Any) -> Any:
        return weight * max(self.count, 1) if isinstance(weight, int | float) else weight

    def _check_sum(self, event: MetricEvent) -> None:
        for leaf in [*event.args, *event.kwargs.values()]:
            if not isinstance(leaf, Slot) or self.tensors[0][leaf.index].dim() < 2:
                raise UnsupportedModelError(
                    "a SumMetric is given a value without a batch dimension; the step sees one example at a time, so "
                    "whether it is a batch's sum or mean is unknown: give it the tensor [B] of the examples' values"
                )

    def _metric_argument(self, leaf: Any, values: Sequence[Any], what: str) -> Any:
        if isinstance(leaf, Slot):
            value = self._values(leaf)[0]
            if value.dim() == 1 and not value.dtype.is_floating_point:
                raise UnsupportedModelError(
                    f"{what} an integer without a batch dimension; the step sees one example at a time, so whether it "
                    "is a count over the batch is unknown: give it the examples' values [B, ...]"
                )
            return self._whole(leaf)
        return _common_number(what, values) if isinstance(leaf, bool | int | float) else leaf

    def _whole(self, slot: Slot) -> Tensor:
        return self._concatenated(slot) if self._values(slot)[0].dim() > 1 else self._mean(slot)

    def _values(self, slot: Slot) -> list[Tensor]:
        return [tensors[slot.index] for tensors in self.tensors]

    def _concatenated(self, slot: Slot) -> Tensor:
        """Examples' tensors ``[1, ...]`` (or ``[k, ...]``), one after the other."""
        return torch.cat([value.flatten(0, 1) for value in self._values(slot)])

    def _mean(self, slot: Slot) -> Tensor:
        values = torch.cat([value.reshape(-1) for value in self._values(slot)])
        wide = values if values.dtype == torch.float64 else values.float()
        mean = wide.mean()
        return torch.nan_to_num(mean, 0.0, 0.0, 0.0) if self.count == 0 else mean

    def _output(self, results: list[Any]) -> Any:
        returned = [i for i, trace in enumerate(self.traces) if trace.output is not None]
        if not returned:
            return None
        kept = Replay([self.traces[i] for i in returned], [self.tensors[i] for i in returned], self.count)

        def leaf(value: Any) -> Any:
            if isinstance(value, MetricValue):
                return value.resolve(results)
            return kept._whole(value) if isinstance(value, Slot) else value

        output = kept.traces[0].output
        shape = map_leaves(_leaf_shape, output)
        if any(map_leaves(_leaf_shape, trace.output) != shape for trace in kept.traces):
            raise UnsupportedModelError(
                "training_step returns different entries for different examples, so there is no output for the batch: "
                "return the same ones for every example, or only the loss"
            )
        if isinstance(output, Slot):
            return kept._mean(output)
        return {key: kept._mean(value) if key == "loss" else map_leaves(leaf, value) for key, value in output.items()}


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


def _common_number(what: str, values: Sequence[Any]) -> Any:
    """One number for the batch from those of the examples."""
    if all(v == values[0] for v in values):
        return values[0]
    if all(isinstance(v, float) for v in values):
        return sum(values) / len(values)
    raise UnsupportedModelError(
        f"{what} an int that differs between examples; whether the batch's value is their sum "
        "or their mean is unknown: make it a float or a tensor that is a mean"
    )


def _shape(event: LogEvent | MetricEvent) -> Any:
    """What must agree between examples: everything but the numbers logged."""
    if isinstance(event, LogEvent):
        return (id(event.owner), event.name, type(event.value), _leaf_shape(event.value), event.options)
    return (id(event.metric), event.forward, map_leaves(_leaf_shape, (event.args, event.kwargs)))


def _leaf_shape(leaf: Any) -> Any:
    if isinstance(leaf, Slot):
        return leaf.index
    return type(leaf).__name__
