"""Users' hooks between steps: what they make of the batch must not come back into a step.

Around every hook that is not Lightning's own, tensors are followed by where they come from
(:mod:`~lightning_lap2.gradients.step.state.provenance`). What a hook computes from weights, state at fit start,
counters
and fresh randomness stays readable in a step (averages, momentum teachers, queues of weights). What it computes from
the batch, the outputs, metrics, or what a step left behind is withheld from later steps (class centres, codebooks,
memory banks).

Python numbers cannot be followed. A hook whose owner has read one of such a tensor, and that changes what a step
reads or how training goes on, is warned of at once and named in the report, unless
``Lap2Privacy(public_state=[...])`` lists the name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_lap2.callback.datastate import DataState
from lightning_lap2.callback.ledger.ledger import Ledger
from lightning_lap2.callback.trainer.patches import Patches
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.gradients.step.state import StateMemory
from lightning_lap2.gradients.step.state.content import Content
from lightning_lap2.gradients.step.state.provenance import Following, Reading
from lightning_lap2.gradients.step.state.walk import GONE, Node, is_same, kind, walk

_HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end",
    "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_validation_start",
    "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start",
    "on_validation_batch_end", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping",
    "lr_scheduler_step",
)  # fmt: skip
_LIMITS = ("max_epochs", "min_epochs", "max_steps", "min_steps")


class HookWatch:
    """Watches the hooks of one fit.

    Args:
        memory: what is known of the module's state.
        data: where records come from now, see :class:`~lightning_lap2.callback.datastate.DataState`.
        fetches: calls a function, while it is entered, before each fetch from the data outside the loader.
        public: names of attributes and settings that the user vouches for.
        warn: says something once to the user.
        settle: frees what a hook that used the model left of its weights on this rank; see ``FitSession``.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        pl: ModuleType,
        memory: StateMemory,
        ledger: Ledger,
        *,
        data: Callable[[], Sequence[tuple[str, Any]]],
        fetches: Callable[[Callable[[Any, str], None]], AbstractContextManager[None]],
        public: Sequence[str],
        warn: Callable[[str], None],
        settle: Callable[[], None],
    ) -> None:
        self._trainer, self._module, self._pl = trainer, module, pl
        self._memory, self._ledger, self._public, self._warn = memory, ledger, frozenset(public), warn
        self._data, self._fetches = data, fetches
        self._read: set[int] = set()  # owners that have read a number of a record's
        self._settle_weights = settle
        self._running: _Running | None = None

    def install(self, patches: Patches) -> None:
        """Shadows every hook of the user's until ``patches`` are undone."""
        for owner, base in [(self._module, self._pl.LightningModule)] + [
            (c, self._pl.Callback) for c in self._trainer.callbacks if _is_users(c)
        ]:
            for name in _HOOKS:
                hook = getattr(owner, name, None)
                if hook is not None and (name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)):
                    patches.shadow(owner, name, self._watched(owner, name, hook))

    def _watched(self, owner: Any, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._running is not None:  # called by another hook
                return hook(*args, **kwargs)
            with self._around(owner, f"{type(owner).__name__}.{name}"):
                return hook(*args, **kwargs)

        return watched

    @contextmanager
    def _around(self, owner: Any, name: str) -> Iterator[None]:
        self._settle_weights()
        for optimizer in self._trainer.optimizers:
            self._memory.provenance.clean(
                value
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, Tensor) and not self._memory.provenance.is_tainted(value)
            )
        provenance, on_read = self._memory.provenance, lambda: self._read.add(id(owner))
        following = Following(provenance, on_read)
        self._running = _Running(owner, name, following, _Seen(self._memory, self._trainer, self._data()))
        try:
            with following, Reading(provenance, on_read), self._fetches(lambda *_: on_read()):
                yield
            self._settle(self._running)
        finally:
            self._running = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, a step or a release happens that some hook called (``optimizer_step``)."""
        running = self._running
        if running is None:
            yield
            return
        with ExitStack() as undo:
            undo.enter_context(_disable_current_modes())
            self._settle(running)
            yield
        running.following.written.clear()
        running.seen = _Seen(self._memory, self._trainer, self._data())

    def released(self, gradients: Iterable[Tensor]) -> None:
        """These were noised: a hook may compute from them what it likes."""
        self._memory.provenance.clean(gradients)

    # -- what a hook did --------------------------------------------------------------------------------------------

    def _settle(self, running: _Running) -> None:
        """Judges what the hook has changed so far.

        Raises:
            UnsupportedSettingError: a parameter that the optimizer trains.
        """
        self._settle_weights()
        nodes, has_read = running.seen.nodes_now(), id(running.owner) in self._read
        for node in nodes:
            for key, value in node.items.items():
                before = running.seen.value(node, key)
                of = kind(value)
                if of == "tensor":
                    if before is not value or running.seen.written(value):
                        self._judge_tensor(running, node, key, value, replaced=before is not value)
                    continue
                changed = of in ("leaf", "array") and (not is_same(before, value) or running.seen.written(value))
                if changed and has_read and self._is_read(node.name(key)):
                    self._tell(running, node.name(key), "a step reads it")
        self._judge_gradients(running, has_read=has_read)
        self._judge_data(running, has_read=has_read)
        if has_read:
            for name in running.seen.settings_changed(self._trainer):
                self._tell(running, name, "it decides how training goes on")

    def _judge_tensor(self, running: _Running, node: Node, key: Any, value: Tensor, *, replaced: bool) -> None:
        provenance, name = self._memory.provenance, node.name(key)
        seen = replaced or running.following.saw_written(value)
        if provenance.is_known(value) and seen:
            return
        if self._is_public(name):
            provenance.clean([value])
            return
        provenance.taint(value)
        if isinstance(value, nn.Parameter) and self._is_optimised(value):
            raise UnsupportedSettingError(
                f"{running.name} writes the parameter {name}, which the optimizer trains, from something that may hold "
                "training records (the batch, outputs, metrics, an array): no noise protects that. Compute it from "
                "weights alone, take it out of the optimizer, or vouch for it with Lap2Privacy(public_state=[...])"
            )
        if isinstance(value, nn.Parameter) or node.path.endswith("._buffers"):
            self._tell(running, name, "checkpoints hold it; a training_step that reads it is refused", read=False)

    def _judge_gradients(self, running: _Running, *, has_read: bool) -> None:
        """What the optimizer is about to step on, and what it keeps: noised, or computed from what was.

        Raises:
            UnsupportedSettingError: a gradient, or the optimizer's state, that may hold records.
        """
        provenance = self._memory.provenance
        for name, parameter in self._module.named_parameters():
            gradient = parameter.grad
            if gradient is None or not (seen := running.seen.gradient_changed(parameter, running.following)):
                continue
            if self._is_public(f"{name}.grad"):
                provenance.clean([gradient])
            elif seen == "unseen" or not provenance.is_known(gradient):
                raise self._unprotected(running, f"the gradient of {name}", f"{name}.grad")
            elif has_read:
                self._tell(running, f"{name}.grad", "the optimizer steps on it")
        for optimizer in self._trainer.optimizers:
            for state in optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and provenance.is_tainted(value):
                        raise self._unprotected(
                            running, f"{key!r} in the state of {type(optimizer).__name__}", str(key)
                        )

    def _judge_data(self, running: _Running, *, has_read: bool) -> None:
        """What later draws are read from.

        Raises:
            UnsupportedSettingError: it was written from the batch or the outputs.
        """
        for name, of in running.seen.data.changes():
            if self._is_public(name):
                continue
            if of == "records" and not name.startswith("datamodule."):
                raise UnsupportedSettingError(
                    f"{running.name} writes {name} from training records (the batch, the outputs): later draws are "
                    "read from there, so one record would reach the others' gradients, and no noise protects that. "
                    "Compute it before fit from public data, or from the weights alone; or vouch for it with "
                    f"Lap2Privacy(public_state=[{name!r}])"
                )
            if has_read or of == "records":
                self._tell(running, name, "later draws and steps may read it", read=of != "records")

    def _unprotected(self, running: _Running, what: str, name: str) -> UnsupportedSettingError:
        return UnsupportedSettingError(
            f"{running.name} writes {what} from something that may hold training records (the batch, outputs, metrics, "
            "an array): no noise protects that, and it reaches the weights. Compute it from the gradients and weights "
            f"alone, or vouch for it with Lap2Privacy(public_state=[{name!r}])"
        )

    def _is_read(self, name: str) -> bool:
        """Whether the code that a step may run names every part of ``self.a.b[0]``."""
        return self._memory.names.issuperset(re.sub(r"\[.*?\]", "", name).split(".")[1:])

    def _is_optimised(self, parameter: nn.Parameter) -> bool:
        return any(
            held is parameter
            for optimizer in self._trainer.optimizers
            for group in optimizer.param_groups
            for held in group["params"]
        )

    def _is_public(self, name: str) -> bool:
        return name in self._public or name.removeprefix("self.") in self._public

    def _tell(self, running: _Running, name: str, why: str, *, read: bool = True) -> None:
        if self._is_public(name):
            return
        how = "has read numbers of training records and changes" if read else "computes from training records"
        text = f"{running.name} {how} {name}: no noise protects it, and {why}"
        if self._ledger.add_caveat(text):
            self._warn(
                f"{text}. Where it holds nothing of the records, list it: Lap2Privacy(public_state=[{_bare(name)!r}])"
            )


class _Running:
    """A hook that runs now."""

    def __init__(self, owner: Any, name: str, following: Following, seen: _Seen) -> None:
        self.owner, self.name, self.following, self.seen = owner, name, following, seen


class _Seen:
    """State and settings as they were."""

    def __init__(self, memory: StateMemory, trainer: Any, data: Sequence[tuple[str, Any]]) -> None:
        self.data = DataState(data)
        self._roots, self._nodes = memory.roots, memory.nodes()
        self._values = {(id(n.live), key): (n.live, value) for n in self._nodes for key, value in n.items.items()}
        self._contents = {
            id(value): Content(value) for _, value in self._values.values() if isinstance(value, np.ndarray | Tensor)
        }
        self._settings = _settings(trainer)
        gradients = [(id(p), p.grad) for p in memory.module.parameters() if p.grad is not None]
        self._gradients = {key: (gradient, Content(gradient)) for key, gradient in gradients}

    def gradient_changed(self, parameter: Tensor, following: Following) -> Literal["", "seen", "unseen"]:
        """Whether the gradient is another, or was written; ``"unseen"``: in a way that no operation showed."""
        gradient = parameter.grad
        assert gradient is not None
        before, content = self._gradients.get(id(parameter), (None, None))
        if before is not gradient or following.saw_written(gradient):
            return "seen"
        assert content is not None
        return "unseen" if content.written() else ""

    def nodes_now(self) -> list[Node]:
        """All containers as they are now."""
        return self._nodes if all(node.untouched() for node in self._nodes) else walk(self._roots)

    def value(self, node: Node, key: Any) -> Any:
        found = self._values.get((id(node.live), key))
        return GONE if found is None else found[1]

    def written(self, value: Any) -> bool:
        content = self._contents.get(id(value))
        return content is not None and content.written()

    def settings_changed(self, trainer: Any) -> list[str]:
        now = _settings(trainer)
        return [name for name, value in self._settings.items() if now[name] != value]


def _settings(trainer: Any) -> dict[str, Any]:
    """What decides how training goes on, beside the module."""
    groups = [
        [(k, float(v) if isinstance(v, Tensor) else v) for k, v in group.items() if k != "params"]
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]
    found = {"param_groups": groups, "should_stop": trainer.should_stop}
    found["requires_grad"] = [p.requires_grad for p in trainer.lightning_module.parameters()]
    found |= {name: getattr(trainer, name) for name in _LIMITS}
    found["limit_train_batches"] = trainer.limit_train_batches
    return found


def _is_users(callback: Any) -> bool:
    own = type(callback).__module__.startswith(("lightning.", "pytorch_lightning.", "lightning_lap2."))
    return not own and not getattr(callback, "is_lap2_privacy", False)


def _bare(name: str) -> str:
    return name.removeprefix("self.")
