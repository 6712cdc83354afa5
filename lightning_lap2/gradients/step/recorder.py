"""``self.log`` and torchmetrics calls of ``training_step``: recorded for single examples, replayed for the batch.

An engine runs the user's step on one example at a time (or on all at once under ``vmap``, which looks the same to
the step). Logging then and there would log one example, or a tensor that is dead outside ``vmap``. So ``log``,
``log_dict`` and the metrics' methods are shadowed while tracing; what they were given is carried out as tensors, and
the real calls are made once, with values of the whole batch:

====================================  ============================================================
recorded                              replayed
====================================  ============================================================
0-dim float tensor, float             its mean over the examples whose value is finite
0-dim integer tensor (a count)        its sum
either of them, ``reduce_fx="sum"``   its sum
int                                   as it is, or its sum where examples differ
a metric or collection logged         the object
what a metric returned, and what was  computed from what it returns for the batch
computed from that
tensors given to a metric             one after the other along dimension 0
``batch_size=`` of a log call         times the batch's size
====================================  ============================================================

A call that some examples make and others do not has no value for the batch: it is left out, with one warning.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_lap2.errors import UnsupportedModelError
from lightning_lap2.gradients.step.tracing import layers_of
from lightning_lap2.gradients.step.values import Number


class Unlike(Exception):
    """Examples differ in a way that leaves no value for the batch."""


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor that the trace carries out.

    Attributes:
        index: its place in :attr:`Trace.tensors`.
        number: whether it was a Python number.
    """

    index: int
    number: bool = False


class Deferred:
    """A value that is known only once all examples have run, and what is computed from it.

    It can be logged, returned and computed with, by operators and torch functions; it cannot decide a branch.

    Attributes:
        function: of ``args`` and ``kwargs`` that gives the value.
        held: ``(args, kwargs)`` with slots in place of tensors.
    """

    def __init__(self, trace: Trace, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.trace, self.function, self.held = trace, function, (trace.hold(args), trace.hold(kwargs))
        self._live: tuple[Any, Any] | None = (args, kwargs)
        trace.deferred.append(self)

    def alone(self) -> Any:
        """The value of this example alone, with its graph: for a loss."""
        assert self._live is not None
        args, kwargs = map_leaves(_alone, self._live)
        return self.function(*args, **kwargs)

    def let_go(self) -> None:
        """The step has run; nothing of its graph stays."""
        self._live = None

    @property
    def what(self) -> str:
        """The metric at the root, for messages."""
        found = [leaf.what for leaf in leaves_of(self.held) if isinstance(leaf, Deferred)]
        return found[0] if found else "a metric"

    @property
    def device(self) -> torch.device:
        """That of the tensors which it is computed from; the CPU where there are none."""
        assert self._live is not None
        found = (leaf.device for leaf in leaves_of(self._live) if isinstance(leaf, Tensor | Deferred))
        return next(found, torch.device("cpu"))

    def __getitem__(self, key: Any) -> Deferred:
        return Deferred(self.trace, operator.getitem, (self, key), {})

    def item(self) -> Deferred:
        return Deferred(self.trace, _as_number, (self,), {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Deferred:
        first = next(leaf for leaf in leaves_of((args, kwargs or {})) if isinstance(leaf, Deferred))
        return Deferred(first.trace, func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not callable(getattr(Tensor, name, None)):
            raise AttributeError(name)
        return lambda *args, **kwargs: Deferred(self.trace, getattr(Tensor, name), (self, *args), kwargs)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise UnsupportedModelError(
            f"training_step turns the value that {self.what} returned into a plain number, a text or a condition. It "
            "is known only once all examples of the batch have run: log it, or compute with it by operators and torch "
            "functions (without float(), int(), `if`), or do so in on_train_batch_end or on_train_epoch_end"
        )

    __bool__ = __len__ = __iter__ = __float__ = __int__ = __index__ = __format__ = __str__ = _refuse


def _computing(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Deferred]:
    def method(self: Deferred, *others: Any) -> Deferred:
        operands = (self, *others)
        return Deferred(self.trace, function, operands[::-1] if swapped else operands, {})

    return method


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in (*_BINARY, "lt", "le", "gt", "ge", "neg", "abs"):
    setattr(Deferred, f"__{_name}__", _computing(getattr(operator, _name)))
for _name in _BINARY:
    setattr(Deferred, f"__r{_name}__", _computing(getattr(operator, _name), swapped=True))


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _alone(leaf: Any) -> Any:
    if isinstance(leaf, Deferred):
        return leaf.alone()
    return leaf.tensor if isinstance(leaf, Number) else leaf


class MetricValue(Deferred):
    """What a recorded metric call returned.

    Attributes:
        event: the call.
        unused: the metric as it was before any data, if known.
    """

    def __init__(self, trace: Trace, event: MetricEvent, args: Any, kwargs: Any, unused: nn.Module | None) -> None:
        self.trace, self.event, self.unused = trace, event, unused
        self.function, self.held = _returned, ((), {})  # what it is computed from, the event holds
        self._live = (args, kwargs)
        trace.deferred.append(self)

    @property
    def what(self) -> str:
        return type(self.event.metric).__name__

    def alone(self) -> Any:
        if self.event.method != "forward":
            raise UnsupportedModelError(
                f"the loss is computed from {self.what}.compute(), which holds examples of earlier batches: one "
                "example would reach another's gradient; compute the loss from this batch"
            )
        if self.unused is None:
            raise UnsupportedModelError(
                f"the loss is computed from what {self.what} returned, which may hold more than its states (it has "
                "parameters, was made after the fit began, or cannot be copied): use its functional form in the loss"
            )
        assert self._live is not None
        return _metric_alone(self.unused, self.event.metric, *self._live)

    def keys(self) -> list[str]:
        if isinstance(self.event.metric, MetricCollection):
            return [str(key) for key in self.event.metric.keys()]  # noqa: SIM118 - renamed keys, not the modules'
        self._refuse()

    def items(self) -> list[tuple[str, Deferred]]:
        return [(key, self[key]) for key in self.keys()]

    def values(self) -> list[Deferred]:
        return [self[key] for key in self.keys()]


def _returned(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise AssertionError("a metric's value is looked up, not computed")


def _metric_alone(unused: nn.Module, live: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a metric that has seen nothing returns for one example, with its graph; inside ``vmap`` as well.

    Args:
        unused: the metric as it was before the fit.
        live: as the step has it now. Its numbers, texts and tensors that are no states are taken over, since a hook or
            the step may have set them (a scale, say). What an earlier batch left there is withheld from the step: there
            the metric is as if it had seen nothing.
    """
    fresh = copy.deepcopy(unused)
    for part, now in zip(fresh.modules(), live.modules(), strict=True):
        if isinstance(part, Metric):
            part.reset()
            taken = vars(now).keys() - part._defaults.keys() - _OF_EVERY
            vars(part).update({k: vars(now)[k] for k in taken if isinstance(vars(now)[k], _SETTINGS)})
            part._enable_grad = True
    tensor = next((leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)), None)
    if tensor is not None:
        # states are added to in place, so they need the examples' dimension
        zero = tensor.detach().new_zeros(())
        for part in fresh.modules():
            for name in part._defaults if isinstance(part, Metric) else ():
                state = getattr(part, name)
                if isinstance(state, Tensor):
                    setattr(part, name, state + zero.to(state.dtype))
    args, kwargs = map_leaves(_alone, (args, kwargs))
    fresh.update(*args, **kwargs)  # type: ignore[operator]
    return fresh.compute()  # type: ignore[operator]


class _Plain(Metric):
    """A metric with nothing of its own."""

    def update(self) -> None:
        pass

    def compute(self) -> None:
        pass


_OF_EVERY = {*vars(_Plain()), "forward", "reset"}  # the latter are shadowed while tracing
_SETTINGS = (Tensor, Number, str, int, float, bool, type(None))
_RETURNED = (Tensor, Number, Deferred, str, int, float, bool)


@dataclass(frozen=True)
class LogEvent:
    """``owner.log(name, value, **options)``; with ``name`` None, ``owner.log_dict(value, **options)``.

    Attributes:
        key: equal for corresponding calls of different examples.
    """

    key: Hashable
    owner: nn.Module
    name: str | None
    value: Any
    options: dict[str, Any]


@dataclass(frozen=True)
class MetricEvent:
    """``metric.method(*args, **kwargs)`` for ``update``, ``forward``, ``compute`` or ``reset``."""

    key: Hashable
    metric: nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Trace:
    """One run of the step: what it called, returned and wrote to its module, tensors replaced by :class:`Slot`."""

    tensors: list[Tensor] = field(default_factory=list)
    events: dict[Hashable, LogEvent | MetricEvent] = field(default_factory=dict)
    output: Any = None
    writes: dict[int, dict[Any, Any]] = field(default_factory=dict)
    deferred: list[Deferred] = field(default_factory=list)
    _calls: Counter[Hashable] = field(default_factory=Counter)

    def key(self, *call: Hashable) -> Hashable:
        """A key for the next such call."""
        self._calls[call] += 1
        return (*call, self._calls[call])

    def hold(self, value: Any) -> Any:
        """``value`` with every tensor in it replaced by a slot."""
        return map_leaves(self._slot, value)

    def _slot(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor | Number):
            return leaf
        self.tensors.append(leaf.tensor if isinstance(leaf, Number) else leaf.detach())
        return Slot(len(self.tensors) - 1, number=isinstance(leaf, Number))

    def take_output(self, output: Any) -> Tensor | None:
        """Keeps what ``training_step`` returned and gives its loss, 0-dim and with its graph, or ``None``."""
        if output is None:
            self._let_go()
            return None
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Deferred):
            loss = loss.alone()
        self._let_go()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UnsupportedModelError(
                "training_step must return a loss tensor with one element, a dict with such a 'loss', or None; got "
                + (f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__)
            )
        kept = dict(output) if isinstance(output, Mapping) else output
        # objects that nothing is known of (a cache of keys and values, say) may hold dead tensors: not returned
        self.output = self.hold(map_leaves(lambda v: v if isinstance(v, _RETURNED) else None, kept))
        return loss.reshape(())

    def _let_go(self) -> None:
        for value in self.deferred:
            value.let_go()
        self.deferred.clear()


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


def leaves_of(tree: Any) -> list[Any]:
    """What :func:`map_leaves` maps over."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


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
        self._made: dict[int, tuple[nn.Module, dict[str, Callable[..., Any]]]] = {}
        self._unused = {id(m): _copied(m) for m in module.modules() if isinstance(m, Metric | MetricCollection)}

    def begin(self) -> Trace:
        self.trace = Trace()
        return self.trace

    @contextmanager
    def shadowing(self, layers: Iterable[nn.Module] | None = None) -> Iterator[None]:
        """Records instead of logging, inside; afterwards every attribute is as it was.

        Args:
            layers: all of the module, where they are known.
        """
        undo: list[tuple[nn.Module, str, Any]] = []
        # what stands in stays the same object from step to step: to the state's guard nothing has changed then
        self._made = {
            id(owner): self._made.get(id(owner)) or (owner, self._stand_ins(owner))
            for owner in (layers_of(self.module) if layers is None else layers)
            if _logs(owner)
        }
        try:
            for owner, stand_ins in self._made.values():
                for name, stand_in in stand_ins.items():
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
            return {name: self._metric_stand_in(owner, name) for name in ("update", "forward", "compute", "reset")}
        return {
            "log": lambda *args, **kwargs: self._log(owner, _arguments(owner, "log", args, kwargs)),
            "log_dict": lambda *args, **kwargs: self._log_dict(owner, _arguments(owner, "log_dict", args, kwargs)),
        }

    def _metric_stand_in(self, metric: nn.Module, method: str) -> Callable[..., Any]:
        def stand_in(*args: Any, **kwargs: Any) -> MetricValue | None:
            trace = self.trace
            event = MetricEvent(trace.key(method, id(metric)), metric, method, trace.hold(args), trace.hold(kwargs))
            trace.events[event.key] = event
            if method not in ("forward", "compute"):
                return None
            return MetricValue(trace, event, args, kwargs, self._unused.get(id(metric)))

        return stand_in

    def _log(self, owner: nn.Module, options: dict[str, Any]) -> None:
        name, value = options.pop("name"), options.pop("value")
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"self.log({name!r}, ...): a tensor must have a single element, got {value.shape}")
        self.names.add(name)
        trace = self.trace
        event = LogEvent(trace.key("log", id(owner), name), owner, name, trace.hold(value), options)
        trace.events[event.key] = event

    def _log_dict(self, owner: nn.Module, options: dict[str, Any]) -> None:
        dictionary = options.pop("dictionary")
        if isinstance(dictionary, MetricCollection | MetricValue):
            self.names.update(str(key) for key in dictionary.keys())  # noqa: SIM118
            event = LogEvent(self.trace.key("log_dict", id(owner)), owner, None, dictionary, options)
            self.trace.events[event.key] = event
            return
        for name, value in dictionary.items():
            self._log(owner, {"name": name, "value": value, **options})


def _logs(owner: nn.Module) -> bool:
    """Whether calls of a module are recorded."""
    if isinstance(owner, Metric | MetricCollection):
        return True
    if _keeps_attributes(type(owner)) and not (
        # the same as below, where asking takes a tenth of the time
        "log" in owner.__dict__ or "log" in owner._modules or "log" in owner._parameters or "log" in owner._buffers
    ):
        return False
    return callable(getattr(owner, "log", None)) and callable(getattr(owner, "log_dict", None))


def _keeps_attributes(kind: Any) -> bool:
    """Whether a class of modules has no ``log``, and finds attributes as ``nn.Module`` does."""
    return kind.__getattr__ is nn.Module.__getattr__ and not hasattr(kind, "log")


def _copied(metric: nn.Module) -> nn.Module | None:
    """A copy of a metric, where it is cheap (no network in it) and can be made."""
    if next(metric.parameters(), None) is not None:
        return None
    try:
        return copy.deepcopy(metric)
    except Exception:
        return None


def _signature(kind: type[Any], method: str) -> inspect.Signature:
    """Of ``log`` or ``log_dict`` as Lightning has it: an override may hand on ``*args`` and ``**kwargs``."""
    own = [inspect.signature(vars(base)[method]) for base in kind.__mro__ if method in vars(base)]
    return next((found for found in own if {"name", "dictionary"} & found.parameters.keys()), own[0])


def _arguments(owner: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a log call by name."""
    bound = _signature(type(owner), method).bind(owner, *args, **kwargs)
    named: dict[str, Any] = {}
    for name, parameter in list(bound.signature.parameters.items())[1:]:
        if name in bound.arguments:
            value = bound.arguments[name]
            named.update(value if parameter.kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named
