"""What the user's step reads from its module and leaves on it.

An example's gradient must be a function of that example, the weights, and things that hold no records. So inside a step

* only clean state is visible. What an earlier step or its metrics left behind, and what hooks computed from batches, is
  withheld: reading it raises, naming the attribute; writing over it, or appending to a list that holds it, is allowed;
* every call of the step (per chunk under ``vmap``, per example under ``"loop"``) finds the same state as the first;
* parameters, buffers, other tensors and arrays must not be written in place: noticed by content, whatever the way.

What the calls wrote is put together once they have all run, and held by the module as after one plain step: one
entry, the mean of 0-dim tensors, the rows of others. Two things that a step wrote stay visible or come again, since
they are the same whatever the records are: an attribute that grew by one in every call (a counter), and what was set
where nothing or ``None`` was, from no example (a mask made on first use): the next call finds nothing there again. So
it is with a number or string that is replaced beside such a mask (the batch size that it was made for): the next call
finds the one from before the fit, and makes the mask anew.

Whether examples went into a tensor is known from :mod:`~lightning_lap2.gradients.marks`. What a step writes in places
that :mod:`walk` does not reach (files, caches of ``functools``, objects of libraries) cannot be seen from here.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_lap2.errors import IsolationError, UnsupportedModelError
from lightning_lap2.gradients.marks import DATA, data_read, known_clean, tensors_in
from lightning_lap2.gradients.physical import innermost
from lightning_lap2.gradients.step.recorder import Deferred, LogEvent, MetricEvent, Slot, Trace, Unlike
from lightning_lap2.gradients.step.state.content import Content, Contents
from lightning_lap2.gradients.step.state.provenance import Following, Provenance
from lightning_lap2.gradients.step.state.walk import (
    GONE,
    Node,
    Sight,
    entries,
    is_library,
    is_same,
    kind,
    put,
    reached_by_name,
    reached_code,
    reached_names,
    refill,
    walk,
)
from lightning_lap2.gradients.step.values import Number
from lightning_lap2.gradients.step.withheld import Withheld

_SHARED = (int, bool, type(None), type)  # one object serves every place that holds this value
_SCALARS = (bool, int, float, str)


class StateMemory:
    """What is known about a module's state from one step to the next.

    Args:
        module: the user's module.
        provenance: of its tensors; ``None``: all that the module holds now is clean, what is put there later is not.
        beside: further roots of state that a step can reach.

    Attributes:
        names: attributes and globals that occur in the code that a step may run.
    """

    def __init__(
        self,
        module: nn.Module,
        provenance: Provenance | None = None,
        beside: Iterable[tuple[str, Any]] = (),
    ) -> None:
        self.module = module
        code = reached_code(module)
        self.names = reached_names(code)
        self.roots = [("self", module), *reached_by_name(code), *beside]
        self.provenance = provenance or Provenance()
        self.provenance.clean(tensors_of(walk(self.roots)))
        # values that steps or hooks left: by identity, and where one object serves many places by place
        self._left: dict[int, Any] = {}
        self._places: dict[tuple[int, Any], tuple[Any, Any]] = {}
        self._again: dict[tuple[int, Any], tuple[Any, Any, Any]] = {}
        self._data: dict[int, Any] = {}
        self._counters: dict[tuple[int, Any], Any] | None = None
        self._sight: Sight | None = None
        self._contents: Contents | None = None
        self._taints = -1

    # -- looking ----------------------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """All containers as they are now."""
        known = self.known()
        return self.walk() if known is None else known[0].nodes

    def walk(self) -> list[Node]:
        """All containers, looked for anew; not into those that hold the train data."""
        return walk(self.roots, closed=self._data)

    def known(self) -> tuple[Sight, Contents] | None:
        """What was given to :meth:`remember`, if it is as it was then."""
        taints = self.provenance.taints
        if self._sight is None or self._contents is None or taints != self._taints:
            self._taints = taints
        elif self._sight.untouched():
            return self._sight, self._contents
        elif all(node.untouched() or node.same_entries() for node in self._sight.nodes):
            # what differs is nothing that is looked at, such as the recorder's stand-ins
            for node in self._sight.nodes:
                node.look()
            self._sight = Sight(self._sight.nodes)
            return self._sight, self._contents
        self.forget()
        return None

    def remember(self, sight: Sight, contents: Contents) -> None:
        """Nothing of this is withheld."""
        self._sight, self._contents = sight, contents

    def forget(self) -> None:
        """What was remembered has to be looked at anew."""
        self._sight = self._contents = None

    def holds_records(self, node: Node, key: Any, value: Any) -> bool:
        """Whether an entry may have been computed from records, or holds them."""
        if self.is_data(value):
            return True
        of = kind(value)
        if of == "tensor" and not self.provenance.is_clean(value):
            return True
        if isinstance(value, tuple):
            return any(self.holds_records(node, key, item) for item in value)
        if id(value) in self._left:
            return True
        place = self._places.get((id(node.live), None if node.ordered else key))
        return place is not None and place[0] is node.live and type(place[1]) is type(value) and place[1] == value

    def is_data(self, value: Any) -> bool:
        """Whether it holds the records that the module is trained on."""
        return id(value) in self._data

    def shown_again(self, node: Node, key: Any, value: Any) -> Any:
        """What a step finds instead of ``value``, which an earlier one made from no example; ``value`` otherwise."""
        found = self._again.get((id(node.live), key))
        return found[2] if found is not None and found[0] is node.live and found[1] is value else value

    def names_held(self) -> list[str]:
        """What may hold records now: attributes, and containers whose entries do."""
        return sorted(
            {
                node.path if node.ordered else node.name(key)
                for node in self.walk()
                for key, value in node.items.items()
                if self.holds_records(node, key, value) and not self.is_data(value)
            }
        )

    def hold_back_named(self, names: Iterable[str]) -> None:
        """Attributes of these names may hold records: an earlier fit, or the run of a checkpoint, said so."""
        known = frozenset(names)
        if not known:
            return
        for node in walk(self.roots):
            for key, value in node.items.items():
                if (node.path if node.ordered else node.name(key)) in known:
                    self.withhold(node, key, value)

    def hold_back_data(self, holders: Iterable[Any]) -> None:
        """These hold the records that the module is trained on: no step is to read them."""
        for value in holders:
            self._data[id(value)] = value
            for tensor in tensors_in(value):
                self.provenance.taint(tensor, DATA)
        self.forget()

    # -- learning ---------------------------------------------------------------------------------------------------

    def withhold(self, node: Node, key: Any, value: Any) -> None:
        """An entry may hold records from now on."""
        if isinstance(value, Tensor):
            self.provenance.taint(value)
        else:
            self.keep_back(node.live, None if node.ordered else key, value)
        self.forget()

    def keep_back(self, container: Any, key: Any, value: Any) -> None:
        """``container`` got ``value``, which may hold records, at ``key`` (``None``: anywhere)."""
        if isinstance(value, tuple):
            for item in value:
                self.keep_back(container, key, item)
        elif kind(value) == "tensor":
            return  # a storage that is not known to be clean
        elif isinstance(value, _SHARED):
            self._places[id(container), key] = (container, value)
        else:
            self._left[id(value)] = value

    def show_again(self, container: Any, key: Any, value: Any, before: Any) -> None:
        """``container`` got ``value`` at ``key``, from no example; a step is to find ``before`` there."""
        self._again[id(container), key] = (container, value, before)

    def settle_counters(self, grew: dict[tuple[int, Any], Any]) -> None:
        """The first batch tells which integers are counters; they must grow in every batch, and no others may.

        Args:
            grew: integers that grew by one in every call of the batch, with their containers.
        """
        if self._counters is None:
            self._counters = grew
        for place in self._counters.keys() ^ grew.keys():
            container = (self._counters | grew)[place]
            value = entries(container).get(place[1], GONE)
            if value is not GONE:
                self.keep_back(container, place[1], value)

    def forget_replaced(self, container: Any, key: Any) -> None:
        self._again.pop((id(container), key), None)
        self._places.pop((id(container), key), None)


@dataclass(frozen=True)
class _Old:
    """An entry that was there before the call, by its place."""

    key: Any


@dataclass(frozen=True)
class _Constant:
    """A value that no example went into."""

    value: Any


@dataclass(frozen=True)
class _Made:
    """A container or object that the call made: its parts by key, and how to put it together."""

    like: Any
    parts: dict[Any, Any]


class _Later:
    """Stands on the module for a value that is known once the recorded calls are made."""

    def __init__(self, found: list[Any]) -> None:
        self.found = found


class StateGuard:
    """Watches a module's state over the calls of one batch.

    Args:
        memory: of the module.
    """

    def __init__(self, memory: StateMemory) -> None:
        self.memory = memory
        known = memory.known()
        self._nodes = memory.walk() if known is None else known[0].nodes
        self._real: list[dict[Any, Any]] = [node.items for node in self._nodes]
        self._withheld = known is None and self._withhold()
        self._sight, self._contents = known or (Sight(self._nodes), Contents(self._nodes))
        if not self._withheld:
            memory.remember(self._sight, self._contents)
        self._running = False
        self._later: list[Any] = []
        # whether a call made something where nothing was, and the constants that replaced others in the same batch
        self._made, self._beside = False, list[tuple[Any, Any, Any, Any]]()
        self._contents.look()

    def _withhold(self) -> bool:
        """Puts stand-ins where a step must not look; whether there was anything."""
        found = False
        for node in self._nodes:
            if isinstance(node.live, tuple):
                continue
            visible = {}
            for key, value in node.items.items():
                shown = self.memory.shown_again(node, key, value)
                if shown is value and self.memory.holds_records(node, key, value):
                    data = self.memory.is_data(value)
                    shown = GONE if isinstance(node.live, set) else _withheld(node.name(key), data=data)
                if shown is not GONE:
                    visible[key] = shown
            if any(visible.get(key, GONE) is not value for key, value in node.items.items()):
                if node.ordered:
                    refill(node.live, visible.values())
                    visible = entries(node.live)
                else:
                    for key in node.items:
                        put(node.live, key, visible.get(key, GONE))
                node.items, found = visible, True
                node.look()
        return found

    # -- around each call -------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """Before each call of the step: what an earlier one left behind, should it have raised, is taken away."""
        if self._running:
            self.restore()
        self._running = True

    def take_writes(self, trace: Trace) -> None:
        """After the user's code, still inside ``vmap``: moves what it wrote into ``trace``, and the module back.

        Raises:
            UnsupportedModelError: a tensor was written in place, by attribute name.
        """
        counted = self._contents.counted()
        if counted is not None:
            self._refuse_write(*counted)
        if not self._sight.untouched():
            for number, node in enumerate(self._nodes):
                if not node.untouched() and node.changed():
                    trace.writes[number] = self._writes(node, trace)
            self.restore()
        self._running = False

    def _writes(self, node: Node, trace: Trace) -> dict[Any, Any]:
        hold = _Hold(trace, node)
        if not node.ordered:
            return {key: GONE if v is GONE else hold.held(v) for key, v in node.differing().items()}
        left = dict(node.items)
        found = []
        for value in entries(node.live).values():
            key = next((key for key, old in left.items() if old is value), GONE)
            if key is GONE:
                found.append(hold.held(value))
            else:
                del left[key]
                found.append(_Old(key))
        return dict(enumerate(found))

    def _refuse_write(self, number: int, key: Any) -> None:
        raise UnsupportedModelError(
            f"training_step writes {self._nodes[number].name(key)} in place. It would be written for each example, "
            "with values that no noise protects: update it in on_train_batch_end from public quantities (weights, "
            "counters), or assign a new value that the step does not read"
        )

    def restore(self) -> None:
        """The module as every call finds it."""
        self._running = False
        for node in self._nodes:
            if not node.untouched():
                node.restore()

    def abandon(self) -> None:
        """The module as it was before the batch."""
        for node, real in zip(self._nodes, self._real, strict=True):
            if node.items is not real:
                node.items = real
                node.restore()
            elif not node.untouched():
                node.restore()

    # -- after the batch --------------------------------------------------------------------------------------------

    def close(self, traces: Sequence[Trace], value_of: Callable[[Sequence[Any]], Any]) -> None:
        """After the batch: the module as one plain step would leave it, but for values of metrics.

        Args:
            value_of: the batch's value of what each of the traces holds of it.

        Raises:
            UnsupportedModelError: a tensor was written in place, or examples differ in what they write; by attribute
            name.
        """
        written = self._contents.restore()
        if written is not None:
            self._refuse_write(*written)
        shown = [node.items for node in self._nodes]
        if self._withheld or self._running:
            self.abandon()
        grew: dict[tuple[int, Any], Any] = {}
        for number in {n: None for trace in traces for n in trace.writes}:
            writes = [trace.writes.get(number, {}) for trace in traces]
            node = self._nodes[number]
            counted = self._apply(node, shown[number], writes, value_of)
            grew |= {(id(node.live), key): node.live for key in counted}
        for live, key, value, before in self._beside:
            if self._made:
                self.memory.show_again(live, key, value, before)
            else:
                self.memory.keep_back(live, key, value)
        self.memory.settle_counters(grew)

    @contextmanager
    def replaying(self, traces: Sequence[Trace]) -> Iterator[None]:
        """Inside, the recorded calls are made with values of the batch: what users' code leaves behind then holds
        records, and no step may read it."""
        roots = self._reached_by_replay(traces)
        if not roots:
            yield
            return
        nodes = walk(roots)
        arrays = {id(v): Content(v) for n in nodes for v in n.items.values() if kind(v) == "array"}
        with Following(self.memory.provenance, _unheard):
            yield
        for node in nodes:
            now = {} if node.untouched() else entries(node.live)
            changed = {k: v for k, v in now.items() if self._is_another(node, k, v)}
            written = {k: v for k, v in node.items.items() if id(v) in arrays and arrays[id(v)].written()}
            for key, value in (changed | written).items():
                self.memory.withhold(node, key, value)
                _keep_back_inside(self.memory, value)

    def _is_another(self, node: Node, key: Any, value: Any) -> bool:
        """Whether an entry is not what it was, nor clean; an equal number is another where the earlier was withheld."""
        if isinstance(value, Tensor) and self.memory.provenance.is_clean(value):
            return False
        before = node.items.get(key, GONE)
        return before is not value and not (is_same(before, value) and not self.memory.holds_records(node, key, before))

    def _reached_by_replay(self, traces: Sequence[Trace]) -> list[tuple[str, Any]]:
        """What the recorded calls may write: library metrics themselves, users' code whatever a step may reach."""
        events = [event for trace in traces for event in trace.events.values()]
        metrics = {id(event.metric): event.metric for event in events if isinstance(event, MetricEvent)}
        owners = {id(event.owner): event.owner for event in events if isinstance(event, LogEvent)}
        methods = [getattr(owner, name) for owner in owners.values() for name in ("log", "log_dict")]
        parts = [type(part) for metric in metrics.values() for part in metric.modules()]
        found = [("", metric) for metric in metrics.values()]
        return found if all(map(is_library, [*methods, *parts])) else [*self.memory.roots, *found]

    def settle(self, value_of: Callable[[Sequence[Any]], Any]) -> None:
        """Once the recorded calls are made: gives values of metrics to the places that wait for them."""
        for live in self._later:
            for node in walk([("", live)]):
                found = {k: value_of(v.found) for k, v in node.items.items() if isinstance(v, _Later)}
                if not found:
                    continue
                if node.ordered:
                    refill(node.live, [found.get(k, v) for k, v in node.items.items()])
                else:
                    for key, value in found.items():
                        put(node.live, key, value)
                for key, value in found.items():
                    self.memory.keep_back(node.live, None if node.ordered else key, value)
        self._later.clear()

    def _apply(
        self, node: Node, shown: dict[Any, Any], writes: list[dict[Any, Any]],
        value_of: Callable[[Sequence[Any]], Any],
    ) -> list[Any]:  # fmt: skip
        """Gives one container what the calls wrote to it; ``shown``: what they found there.

        Returns:
            Keys of the integers that grew by one in every call.
        """
        counted: list[Any] = []
        memory, batch = self.memory, _Batch(node, value_of)
        if any(_holds_deferred(v) for w in writes for v in w.values()):
            self._later.append(node.live)
        if node.ordered:
            if any(w.keys() != writes[0].keys() for w in writes):
                raise _differing(node.path)
            values = []
            for key in writes[0]:
                same = [w[key] for w in writes]
                if any(isinstance(v, _Old) for v in same):
                    if any(v != same[0] for v in same):
                        raise _differing(node.path)
                    values.append(node.items[same[0].key])
                else:
                    values.append(batch.value(same))
                    memory.keep_back(node.live, None, values[-1])
            refill(node.live, values)
            return []
        for key in {key: None for w in writes for key in w}:
            name = node.name(key)
            found = [w[key] for w in writes if key in w]
            constant = all(_is_constant(v) for v in found)
            if len(found) < len(writes) and not constant:
                raise _differing(name)
            before = shown.get(key, GONE)
            value = batch.value(found, name)
            put(node.live, key, value)
            memory.forget_replaced(node.live, key)
            if value is GONE:
                continue
            if _counted(before, found):
                counted.append(key)
            elif constant and _agree(found) and (before is GONE or before is None):
                memory.show_again(node.live, key, value, before)
                self._made = True
            elif constant and _agree(found) and isinstance(before, _SCALARS) and isinstance(value, _SCALARS):
                self._beside.append((node.live, key, value, before))
            else:
                memory.keep_back(node.live, key, value)
                _keep_back_inside(memory, value)
        return counted


class _Hold:
    """Moves values that a call wrote into its trace."""

    def __init__(self, trace: Trace, node: Node) -> None:
        self._trace, self._node = trace, node
        self._seen: dict[int, Any] = {}

    def held(self, value: Any) -> Any:
        if isinstance(value, Number):
            return self._trace.hold(value)
        if isinstance(value, Deferred):
            return value
        of = kind(value)
        if of == "tensor":
            return _Constant(innermost(value).detach()) if known_clean(value) else self._slot(value)
        if of == "array" and value.dtype.kind in "fiub":
            return _Made(np.ndarray, {0: self._slot(torch.from_numpy(value))})
        for key, old in self._node.items.items():
            if old is value and isinstance(value, Withheld):
                return _Old(key)
        if of not in ("container", "object") or isinstance(value, nn.Module):
            return _Constant(value)
        if id(value) not in self._seen:
            self._seen[id(value)] = made = _Made(value, {})
            made.parts.update({key: self.held(part) for key, part in entries(value).items()})
        return self._seen[id(value)]

    def _slot(self, value: Tensor) -> Slot:
        slot = self._trace.hold(value)
        assert isinstance(slot, Slot)
        return slot


class _Batch:
    """Puts together what the calls of a batch wrote to one container."""

    def __init__(self, node: Node, value_of: Callable[[Sequence[Any]], Any]) -> None:
        self._node, self._value_of = node, value_of

    def value(self, found: list[Any], name: str | None = None) -> Any:
        """The batch's value of one entry.

        Raises:
            UnsupportedModelError: it is made otherwise for some examples.
        """
        first, name = found[0], name or self._node.path
        if any(type(v) is not type(first) for v in found):
            raise _differing(name)
        if isinstance(first, Deferred):
            return _Later(found)
        if isinstance(first, Slot):
            try:
                return self._value_of(found)
            except Unlike:
                raise _differing(name) from None
        if isinstance(first, _Made):
            if any(v.parts.keys() != first.parts.keys() for v in found):
                raise _differing(name)
            parts = {key: self.value([v.parts[key] for v in found], name) for key in first.parts}
            return _made(first.like, parts)
        if isinstance(first, _Old):
            return self._node.items[first.key]
        if not isinstance(first, _Constant):
            return first
        values = [v.value for v in found]
        if isinstance(first.value, int | float) and not isinstance(first.value, bool) and len(set(values)) > 1:
            return sum(values) / len(values)
        return first.value


def _holds_deferred(value: Any) -> bool:
    if isinstance(value, _Made):
        return any(map(_holds_deferred, value.parts.values()))
    return isinstance(value, Deferred)


def _made(like: Any, parts: dict[Any, Any]) -> Any:
    if like is np.ndarray:
        return parts[0].numpy()
    if isinstance(like, tuple):
        return type(like)(*parts.values()) if hasattr(type(like), "_fields") else tuple(parts.values())
    made = copy.copy(like)
    if isinstance(like, list | deque | set):
        refill(made, parts.values())
    else:
        (made if isinstance(made, dict) else vars(made)).update(parts)
    return made


def _keep_back_inside(memory: StateMemory, value: Any) -> None:
    """The containers that a step made are withheld as a whole, and what is in them wherever it goes from there."""
    for node in walk([("", value)]):
        for key, part in node.items.items():
            memory.keep_back(node.live, None if node.ordered else key, part)


def _is_constant(value: Any) -> bool:
    if isinstance(value, _Made):
        return value.like is not np.ndarray and all(map(_is_constant, value.parts.values()))
    return value is GONE or isinstance(value, _Constant)


def _agree(found: list[Any]) -> bool:
    """Whether constants are the same in all calls; tensors and classes are, if they were made from the same things."""
    values = [v.value for v in found if isinstance(v, _Constant)]
    return all(
        v is values[0]
        or (isinstance(v, _SCALARS) and v == values[0])
        or isinstance(v, Tensor)
        or (isinstance(v, type) and isinstance(values[0], type) and v.__qualname__ == values[0].__qualname__)
        for v in values
    )


def _counted(before: Any, found: list[Any]) -> bool:
    """Whether an integer grew by one in every call, whatever the example."""
    return type(before) is int and all(
        isinstance(v, _Constant) and type(v.value) is int and v.value == before + 1 for v in found
    )


def _unheard() -> None:
    """A number was read: what changes is withheld whatever it is."""


def _withheld(name: str, *, data: bool) -> Withheld:
    if data:
        return Withheld(str(data_read(f"training_step reads {name},")), IsolationError)
    return Withheld(
        f"training_step reads {name}, which was computed from training records (by an earlier step or in a hook). "
        "Fed into a loss it would carry them past clipping and noise: a step may write such a value, not read it. "
        "Compute it from the weights in a hook, keep it for reading at the end of the epoch only, or drop it",
        IsolationError,
    )


def _differing(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"training_step writes {name} for some examples and not for others, or differently, so there is no value for "
        "the batch: write it for every example, outside `if`s on the data"
    )


def tensors_of(nodes: Iterable[Node]) -> list[Tensor]:
    """Every tensor that is an entry of one of the nodes."""
    return [v for node in nodes for v in node.items.values() if isinstance(v, Tensor)]
