"""``self.log`` and torchmetrics calls of ``training_step``: recorded for single examples, replayed for the batch.

An engine runs the user's step on one example at a time (or on all at once under ``vmap``, which looks the same to
the step). Logging then and there would log one example, or a tensor that is dead outside ``vmap``. So ``log``,
``log_dict`` and the metrics' ``update`` and ``forward`` are shadowed while tracing; what they were given is carried
out as tensors, and the real calls are made once, with values of the whole batch:

====================================  ============================================================
recorded                              replayed
====================================  ============================================================
0-dim tensor logged                   its mean over the examples
float logged                          its mean over the examples (they agree, but under ``"loop"``)
int logged                            as it is
a metric or collection logged         the object
what ``metric(...)`` returned         what it returns for the batch
tensors given to a metric             concatenated along dimension 0; 0-dim ones: the mean
``batch_size=`` of a log call         times the batch's size
====================================  ============================================================

What this cannot give its plain value is refused in one sentence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_lap2.errors import UnsupportedModelError


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor that the trace carries out: its place in :attr:`Trace.tensors`."""

    index: int


class MetricValue:
    """What a recorded metric call returned: known only after the replay, so good for logging and returning only."""

    def __init__(self, event: int, metric: nn.Module, path: tuple[Any, ...] = ()) -> None:
        self._event, self._metric, self._path = event, metric, path

    def __getitem__(self, key: Any) -> MetricValue:
        return MetricValue(self._event, self._metric, (*self._path, key))

    def keys(self) -> list[str]:
        if isinstance(self._metric, MetricCollection) and not self._path:
            return [str(key) for key in self._metric.keys()]  # noqa: SIM118 - renamed keys, not the modules'
        self._refuse()

    def items(self) -> list[tuple[str, MetricValue]]:
        return [(key, self[key]) for key in self.keys()]

    def values(self) -> list[MetricValue]:
        return [self[key] for key in self.keys()]

    def resolve(self, results: Sequence[Any]) -> Any:
        value = results[self._event]
        for key in self._path:
            value = value[key]
        return value

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedModelError(
            f"training_step computes with the value that {type(self._metric).__name__} returned. That value is known "
            "only once all examples of the batch have run: log it or the metric object as it is, or do the "
            "arithmetic on torchmetrics objects (they can be added and scaled) or in on_train_epoch_end"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        for value in args:
            if isinstance(value, MetricValue):
                value._refuse()
        raise UnsupportedModelError("training_step computes with the value that a torchmetrics object returned")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __neg__ = __pow__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = __iter__ = _refuse
    __float__ = __int__ = __format__ = __str__ = _refuse


_RETURNED = (Tensor, MetricValue, str, int, float, bool)


@dataclass(frozen=True)
class LogEvent:
    """``owner.log(name, value, **options)``; with ``name`` None, ``owner.log_dict(value, **options)``."""

    owner: nn.Module
    name: str | None
    value: Any
    options: dict[str, Any]


@dataclass(frozen=True)
class MetricEvent:
    """``metric.update(*args, **kwargs)``, or ``metric(*args, **kwargs)`` where ``forward``."""

    metric: nn.Module
    forward: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Trace:
    """One run of the step: what it called and returned, tensors replaced by :class:`Slot`."""

    tensors: list[Tensor] = field(default_factory=list)
    events: list[LogEvent | MetricEvent] = field(default_factory=list)
    output: Any = None

    def hold(self, value: Any) -> Any:
        """``value`` with every tensor in it replaced by a slot."""
        return map_leaves(self._slot, value)

    def _slot(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        self.tensors.append(leaf.detach())
        return Slot(len(self.tensors) - 1)

    def take_output(self, output: Any) -> Tensor | None:
        """Keeps what ``training_step`` returned and gives its loss, 0-dim and with its graph, or ``None``."""
        if output is None:
            return None
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UnsupportedModelError(
                "training_step must return a loss tensor with one element, a dict with such a 'loss', or None; got "
                + (f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__)
            )
        kept = dict(output) if isinstance(output, Mapping) else output
        # objects that nothing is known of (a cache of keys and values, say) may hold dead tensors: not returned
        self.output = self.hold(map_leaves(lambda v: v if isinstance(v, _RETURNED) else None, kept))
        return loss.reshape(())


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``function`` applied to whatever is not a tuple, list or dict."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_leaves(function, value) for value in tree]
    if isinstance(tree, tuple):
        items = [map_leaves(function, value) for value in tree]
        return type(tree)(*items) if hasattr(type(tree), "_fields") else tuple(items)
    return function(tree)


class Recorder:
    """Shadows the logging of one module while tracing.

    Attributes:
        trace: the run in progress.
        names: every name logged so far.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.trace = Trace()
        self.names: set[str] = set()

    def begin(self) -> Trace:
        self.trace = Trace()
        return self.trace

    @contextmanager
    def shadowing(self) -> Iterator[None]:
        """Records instead of logging, inside; afterwards every attribute is as it was."""
        undo: list[tuple[nn.Module, str, Any]] = []
        try:
            for owner in self.module.modules():
                for name, stand_in in self._stand_ins(owner).items():
                    undo.append((owner, name, owner.__dict__.get(name, undo)))
                    owner.__dict__[name] = stand_in
            yield
        finally:
            for owner, name, before in reversed(undo):
                if before is undo:
                    owner.__dict__.pop(name, None)
                else:
                    owner.__dict__[name] = before

    def _stand_ins(self, owner: nn.Module) -> dict[str, Callable[..., Any]]:
        if isinstance(owner, Metric | MetricCollection):
            return {
                "update": lambda *args, **kwargs: self._metric(owner, False, args, kwargs),
                "forward": lambda *args, **kwargs: self._metric(owner, True, args, kwargs),
                "compute": lambda *args, **kwargs: _refuse_method(owner, "compute"),
                "reset": lambda *args, **kwargs: _refuse_method(owner, "reset"),
            }
        if callable(getattr(owner, "log", None)) and callable(getattr(owner, "log_dict", None)):
            return {
                "log": lambda *args, **kwargs: self._log(owner, _arguments(owner, "log", args, kwargs)),
                "log_dict": lambda *args, **kwargs: self._log_dict(owner, _arguments(owner, "log_dict", args, kwargs)),
            }
        return {}

    def _metric(self, metric: nn.Module, forward: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hold = self.trace.hold
        self.trace.events.append(MetricEvent(metric, forward, hold(args), hold(kwargs)))
        return MetricValue(len(self.trace.events) - 1, metric) if forward else None

    def _log(self, owner: nn.Module, options: dict[str, Any]) -> None:
        name, value = options.pop("name"), options.pop("value")
        _check_reduction(name, options)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"self.log({name!r}, ...): a tensor must have a single element, got {value.shape}")
            if not value.dtype.is_floating_point:
                raise UnsupportedModelError(
                    f"self.log({name!r}, ...) logs an integer tensor. A count over the batch cannot be told from a "
                    "value, and the step sees one example at a time: log a mean, as in `.float().mean()`"
                )
        self.names.add(name)
        self.trace.events.append(LogEvent(owner, name, self.trace.hold(value), options))

    def _log_dict(self, owner: nn.Module, options: dict[str, Any]) -> None:
        dictionary = options.pop("dictionary")
        _check_reduction("dict", options)
        if isinstance(dictionary, MetricCollection | MetricValue):
            self.names.update(str(key) for key in dictionary.keys())  # noqa: SIM118
            self.trace.events.append(LogEvent(owner, None, dictionary, options))
            return
        for name, value in dictionary.items():
            self._log(owner, {"name": name, "value": value, **options})


def _arguments(owner: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a log call by name."""
    bound = inspect.signature(getattr(type(owner), method)).bind(owner, *args, **kwargs)
    named: dict[str, Any] = {}
    for name, parameter in list(bound.signature.parameters.items())[1:]:
        if name in bound.arguments:
            value = bound.arguments[name]
            named.update(value if parameter.kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named


def _check_reduction(name: Any, options: dict[str, Any]) -> None:
    if options.get("reduce_fx") in ("sum", sum, torch.sum):
        raise UnsupportedModelError(
            f"self.log({name!r}, ..., reduce_fx='sum') adds up values of batches, but the step sees one example at "
            "a time, so whether a value is a batch's sum or mean is unknown: log a mean, or use a SumMetric"
        )


def _refuse_method(metric: nn.Module, method: str) -> NoReturn:
    raise UnsupportedModelError(
        f"training_step calls {type(metric).__name__}.{method}(). The metric is updated once per batch, after the "
        f"step has run: log the metric object and let Lightning call {method}(), or do so in on_train_epoch_end"
    )
