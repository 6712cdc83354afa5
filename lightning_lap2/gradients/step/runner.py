"""The user's step on one example at a time: what is around it, and which engine takes which examples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from lightning_lap2.batches import Examples
from lightning_lap2.batches.generators import Entropy, OwnGenerators, private_generators
from lightning_lap2.errors import IsolationError, UnsupportedModelError, UnsupportedSettingError
from lightning_lap2.gradients import physical
from lightning_lap2.gradients.clipping import Clipper
from lightning_lap2.gradients.exchange import OtherRankError
from lightning_lap2.gradients.lines import line_of
from lightning_lap2.gradients.marks import escaped, mark_outside
from lightning_lap2.gradients.parameters import ParameterLayout
from lightning_lap2.gradients.step.playback import Playback
from lightning_lap2.gradients.step.recorder import Recorder, Trace
from lightning_lap2.gradients.step.reseeding import reseeding_refused
from lightning_lap2.gradients.step.state import StateGuard, StateMemory
from lightning_lap2.gradients.step.stepcall import StepCall
from lightning_lap2.gradients.step.tracing import (
    batch_dimension_kept,
    batch_statistics_refused,
    check_batch_norm,
    check_layers,
    layers_of,
)
from lightning_lap2.gradients.step.values import Reading
from lightning_lap2.gradients.step.withheld import Withheld

if TYPE_CHECKING:
    from lightning_lap2.gradients.engine import Engine


class Traced(NamedTuple):
    """One run of the user's step, on b examples at once or on one.

    Attributes:
        trace: its log and metric calls.
        tensors: for each of ``trace.tensors`` the values ``[b, ...]``.
    """

    trace: Trace
    tensors: Sequence[Tensor]


class _Forward(nn.Module):
    """The user's module as a child, its ``training_step`` as ``forward``: what ``functional_call`` needs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.training_step(*args)  # type: ignore[operator]


class UserStep:
    """``training_step`` for one example's batch, recorded.

    Attributes:
        places: numbers in the draw of the examples that this step is for.
        module: the user's module.
        layers: all of it, as the batch found them.
        call: what the fit asks for.
        trace: of the latest run.
        may_repeat: whether an engine may have to run the user's code twice on the same examples, for which it then
            keeps a copy of them.
    """

    may_repeat = True

    def __init__(
        self, module: nn.Module, layers: Sequence[nn.Module], call: StepCall, places: Sequence[int],
        recorder: Recorder, guard: StateGuard, forward: _Forward, entropy: Entropy, own: OwnGenerators,
        layout: ParameterLayout,
    ) -> None:  # fmt: skip
        self.module, self.layers, self.call, self.places = module, layers, call, places
        self._recorder, self._guard, self._forward = recorder, guard, forward
        self._entropy, self._own, self._layout = entropy, own, layout
        self._reading = Reading()

    def at(self, index: int) -> UserStep:
        """The step for one of the examples."""
        alone = copy.copy(self)
        alone.places = self.places[index : index + 1]
        return alone

    @property
    def trace(self) -> Trace:
        return self._recorder.trace

    def __call__(self, batch: Any, by_slot: dict[str, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss (0-dim, a constant 0 where the step returned none) and the tensors that the trace carries out.

        Args:
            batch: one example's, from :meth:`Examples.rebuild` or :meth:`Examples.example`.
            by_slot: parameters by the names of :meth:`slot_names`, in place of the module's own.
        """
        trace = self._recorder.begin()
        self._reading.begin()
        args = (self.call.prepare(batch), *self.call.args[1:])
        with self.call.context():
            if by_slot is None:
                output = self.module.training_step(*args)  # type: ignore[operator]
            else:
                output = functional_call(self._forward, by_slot, args, tie_weights=False)
            loss = trace.take_output(output)
        with self._layout.at_rest():
            self._guard.take_writes(trace)
        if loss is None:
            loss = torch.zeros((), device=self._layout.device)
        return loss, tuple(trace.tensors)

    def keep(self, trace: Trace) -> None:
        """Makes ``trace`` the latest again: what ran since was for a look only."""
        self._recorder.trace = trace

    @property
    def secret(self) -> bytes:
        """What the random numbers of the last pass were made from."""
        return self._entropy.take(again=True)

    @contextmanager
    def tracing(self, *, together: bool = True, again: bool | bytes = False) -> Iterator[None]:
        """Around each pass over the user's code: generators of its own, and its module's state watched.

        Args:
            together: whether all examples run at once (``vmap``), where a tensor that is read stands for all of them.
            again: whether this repeats the last pass, whose random numbers come again; of an earlier pass its
                :attr:`secret`.
        """
        self._layout.begin_pass()
        self._guard.begin_call()
        self._reading = Reading()
        generators = private_generators(self._entropy, self._layout.device, own=self._own, again=again)
        # in this order: the generators' own calls are not the step's
        with generators, reseeding_refused(), self._reading.active() if together else nullcontext():
            yield

    def forget(self) -> None:
        """Puts the module back as the step found it: an engine gave up, another begins anew."""
        self._layout.begin_pass()
        self._guard.restore()

    def revised(self, first: int, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """``gradients`` of the examples from number ``first`` on, or what an audit puts in their place."""
        if self.call.revise is None:
            return gradients
        return self.call.revise(self.places[first : first + len(gradients[0])], gradients)

    def slot_names(self, layout: ParameterLayout) -> list[list[str]]:
        """For each parameter the names of all its slots for ``by_slot``, each slot once; none where it is withheld.

        A module that is reachable by two paths has one name here. With ``functional_call``'s own tying every path would
        be swapped, the second time for the traced tensor of the first, which would then stay in the user's module.
        """
        prefix = {
            id(owner): f"module.{path}." if path else "module."
            for path, owner in self.module.named_modules(remove_duplicate=True)
        }
        return [
            [prefix[id(owner)] + name for owner, name in slots if not isinstance(owner._parameters[name], Withheld)]
            for slots in layout.slots
        ]


class StepRunner:
    """Takes loader batches to clipped sums, by the first of its engines that can.

    Every engine sees one example at a time, so which one runs changes time and memory only. A group of examples that
    an engine cannot take goes to the next one by itself; what was learnt is kept for groups of that shape.

    Args:
        engines: in order of preference, at least one.

    Attributes:
        used: names of the engines that have run so far, in order of first use.
        memory: what is known about the module's state; made at the first batch where nobody sets it before.
    """

    def __init__(self, module: nn.Module, engines: Sequence[Engine]) -> None:
        self.module, self.engines = module, list(engines)
        self.used: list[str] = []
        self.passed_over: dict[str, str] = {}
        self._recorder, self._forward, self._own = Recorder(module), _Forward(module), OwnGenerators(module)
        self.memory: StateMemory | None = None
        self._unlike: set[str] = set()
        self._sums: dict[Hashable, bool] = {}
        self._latest: Playback | None = None
        self._kept = False
        self._first: dict[Any, int] = {}
        self._settled: set[Any] = set()
        self._writes_batch = False
        self._layout: ParameterLayout | None = None

    @property
    def logged_names(self) -> frozenset[str]:
        """Every name that ``training_step`` has logged so far."""
        return frozenset(self._recorder.names)

    def accumulate(self, call: StepCall, layout: ParameterLayout, clipper: Clipper, total: Tensor) -> Any:
        """Adds the clipped sum over the batch's examples to ``total``, see :meth:`Engine.add_clipped`.

        Returns what ``training_step`` would have returned for the batch, detached: a 0-dim loss tensor, a
        mapping with ``"loss"``, or ``None``. The module's parameters, their ``.grad`` and its attributes are
        left as they were.

        Raises:
            UnsupportedModelError: no engine takes some group; by the last of them, naming the layer, line or setting
                and what to use instead.
        """
        layers = layers_of(self.module)
        check_layers(self.module, layers, vmapped=False)
        if self.memory is None:
            self.memory = StateMemory(self.module)
        if "eval" not in self.memory.names:
            check_batch_norm(self.module, layers)
        if layout is not self._layout:
            # what an engine can do depends on what trains
            self._layout, self._first, self._settled = layout, {}, set()
        layout.begin_pass()
        guard: StateGuard | None = None
        watched = self._recorder.shadowing(layers)
        try:
            with layout.meeting(total), watched, batch_statistics_refused(self.module), torch.enable_grad():
                guard = StateGuard(self.memory)
                traced = self._groups(call, layers, guard, layout, clipper, total if call.count else None)
        except BaseException:
            if guard is not None:
                guard.abandon()
            raise
        traces, tensors = [run.trace for _, run in traced], [run.tensors for _, run in traced]
        # what is logged may wait for other ranks, which have all left their steps
        replay = Playback(traces, tensors, call.count, [own for own, _ in traced], self._no_value, self._sums)
        guard.close(traces, replay.value)
        if not traced:
            return None
        if self._kept:
            self._latest = replay
        with guard.replaying(traces):
            output = replay.run()
        mark_outside(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        guard.settle(replay.value)
        return output

    def _groups(
        self,
        call: StepCall,
        layers: Sequence[nn.Module],
        guard: StateGuard,
        layout: ParameterLayout,
        clipper: Clipper,
        total: Tensor | None,
    ) -> list[tuple[Sequence[int], Traced]]:
        """What was recorded of all groups, each run with the places of its examples."""
        batch, entropy = call.examples, Entropy(call.key)
        traced: list[tuple[Sequence[int], Traced]] = []
        for group, places in zip(batch.groups, batch.order, strict=True):
            step = UserStep(
                self.module, layers, call, places, self._recorder, guard, self._forward, entropy, self._own, layout
            )  # fmt: skip
            with batch_dimension_kept(group.rows_each):
                traced += self._group(group, step, layout, clipper, total)
        return traced

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Inside, what was last recorded is kept for :meth:`learn`."""
        self._kept = True
        try:
            yield
        finally:
            self._kept, self._latest = False, None

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """The log and metric calls of a plain run of the step inside."""
        with self._recorder.shadowing():
            yield self._recorder.begin()

    def learn(self, plain: Trace) -> None:
        """From a plain run of the latest call's examples in one batch: whether what is logged is a sum or a mean."""
        if self._latest is not None:
            self._sums = self._latest.compared(plain)

    def _no_value(self, what: str) -> None:
        """Warns once of each call that has no value for the batch."""
        if what not in self._unlike:
            self._unlike.add(what)
            warnings.warn(
                f"{what} is left out where it differs between examples (made for some of them only, or with values of "
                "unlike kinds): there is no value for the batch. Make the call for every example",
                stacklevel=2,
            )

    def _group(
        self, group: Examples, step: UserStep, layout: ParameterLayout, clipper: Clipper, total: Tensor | None
    ) -> list[tuple[Sequence[int], Traced]]:
        """What was recorded, each run with the places of its examples.

        A step may write into its batch (``x.mul_(2)``). Until it is known for this shape that it does not, and which
        engine takes it at once, every attempt gets a copy.
        """
        number, settled = self._first.get(group.key, 0), group.key in self._settled
        step.may_repeat = not settled
        while True:
            engine, before = self.engines[number], layout.contributions
            given = group if settled and not self._writes_batch else group.apart(0, group.count)
            try:
                found = engine.add_clipped(given, step, layout, clipper, total)
            except (IsolationError, UnsupportedSettingError):
                raise
            except UnsupportedModelError as error:
                _check_whole(engine.name, layout.contributions - before, error)
                number += 1
                if number == len(self.engines):
                    raise
                self.passed_over.setdefault(engine.name, str(error))
                self._first[group.key] = number
                step.forget()
                continue
            except OtherRankError:
                raise
            except Exception as error:
                if physical.is_escape(error):
                    raise escaped(line_of(error.__traceback__)) from error
                if step.call.skip_errors and self.used:  # a step that has never run is not one example's fault
                    _check_whole(engine.name, layout.contributions - before, error)
                    return self._one_by_one(group, step, layout, clipper, total)
                raise
            if engine.name not in self.used:
                self.used.append(engine.name)
            if not settled and total is not None:
                self._settled.add(group.key)
                self._writes_batch |= not given.holds_the_same(group)
            return list(zip(_shares(step.places, found), found, strict=True))

    def _one_by_one(
        self, group: Examples, step: UserStep, layout: ParameterLayout, clipper: Clipper, total: Tensor | None
    ) -> list[tuple[Sequence[int], Traced]]:
        """Every example by itself; one on which the user's code raises adds nothing and logs nothing."""
        step.forget()
        if group.count == 1:
            return []
        found: list[tuple[Sequence[int], Traced]] = []
        for index in range(group.count):
            found += self._group(group.apart(index, index + 1), step.at(index), layout, clipper, total)
        return found


def _check_whole(engine: str, contributions: int, error: Exception) -> None:
    """
    Raises:
        UnsupportedSettingError: an engine failed when a part of its sum was with other ranks already: beginning anew
            would add it twice.
    """
    if contributions:
        raise UnsupportedSettingError(
            f"engine={engine!r} gave up on examples after others of the same call had been added to sums that other "
            "ranks hold in shards, so the call cannot be repeated: use engine='ghost' without chunk_size, which adds "
            "all examples of a shape at once, and on_record_error='raise'"
        ) from error


def _shares(places: Sequence[int], traced: Sequence[Traced]) -> list[Sequence[int]]:
    """For each run the places of its examples."""
    shares, start = [], 0
    for run in traced:
        stop = start + (len(run.tensors[0]) if run.tensors else 1)
        shares.append(places[start:stop])
        start = stop
    return shares
