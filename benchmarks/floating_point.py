"""python -m benchmarks.floating_point: which floats our noise can reach, against textbook noise (Mironov 2012).

The attacker knows the un-noised value of a coordinate to the last bit under both hypotheses, v without the example
and v + g with it, and sees the released float. Where that float cannot come from one of the two, the answer is certain,
whatever epsilon is. Scale b = 1 throughout: multiplying by another scale rounds once more and changes little.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightning_lap2.noise import AesNoise, TorchNoise

Array = npt.NDArray[np.floating]
SAMPLES = 200_000
NEIGHBOURS = 4  # grid points tried on each side of the real-valued preimage


def _numpy_log(t: Array) -> Array:
    return np.log(t)


def _torch_log(t: Array) -> Array:
    return torch.from_numpy(np.ascontiguousarray(t)).log().numpy()


@dataclass(frozen=True)
class Source:
    """Laplace noise of scale 1 added to a value.

    Attributes:
        tail_bits: the smallest uniform is 2^-tail_bits.
        release: values [n] -> released fp32 values [n].
        magnitudes: real |noise| [n], index of a neighbour -> a magnitude this source can make near it.
        wide: the sum is formed in fp64 and rounded once.
    """

    name: str
    tail_bits: int
    release: Callable[[Array], Array]
    magnitudes: Callable[[Array, int], Array]
    wide: bool = False


def _library(kind: type[AesNoise] | type[TorchNoise], dtype: torch.dtype) -> Callable[[Array], Array]:
    def release(values: Array) -> Array:
        total = torch.from_numpy(values.copy()).to(dtype)
        kind(torch.device("cpu")).add_(total, 1.0, "laplace", release=0)
        return total.to(torch.float32).numpy()

    return release


def _float_grid(log: Callable[[Array], Array], real: type[np.floating]) -> Callable[[Array, int], Array]:
    """|log t| for the floats t around e^-|noise|: our sources reach every float t in (0, 1]."""

    def magnitudes(noise: Array, neighbour: int) -> Array:
        t = np.exp(-noise).astype(real)
        width = np.uint32 if real is np.float32 else np.uint64
        bits = t.view(width).astype(np.int64) + neighbour
        t = bits.astype(width).view(real)
        return -log(np.minimum(t, real(1.0)))

    return magnitudes


def _integer_grid(bits: int, real: type[np.floating]) -> Callable[[Array, int], Array]:
    """|log(1 - 2 |u - 1/2|)| for u a multiple of 2^-bits."""

    def magnitudes(noise: Array, neighbour: int) -> Array:
        k = np.rint(-np.expm1(-noise) * 2.0 ** (bits - 1)) + neighbour
        k = np.clip(k, 0.0, 2.0 ** (bits - 1) - 1.0)
        return -np.log1p(-(k * 2.0 ** (1 - bits)).astype(real))

    return magnitudes


def _textbook(bits: int, real: type[np.floating]) -> Callable[[Array], Array]:
    """-sign(u - 1/2) log(1 - 2 |u - 1/2|) with u of ``bits`` bits, in one float type throughout."""

    def release(values: Array) -> Array:
        word = np.random.default_rng().integers(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1), len(values))
        magnitude = -np.log1p(-(np.abs(word) * 2.0 ** (1 - bits)).astype(real))
        return (values.astype(real) + np.sign(word).astype(real) * magnitude).astype(np.float32)

    return release


SOURCES = (
    Source("ours, `aes`, fp32", 96, _library(AesNoise, torch.float32), _float_grid(_numpy_log, np.float32)),
    Source("ours, `torch`, fp32", 64, _library(TorchNoise, torch.float32), _float_grid(_torch_log, np.float32)),
    Source("textbook, 24-bit uniform, fp32", 23, _textbook(24, np.float32), _integer_grid(24, np.float32)),
    Source("textbook, 53-bit uniform, fp64, rounded to fp32", 52, _textbook(53, np.float64),
           _integer_grid(53, np.float64), wide=True),
    Source("ours, `aes`, fp64, rounded to fp32", 128, _library(AesNoise, torch.float64),
           _float_grid(_numpy_log, np.float64), wide=True),
)  # fmt: skip


def reachable(source: Source, value: Array, output: Array) -> npt.NDArray[np.bool_]:
    """Whether ``output`` can be released for ``value``, elementwise (up to ``NEIGHBOURS`` grid points away)."""
    noise = output.astype(np.float64) - value.astype(np.float64)
    sign = np.where(noise < 0.0, -1.0, 1.0)
    real = np.float64 if source.wide else np.float32
    found = np.zeros(len(output), np.bool_)
    for neighbour in range(-NEIGHBOURS, NEIGHBOURS + 1):
        magnitude = source.magnitudes(np.abs(noise), neighbour)
        made = (value.astype(real) + sign.astype(real) * magnitude.astype(real)).astype(np.float32)
        found |= made == output
    return found


def certain(source: Source, values: Array, shift: float) -> tuple[float, float]:
    """Share of releases of ``values`` that cannot come from ``values + shift``; and, as a check, the share that
    :func:`reachable` calls impossible although they happened."""
    output = source.release(values)
    other = (values + np.float32(shift)).astype(np.float32)
    return 1.0 - float(reachable(source, other, output).mean()), 1.0 - float(reachable(source, values, output).mean())


def holes_table(samples: int = SAMPLES) -> str:
    """A row per source: how far the tail reaches, and the share of coordinates that give the answer away."""
    rng = np.random.default_rng(0)
    typical = (0.1 * rng.standard_normal(samples)).astype(np.float32)
    large = (100.0 * rng.standard_normal(samples)).astype(np.float32)
    cases = [
        ("v = 0, g = 1", np.zeros(samples, np.float32), 1.0),
        ("v about 0.1, g = 1", typical, 1.0),
        ("v about 0.1, g = 1/161", typical, 1.0 / math.sqrt(26_010)),
        ("v about 100, g = 1", large, 1.0),
    ]
    lines = ["| source | tail ends at | " + " | ".join(c[0] for c in cases) + " |", "|---" * (len(cases) + 2) + "|"]
    for source in SOURCES:
        cells = []
        for _, values, shift in cases:
            share, wrong = certain(source, values, shift)
            cells.append(f"{100 * share:.2f} %" + (f" (check {100 * wrong:.2f} %)" if wrong else ""))
        lines.append(f"| {source.name} | {source.tail_bits * math.log(2):.1f} b | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def identified(source: Source, coordinates: int = 26_010, rounds: int = 100) -> float:
    """Share of releases of a whole vector that are told apart with certainty: even spread, C = b."""
    rng = np.random.default_rng(1)
    told = 0
    for _ in range(rounds):
        values = (0.1 * rng.standard_normal(coordinates)).astype(np.float32)
        told += certain(source, values, 1.0 / math.sqrt(coordinates))[0] > 0.0
    return told / rounds


def summation_table(coordinates: int = 26_010) -> str:
    """How much further than C the sum of clipped gradients moves when one of them is left out."""
    lines = ["| examples | fp32 sum | fp64 sum |", "|---|---|---|"]
    generator = torch.Generator().manual_seed(0)
    for examples in (258, 2048):
        gradients = torch.randn(examples, coordinates, generator=generator, dtype=torch.float64)
        gradients /= gradients.norm(dim=1, keepdim=True)
        cells = []
        for dtype in (torch.float32, torch.float64):
            given = gradients.to(dtype)
            moved = given.sum(0).double() - given[1:].sum(0).double()
            cells.append(f"{float((moved - given[0].double()).norm()):.1e} C")
        lines.append(f"| {examples:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    print("Share of released floats that are impossible under the other hypothesis:\n")
    print(holes_table())
    print("\nWhole vectors (26,010 coordinates, even spread, C = b) told apart with certainty:\n")
    for source in SOURCES:
        print(f"* {source.name}: {100 * identified(source, rounds=20):.0f} %")
    print("\nDistance between the change of the sum and the gradient left out:\n")
    print(summation_table())


if __name__ == "__main__":
    main()
