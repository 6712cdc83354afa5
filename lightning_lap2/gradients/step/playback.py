"""The second half of recording: the traces of one batch put together, and the recorded calls made once.

See :mod:`lightning_lap2.gradients.step.recorder` for what becomes of each kind of value.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_lap2.gradients.step.recorder import (
    Deferred,
    LogEvent,
    MetricEvent,
    MetricValue,
    Slot,
    Trace,
    Unlike,
    leaves_of,
    map_leaves,
)  # fmt: skip

_SUM = ("sum", sum, torch.sum)


class Playback:
    """The traces of one batch, put together.

    Args:
        traces: one per call of the step.
        tensors: for each trace its tensors with a leading dimension over the examples of that call.
        count: examples in the batch; 0 for an empty draw, whose template adds nothing to any mean or metric.
        places: for each trace the places in the draw of its examples; ``None``: they are in order.
        warn: told of each call that has no value for the batch, by a name that is the same at every step.
        sums: for numbers of calls, by the call's key and the number's position in its arguments, whether the batch's
            value is the sum over the examples (else their mean); where it is not known, integers add up.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        tensors: Sequence[Sequence[Tensor]],
        count: int,
        places: Sequence[Sequence[int]] | None = None,
        warn: Callable[[str], None] = lambda call: None,
        sums: Mapping[Hashable, bool] | None = None,
    ) -> None:
        self.traces, self.tensors, self.count, self._warn = traces, tensors, count, warn
        self._sums = sums or {}
        self.places = places
        drawn = [] if places is None else [place for own in places for place in own]
        self._order = None if drawn == sorted(drawn) else sorted(range(len(drawn)), key=drawn.__getitem__)
        self._results: dict[Hashable, Any] = {}

    def run(self) -> Any:
        """Makes the recorded calls, once; returns what ``training_step`` would have returned for the batch."""
        with torch.no_grad():
            for event in self.traces[0].events.values():
                same: list[Any] = [trace.events.get(event.key) for trace in self.traces]
                try:
                    if None in same:
                        raise Unlike
                    if isinstance(event, LogEvent):
                        self._log(same)
                    else:
                        self._results[event.key] = self._metric(same)
                except Unlike:
                    self._warn(_called(event))
            for trace in self.traces[1:]:
                for key in trace.events.keys() - self.traces[0].events.keys():
                    self._warn(_called(trace.events[key]))
            return self._output()

    # -- calls ----------------------------------------------------------------------------------------------------

    def _log(self, same: Sequence[LogEvent]) -> None:
        event, options = same[0], dict(same[0].options)
        if self.count == 0:
            options["batch_size"] = 0
        elif options.get("batch_size") is not None:
            options["batch_size"] = options["batch_size"] * self.count
        if event.name is None:
            event.owner.log_dict(self._value([e.value for e in same]), **options)  # type: ignore[operator]
            return
        summed = self._sums.get((event.key, 0), True if options.get("reduce_fx") in _SUM else None)
        value = self._value([e.value for e in same], summed=summed)
        event.owner.log(event.name, value, **options)  # type: ignore[operator]

    def _metric(self, same: Sequence[MetricEvent]) -> Any:
        event: Any = same[0]
        metric, given = event.metric, [(e.args, e.kwargs) for e in same]
        if event.method == "compute":
            return metric.compute()
        if event.method == "reset":
            return metric.reset()
        calls = self._calls(event.key, metric, given)
        if self.count == 0:
            # the value is wanted for the log call, the metric must not see the template
            metric = copy.deepcopy(metric)
            if event.method == "update":
                return None
        if len(calls) == 1:
            args, kwargs = calls[0]
            return metric(*args, **kwargs) if event.method == "forward" else metric.update(*args, **kwargs)
        fresh = copy.deepcopy(metric)
        fresh.reset()
        for args, kwargs in calls:
            metric.update(*args, **kwargs)
            fresh.update(*args, **kwargs)
        return fresh.compute() if event.method == "forward" else None

    def _calls(self, key: Hashable, metric: Any, given: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Arguments for the metric: one call, or one for each kind of examples whose tensors cannot be joined."""
        try:
            calls = [self._tree(given, self._rows, key)]
        except _Shapes:
            apart = [
                Playback([trace], [own], self.count, sums=self._sums)
                for trace, own in zip(self.traces, self.tensors, strict=True)
            ]
            calls = [replay._tree([one], replay._rows, key) for replay, one in zip(apart, given, strict=True)]
        if isinstance(metric, MeanMetric):
            # a weight such as x.shape[0] is 1 in the trace, like batch_size=
            times = [self._examples(t) if len(calls) > 1 else max(self.count, 1) for t in range(len(calls))]
            calls = [_reweighted(call, number) for call, number in zip(calls, times, strict=True)]
        return calls

    # -- values ---------------------------------------------------------------------------------------------------

    def _tree(self, trees: Sequence[Any], join: Callable[[list[Tensor]], Any], key: Hashable = None) -> Any:
        """One tree of values of the batch from those of the traces; ``key``: of the call that they belong to."""
        columns = [leaves_of(tree) for tree in trees]
        if any(len(column) != len(columns[0]) for column in columns):
            raise Unlike
        values = iter(
            self._value(leaves, summed=self._sums.get((key, position)), join=join)
            for position, leaves in enumerate(zip(*columns, strict=True))
        )
        return map_leaves(lambda _: next(values), trees[0])

    def _value(
        self, leaves: Sequence[Any], *, summed: bool | None = None, join: Callable[[list[Tensor]], Any] | None = None
    ) -> Any:
        """The batch's value from those of the traces.

        Args:
            summed: whether 0-dim values add up or are averaged; ``None``: integers add up, others are averaged.
            join: of the rows of values that are not 0-dim; ``None``: all elements are averaged.
        """
        first = leaves[0]
        if all(isinstance(leaf, Deferred) for leaf in leaves):
            return self._deferred(leaves)
        if all(isinstance(leaf, Slot | bool | int | float) for leaf in leaves):
            if not any(isinstance(leaf, Slot) for leaf in leaves):
                return self._numbers(leaves, summed)
            values = [self._column(leaf, t) for t, leaf in enumerate(leaves)]
            if join is not None and any(value.dim() > 1 for value in values):
                return join(values)
            number = self._number(torch.cat([value.reshape(-1) for value in values]), summed)
            return number.item() if any(isinstance(leaf, Slot) and leaf.number for leaf in leaves) else number
        if all(type(leaf) is type(first) for leaf in leaves):
            return first
        raise Unlike

    def _column(self, leaf: Any, trace: int) -> Tensor:
        """Values ``[b, ...]`` of one trace's examples."""
        if isinstance(leaf, Slot):
            return self.tensors[trace][leaf.index]
        return torch.full((self._examples(trace),), leaf)

    def value(self, leaves: Sequence[Any]) -> Any:
        """The batch's value of what the traces hold: the mean of 0-dim tensors, the rows of others one after the other;
        of a metric's value once :meth:`run` has asked for it.

        Raises:
            Unlike: there is none.
        """
        with torch.no_grad():
            return self._value(leaves, join=self._filled_rows)

    def _numbers(self, values: Sequence[Any], summed: bool | None) -> Any:
        """Python numbers: the same for all examples, or else their mean or sum."""
        if all(v == values[0] or v != v for v in values) and not summed:
            return values[0]
        number = self._number(torch.cat([self._column(v, t) for t, v in enumerate(values)]), summed)
        return number.item()

    def _examples(self, trace: int) -> int:
        return len(self.tensors[trace][0]) if self.tensors[trace] else 1

    def _number(self, values: Tensor, summed: bool | None) -> Tensor:
        """0-dim, from ``[n]``. Values that are not finite are left out, as their gradients are; unless all are."""
        if summed is not False and not values.dtype.is_floating_point and values.dtype != torch.bool:
            return values.sum() * min(self.count, 1)
        wide = values if values.dtype == torch.float64 else values.float()
        total = wide.sum()
        if self.count and math.isfinite(total.item()):  # then all of them are
            return total if summed else total / len(wide)
        finite = torch.isfinite(wide)
        wide = torch.where(finite, wide, 0.0) if bool(finite.any()) or self.count == 0 else wide
        total = wide.sum()
        return total * min(self.count, 1) if summed else total / finite.sum().clamp_min(1)

    def _rows(self, values: Sequence[Tensor]) -> Tensor:
        """Examples' tensors ``[1, ...]`` (or ``[k, ...]``), one after the other in the order of the draw."""
        if len({value.shape[2:] for value in values}) > 1 or min(value.dim() for value in values) < 2:
            raise _Shapes
        if len({value.shape[1] for value in values}) == 1:
            rows = torch.cat(list(values))
            return (rows if self._order is None else rows[self._order]).flatten(0, 1)
        examples = [example for value in values for example in value]
        return torch.cat(examples if self._order is None else [examples[k] for k in self._order])

    def _filled_rows(self, values: Sequence[Tensor]) -> Tensor:
        """The same for rows of unlike shapes, which are filled up with zeros at their ends."""
        try:
            return self._rows(values)
        except _Shapes:
            if len({value.dim() for value in values}) > 1:
                raise
        shape = [max(sizes) for sizes in zip(*(value.shape[2:] for value in values), strict=True)]
        filled = [value.new_zeros((*value.shape[:2], *shape)) for value in values]
        for target, value in zip(filled, values, strict=True):
            target[tuple(map(slice, value.shape))] = value
        return self._rows(filled)

    def _deferred(self, leaves: Sequence[Any]) -> Any:
        first = leaves[0]
        if isinstance(first, MetricValue):
            if first.event.key not in self._results:
                raise Unlike
            return self._results[first.event.key]
        args, kwargs = self._tree([leaf.held for leaf in leaves], self._rows)
        return first.function(*args, **kwargs)

    # -- learning -------------------------------------------------------------------------------------------------

    def compared(self, plain: Trace) -> dict[Hashable, bool]:
        """``sums`` as they make the values of a plain run of the same examples in one batch; no entry where neither the
        sum nor the mean does, or both do."""
        found: dict[Hashable, bool] = {}
        for key, event in plain.events.items():
            same: list[Any] = [trace.events.get(key) for trace in self.traces]
            if None in same or (isinstance(event, MetricEvent) and isinstance(event.metric, MeanMetric)):
                continue
            columns = [leaves_of(_given(e)) for e in same]
            if any(len(column) != len(columns[0]) for column in columns):
                continue
            for position, (one, *leaves) in enumerate(zip(leaves_of(_given(event)), *columns, strict=False)):
                total, mean = self._sum_and_mean(leaves)
                value = _plain_number(plain, one)
                if total is not None and value is not None and _near(value, total) != _near(value, mean):
                    found[key, position] = _near(value, total)
        return found

    def _sum_and_mean(self, leaves: Sequence[Any]) -> tuple[float | None, float | None]:
        """Of 0-dim values, ``None`` of others."""
        if not all(isinstance(leaf, Slot | int | float) for leaf in leaves):
            return None, None
        columns = [self._column(leaf, t) for t, leaf in enumerate(leaves)]
        if any(column.dim() != 1 for column in columns):
            return None, None
        values = torch.cat(columns).double()
        return float(values.sum()), float(values.mean())

    # -- output ---------------------------------------------------------------------------------------------------

    def _output(self) -> Any:
        returned = [t for t, trace in enumerate(self.traces) if trace.output is not None]
        if not returned:
            return None
        kept = self if len(returned) == len(self.traces) else self._only(returned)
        outputs = [trace.output for trace in kept.traces]
        if not isinstance(outputs[0], dict):
            return kept._value([output.get("loss") if isinstance(output, dict) else output for output in outputs])
        entries: dict[Any, Any] = {}
        for key in outputs[0]:
            try:
                entries[key] = kept._entry(key, outputs)
            except Unlike:
                self._warn(f"the entry {key!r} of what training_step returns")
        return entries

    def _entry(self, key: Any, outputs: Sequence[Any]) -> Any:
        if any(not isinstance(output, dict) or key not in output for output in outputs):
            raise Unlike
        values = [output[key] for output in outputs]
        return self._value(values) if key == "loss" else self._tree(values, self._filled_rows)

    def _only(self, traces: Sequence[int]) -> Playback:
        """Of some traces, with the results of all."""
        places = None if self.places is None else [self.places[t] for t in traces]
        only = Playback(
            [self.traces[t] for t in traces], [self.tensors[t] for t in traces],
            self.count, places, self._warn, self._sums,
        )  # fmt: skip
        only._results = self._results
        return only


class _Shapes(Unlike):
    """Rows of unlike shapes."""


def _given(event: LogEvent | MetricEvent) -> Any:
    return event.value if isinstance(event, LogEvent) else (event.args, event.kwargs)


def _plain_number(trace: Trace, leaf: Any) -> float | None:
    if isinstance(leaf, Slot):
        value = trace.tensors[leaf.index]
        return float(value) if value.dim() == 0 else None
    return float(leaf) if isinstance(leaf, int | float) else None


def _near(a: float, b: float | None) -> bool:
    return b is not None and abs(a - b) <= 1e-3 * abs(b)


def _reweighted(call: tuple[Any, Any], times: int) -> tuple[Any, Any]:
    args, kwargs = call

    def rescaled(weight: Any) -> Any:
        return weight * times if isinstance(weight, int | float) else weight

    return (*args[:1], *map(rescaled, args[1:])), {k: rescaled(v) if k == "weight" else v for k, v in kwargs.items()}


def _called(event: LogEvent | MetricEvent) -> str:
    """The call by name, for a message."""
    if isinstance(event, MetricEvent):
        return f"a call of {type(event.metric).__name__}.{event.method}()"
    return "a call of self.log_dict(...)" if event.name is None else f"self.log({event.name!r}, ...)"
