"""A loader batch on its way from the loader to ``training_step``.

The step gets the examples as they were delivered. Hooks that Lightning hands the batch to (``on_train_batch_start``
and the like) get one batch of them all to look at, a copy where a hook is not Lightning's own; what they write into
it reaches nobody, so a hook that tries is refused by name. The user's batch transfer hooks run on one example at a
time.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_lap2.batches import ExampleBatch, flatten
from lightning_lap2.batches.containers import map_tensors
from lightning_lap2.callback.trainer.batches import transferred
from lightning_lap2.errors import UnsupportedSettingError
from lightning_lap2.gradients.marks import mark_outside

_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOOKING_ON = ("on_train_batch_start", "on_train_batch_end")


def find_examples(batch: Any) -> ExampleBatch | None:
    """The examples in what a train loader gave, in whatever container the loader was given in; ``None`` for a batch
    of another loader."""
    found = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, ExampleBatch)]
    return found[0] if len(found) == 1 else None


class Delivery:
    """Brings batches of one fit to the device, to the hooks and to the step.

    Args:
        trainer, module: of the fit.
        pl: the Lightning namespace.
    """

    def __init__(self, trainer: Any, module: Any, pl: ModuleType) -> None:
        self._trainer, self._module, self._pl = trainer, module, pl
        self._container: Any = None
        self._shown: Any = None
        self._before: list[tuple[Tensor, int]] = []
        self.examples: ExampleBatch | None = None

    def deliver(self, batch: Any, examples: ExampleBatch) -> Any:
        """Takes over a batch from the loader; returns what hooks are shown."""
        self._container = tree_flatten(batch)[1]
        self.examples = self.moved(examples)
        shown = self.wrapped(self.examples.joined())
        if self._onlookers():
            shown = map_tensors(Tensor.clone, shown)
            mark_outside(flatten(shown).tensors)
        self._shown, self._before = shown, [(t, t._version) for t in flatten(shown).tensors]
        return shown

    def moved(self, examples: ExampleBatch) -> ExampleBatch:
        """As far as Lightning's own code takes a batch: floats in the Trainer's precision, and on the device unless
        the user's hooks do that."""
        convert = self._trainer.precision_plugin.convert_input
        examples = examples.map(lambda leaf: convert(leaf) if isinstance(leaf, Tensor) else leaf)
        if self._overridden(_TRANSFER[0]) or self._overridden(_TRANSFER[1]):
            return examples
        device = self._trainer.strategy.root_device
        return examples if device.type == "cpu" else examples.to(device, non_blocking=True)

    def prepare(self, batch: Any) -> Any:
        """From one example's batch to the step's first argument."""
        batch, device = self.wrapped(batch), self._trainer.strategy.root_device
        arguments = {_TRANSFER[0]: (0,), _TRANSFER[1]: (device, 0), _TRANSFER[2]: (0,)}
        for name, others in arguments.items():
            if self._overridden(name) or (name == _TRANSFER[1] and self._overridden(_TRANSFER[0])):
                batch = self._module._call_batch_hook(name, batch, *others)
        return batch

    def wrapped(self, batch: Any) -> Any:
        """In the list or dict that the loader was given in."""
        container = self._container
        if container is None:
            container = self._trainer.fit_loop._combined_loader._spec
        return tree_unflatten([batch], container)

    def plain(self, batch: Any) -> Any:
        """A batch that plain training would make, taken to the step as plain training would."""
        return transferred(self._trainer, self._module, tree_map(lambda leaf: leaf, self.wrapped(batch)))

    def take(self) -> ExampleBatch:
        """The examples for the step, once.

        Raises:
            UnsupportedSettingError: a hook wrote into the batch it was shown.
        """
        examples, self.examples = self.examples, None
        assert examples is not None
        now = flatten(self._shown).tensors
        if len(now) != len(self._before) or any(
            a is not b or a._version != version for a, (b, version) in zip(now, self._before, strict=True)
        ):
            raise UnsupportedSettingError(
                f"the batch was changed in a hook ({', '.join(self._onlookers()) or 'on_train_batch_start'}): hooks "
                "see all examples together, so what they write would carry one record into another's gradient. "
                "Transform each example by itself: in the data set, in on_after_batch_transfer, or in training_step"
            )
        return examples

    @property
    def transforms(self) -> bool:
        """Whether batches pass through hooks of the user's."""
        return any(map(self._overridden, _TRANSFER))

    def _overridden(self, name: str) -> bool:
        """Whether a batch transfer hook is the user's."""
        selector = self._trainer._data_connector._datahook_selector
        owner = selector.get_instance(name)
        own = getattr(self._pl.core.hooks.DataHooks, name)
        return name in vars(owner) or getattr(type(owner), name, own) is not own

    def _onlookers(self) -> list[str]:
        """Hooks of the user's that are shown the batch."""
        found = []
        base = self._pl.Callback
        for callback in self._trainer.callbacks:
            if getattr(callback, "is_lap2_privacy", False) or _is_lightnings(type(callback)):
                continue
            found += [
                f"{type(callback).__name__}.{name}"
                for name in _LOOKING_ON
                if name in vars(callback) or getattr(type(callback), name) is not getattr(base, name)
            ]
        module_base = self._pl.LightningModule
        found += [
            f"{type(self._module).__name__}.{name}"
            for name in _LOOKING_ON
            if name in vars(self._module) or getattr(type(self._module), name) is not getattr(module_base, name)
        ]
        return found


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.startswith(("lightning.", "pytorch_lightning."))
