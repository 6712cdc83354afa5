"""Table II, MNIST and Fashion-MNIST with any network: a small head on scattering features, for the best accuracy.

    python paper/table2_scattering.py --dataset fashion_mnist --data FASHION_MNIST --cache features
    python paper/table2_scattering.py --dataset mnist --data MNIST --cache features --views 3 --augmentations 3

``--data`` is as for ``table2_mnist.py``. Features (``scattering.py``) are computed once, 1.3 ms of processor time per
image, and kept in the folder ``--cache``: a function of each image alone. Every flag below is a lever that can be
pulled by itself, and chosen with ``--held-out N``: the last N training images are tested on, and not trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import _path  # noqa: F401
import torch
import torch.nn.functional as F
from chunks import in_chunks
from data import Rows, idx, loader
from jsonargparse import ArgumentParser, Namespace
from scattering import Scattering
from torch import Tensor
from training import Row, fit, flags, held_out, summary, sweep
from tuning import Classifier, test_accuracy, tuning_flags

Features = Literal["pixels", "scattering"]
# The views of an image, in this order: shifts in pixels down and to the right; a mirror image for Fashion-MNIST alone,
# where a shoe may point either way.
SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))
EPS = (3.42, 2.53, 1.68, 0.88, 0.13)


class Views(Rows):
    """Features ``[N, V, D]`` in half precision: a fetch gives one of a record's views, drawn by itself."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, labels = self.__getitems__([index])
        return features[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        view = torch.randint(self.images.shape[1], chosen.shape)
        return self.images[chosen, view].float(), self.labels[chosen]  # [B, D], [B]


class ViewClassifier(Classifier):
    """Trained on one view at a time; tested on all views of a record, ``[B, V, D]``, by the mean of their scores."""

    def forward(self, inputs: list[Tensor]) -> Tensor:
        (x,) = inputs
        scores = super().forward([x.float()])
        return scores if x.ndim == 2 else scores.log_softmax(-1).mean(1)


def view(images: Tensor, number: int, mirror: bool) -> Tensor:
    """View ``number`` of images ``[N, H, W]``; with ``mirror`` every other one is mirrored. Shifts wrap around."""
    number, mirrored = divmod(number, 2) if mirror else (number, 0)
    shifted = images.roll(SHIFTS[number], dims=(1, 2))
    return shifted.flip(2) if mirrored else shifted


def computed(images: Tensor, kind: Features) -> Tensor:
    """``[N, H, W]`` to ``[N, channels, side, side]`` in half precision."""
    if kind == "pixels":
        return images[:, None].half()
    scatter = Scattering(images.shape[-1])
    return torch.cat([scatter(part).half() for part in images.split(250)])


def normalised(features: Tensor, groups: int) -> Tensor:
    """Channels in ``groups`` of mean 0 and variance 1 over a record's own features (GroupNorm), flat: ``[N, D]``."""
    if not groups:
        return features.flatten(1)
    parts = (F.group_norm(part.float(), groups).half() for part in features.split(5000))
    return torch.cat(list(parts)).flatten(1)


def rows(args: Namespace, split: str) -> Rows:
    """Features ``[N, V, D]`` of a split of the data set."""
    data, mirror, found = idx(args.data, split), args.dataset == "fashion_mnist", []
    images, labels = data.images[: args.subset, 0], data.labels[: args.subset]
    for number in range(args.views):
        folder = f"{args.cache}/{args.dataset}_{args.features}/{split}{number}" if args.cache else None
        key = {"dataset": args.dataset, "features": args.features, "split": split, "view": number}
        kept = in_chunks(
            folder, key, len(images), lambda chosen, k=number: computed(view(images[chosen], k, mirror), args.features)
        )
        found.append(normalised(kept, args.groups))
    return Rows(torch.stack(found, dim=1), labels)


def own_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--dataset", type=Literal["fashion_mnist", "mnist"], default="fashion_mnist")
    parser.add_argument("--data", type=str, required=True, help="folder with the four idx files, .gz or not")
    parser.add_argument("--features", type=Features, default="scattering")
    parser.add_argument("--groups", type=int, default=27, help="of the channels, normalised together; 0: as they are")
    parser.add_argument("--hidden", type=int, default=0, help="units of a tanh layer; 0: the head is linear")
    parser.add_argument("--views", type=int, default=1, help="of each image; the test takes the mean over them")
    parser.add_argument("--augmentations", type=int, default=1, help="views averaged in each example's gradient")
    parser.add_argument("--held-out", type=int, default=0, help="test on so many training images (to choose settings)")


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = flags(
        "MNIST and Fashion-MNIST on scattering features, privately (Table II with any network).",
        eps=EPS,
        csv_name="table2_scattering.csv",
        **{"steps": 200, "batch_size": 8192, "max_grad_norm": 0.5, "lr": 8.0, "averaging": 0.9},
    )
    own_flags(parser)
    tuning_flags(parser, optimizer="sgd", schedule="linear", pretrained=False)
    args = parser.parse_args(argv)
    most = len(SHIFTS) * (2 if args.dataset == "fashion_mnist" else 1)
    if not 1 <= args.views <= most:
        parser.error(f"--views {args.views}: 1 to {most} are known for {args.dataset}")
    train = rows(args, "train")
    train, test = held_out(train, args.held_out) if args.held_out else (train, rows(args, "t10k"))
    batches = Views(train.images, train.labels)

    def run(mechanism: str, eps: float, seed: int) -> Row:
        options = {"lr": args.lr, "optimizer": args.optimizer, "schedule": args.schedule, "hidden": args.hidden}
        model = ViewClassifier(train.images.shape[-1], int(train.labels.max()) + 1, **options)
        loaded = loader(batches, args.physical_batch or args.batch_size, shuffle=True)
        spent = fit(model, loaded, args, mechanism, eps, augmentations=args.augmentations)
        return {**spent, "accuracy": test_accuracy(model, loader(test, 1000))}

    names = ("features", "groups", "hidden", "views", "augmentations", "optimizer", "schedule", "held_out")
    found = sweep(args, {"experiment": args.dataset, **{name: args[name] for name in names}}, run)
    print(summary(found, ["accuracy", "epsilon"]))
    return found


if __name__ == "__main__":
    main()
