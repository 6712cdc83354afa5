"""python -m benchmarks.floating_point: what exact released floats give away (Mironov 2012), of our releases, of what
they were before they lay on a grid, and of textbook noise.

The attacker knows the un-noised value of a coordinate to the last bit under both hypotheses, v without the example
and v + g with it, and sees the released float. Where that float cannot come from one of the two, the answer is certain,
whatever epsilon is; elsewhere it takes the likelihood of the float. Scale b = 1 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightning_lap2.accounting import MajorizedAccountant
from lightning_lap2.mechanism import Mechanism
from lightning_lap2.noise import AesNoise, NoiseSource, StagedAesNoise, TorchNoise
from lightning_lap2.noise.grid import round_, spacing

Array = npt.NDArray[np.floating]
CPU = torch.device("cpu")
SAMPLES = 200_000
NEIGHBOURS = 4  # grid points tried on each side of the real-valued preimage


def _numpy_log(t: Array) -> Array:
    return np.log(t)


def _torch_log(t: Array) -> Array:
    return torch.from_numpy(np.ascontiguousarray(t)).log().numpy()


def _to_float(total: Array) -> Array:
    return total.astype(np.float32)


def _to_grid(total: Array) -> Array:
    rounded = total.astype(np.float64)
    round_(rounded, 1.0)
    return rounded.astype(np.float32)


@dataclass(frozen=True)
class Source:
    """Laplace noise of scale 1 added to a value.

    Attributes:
        tail_bits: the smallest uniform is 2^-tail_bits.
        release: values [n] -> released values [n].
        magnitudes: real |noise| [n], index of a neighbour -> a magnitude this source can make near it.
        wide: the sum is formed in fp64.
        finish: how the sum becomes what is released.
        width: of the cells that are released; 0: single floats.
    """

    name: str
    tail_bits: int
    release: Callable[[Array], Array]
    magnitudes: Callable[[Array, int], Array]
    wide: bool = False
    finish: Callable[[Array], Array] = _to_float
    width: float = 0.0


def _library(source: NoiseSource, dtype: torch.dtype) -> Callable[[Array], Array]:
    def release(values: Array) -> Array:
        total = torch.from_numpy(values.copy()).to(dtype)
        source.add_(total, 1.0, "laplace", release=0)
        return total.to(torch.float32).numpy()

    return release


def _floats(values: Array) -> Array:
    """Noise that reaches every float t of fp32, added in fp32: what this library released before its grid."""
    words = np.random.default_rng().integers(0, 2**63, len(values))
    t = ((words >> 32) + (words & 0xFFFFFFFF) * 2.0**-32 + 2.0**-33) * 2.0**-31
    sign = np.random.default_rng().choice(np.array([-1, 1], np.float32), len(values))
    return values.astype(np.float32) + sign * np.log(t.astype(np.float32))


def _wide(values: Array) -> Array:
    """The same in fp64, rounded to fp32."""
    noise = torch.empty(len(values), dtype=torch.float64)
    AesNoise(CPU).fill_(noise, "laplace", release=0)
    return (values.astype(np.float64) + noise.numpy()).astype(np.float32)


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


def _ours(name: str, source: NoiseSource, dtype: torch.dtype) -> Source:
    log = _torch_log if isinstance(source, TorchNoise) else _numpy_log
    return Source(
        name,
        127 if isinstance(source, TorchNoise) else 128,
        _library(source, dtype),
        _float_grid(log, np.float64),
        wide=True,
        finish=_to_grid,
        width=spacing(1.0),
    )


OURS = (
    _ours("ours, `aes`, fp32 sum", AesNoise(CPU), torch.float32),
    _ours("ours, `aes`, fp64 sum", AesNoise(CPU), torch.float64),
    _ours("ours, `aes` for accelerators, fp32 sum", StagedAesNoise(CPU), torch.float32),
    _ours("ours, `torch`, fp32 sum", TorchNoise(CPU), torch.float32),
    _ours("ours, `torch`, fp64 sum", TorchNoise(CPU), torch.float64),
)
FLOATS = Source("before: every float of fp32, added in fp32", 64, _floats, _float_grid(_numpy_log, np.float32))
OTHERS = (
    FLOATS,
    Source("textbook, 24-bit uniform, fp32", 23, _textbook(24, np.float32), _integer_grid(24, np.float32)),
    Source("textbook, 53-bit uniform, fp64, rounded to fp32", 52, _textbook(53, np.float64),
           _integer_grid(53, np.float64), wide=True),
    Source("as ours, but rounded to fp32 and not to a grid", 128, _wide,
           _float_grid(_numpy_log, np.float64), wide=True),
)  # fmt: skip
SOURCES = (*OURS, *OTHERS)


def reachable(source: Source, value: Array, output: Array) -> npt.NDArray[np.bool_]:
    """Whether ``output`` can be released for ``value``, elementwise (up to ``NEIGHBOURS`` grid points away)."""
    noise = output.astype(np.float64) - value.astype(np.float64)
    sign = np.where(noise < 0.0, -1.0, 1.0)
    real = np.float64 if source.wide else np.float32
    found = np.zeros(len(output), np.bool_)
    for neighbour in range(-NEIGHBOURS, NEIGHBOURS + 1):
        magnitude = source.magnitudes(np.abs(noise), neighbour)
        made = source.finish(value.astype(real) + sign.astype(real) * magnitude.astype(real))
        found |= made == output
    return found


def certain(source: Source, values: Array, shift: float, output: Array | None = None) -> tuple[float, float]:
    """Share of releases of ``values`` that cannot come from ``values + shift``; and, as a check, the share that
    :func:`reachable` calls impossible although they happened. ``output``: what was released, if that is known."""
    output = source.release(values) if output is None else output
    other = (values + np.float32(shift)).astype(np.float32)
    return 1.0 - float(reachable(source, other, output).mean()), 1.0 - float(reachable(source, values, output).mean())


def log_likelihood(output: Array, value: Array, width: float) -> Array:
    """log of the probability of the cell around ``output``, or of the density, for Laplace noise on ``value``."""
    distance = np.abs(output.astype(np.float64) - value.astype(np.float64))
    if not width:
        return -distance
    beyond = np.maximum(distance - width / 2, 0.0)  # of the cell's nearer end; 0 where the value lies in the cell
    outside = -beyond + np.log(-np.expm1(-width) / 2)
    inside = np.log1p(-np.exp(-width / 2) * np.cosh(np.minimum(distance, width / 2)))
    return np.where(distance >= width / 2, outside, inside)


def advantage(source: Source, coordinates: int = 2_000, rounds: int = 200) -> float:
    """How much more often than by chance whole vectors are told apart: true positives minus false positives of the
    best test, by likelihood, and by certainty wherever there is any. The gradient is spread evenly, C = b."""
    rng = np.random.default_rng(1)
    says_with = np.zeros(2)
    shift = np.float32(1.0 / math.sqrt(coordinates))
    for _ in range(rounds):
        values = (0.1 * rng.standard_normal(coordinates)).astype(np.float32)
        other = values + shift
        for truth, centre in enumerate((values, other)):
            output = source.release(centre)
            score = (log_likelihood(output, other, source.width) - log_likelihood(output, values, source.width)).sum()
            if not reachable(source, values, output).all():
                score = math.inf
            elif not reachable(source, other, output).all():
                score = -math.inf
            says_with[truth] += score > 0
    return float(says_with[1] - says_with[0]) / rounds


def claimed_advantage(coordinates: int = 2_000) -> float:
    """What the accountant allows it to be: delta at epsilon = 0."""
    accountant = MajorizedAccountant()
    accountant.step(noise_multiplier=1.0, sample_rate=1.0, dimension=coordinates)
    return accountant.delta(eps=0.0)


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


def summation_table(coordinates: int = 2_601, sizes: tuple[int, ...] = (258, 2_048, 8_192)) -> str:
    """How much further than its gradient the sum of clipped gradients moves when one of them is left out."""
    lines = ["| examples | fp32, any direction | fp32, one direction | margin for it | fp64 |", "|---" * 5 + "|"]
    for examples in sizes:
        plain = Mechanism(name="laplace", max_grad_norm=1.0, noise_multiplier=1.0)
        room = plain.for_sum(dimension=coordinates, examples=examples, unit=2.0**-24).margin - 2.0**-11
        moved = [summation_error(examples, coordinates, along) for along in (0.0, 10.0)]
        exact = summation_error(examples, coordinates, 10.0, torch.float64)
        lines.append(f"| {examples:,} | {moved[0]:.1e} C | {moved[1]:.1e} C | {room:.1e} C | {exact:.0e} C |")
    return "\n".join(lines)


def summation_error(examples: int, coordinates: int, along: float, dtype: torch.dtype = torch.float32) -> float:
    """The largest of several: the first, a middle and the last gradient left out of gradients of norm 1.

    Args:
        along: length of what all gradients have in common, beside a random part of length 1.
    """
    generator = torch.Generator().manual_seed(examples)
    rows = torch.randn(examples, coordinates, generator=generator, dtype=torch.float64)
    rows /= rows.norm(dim=1, keepdim=True)
    common = torch.randn(coordinates, generator=generator, dtype=torch.float64)
    rows += along * common / common.norm()
    rows = (rows / rows.norm(dim=1, keepdim=True)).to(dtype)
    weights, found = torch.ones(examples, dtype=dtype), 0.0
    whole = rows.t() @ weights
    for left in (0, examples // 2, examples - 1):
        others = torch.cat([rows[:left], rows[left + 1 :]])
        moved = whole.double() - (others.t() @ weights[1:]).double()
        found = max(found, float((moved - rows[left].double()).norm()))
    return found


def main() -> None:
    print("Share of released floats that are impossible under the other hypothesis:\n")
    print(holes_table())
    print(
        f"\nAdvantage over whole vectors (2,000 coordinates, even spread, C = b); claimed: {claimed_advantage():.3f}\n"
    )
    for source in (*OURS, FLOATS):
        print(f"* {source.name}: {advantage(source):.3f}")
    print("\nDistance between the change of the sum and the gradient left out:\n")
    print(summation_table())


if __name__ == "__main__":
    main()
