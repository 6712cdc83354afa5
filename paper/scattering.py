"""Scattering features of images: wavelet moduli averaged over neighbourhoods, with nothing learnt from any data.

    S0 = x * phi,    S1 = |x * psi_a| * phi,    S2 = ||x * psi_a| * psi_b| * phi    (b of a larger scale than a)

with J scales and L angles of Morlet wavelets psi and a Gaussian window phi (Bruna and Mallat, "Invariant scattering
convolution networks", 2013). They are a function of each image alone, fixed before any is seen, so a classifier on
them is charged like one on pixels; that private training gains from them was shown by Tramer and Boneh,
"Differentially private learning needs better features (or much more data)", 2021.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def grid(size: int, reach: int = 2) -> Tensor:
    """Offsets of all copies of a periodic grid within ``reach`` periods: ``[(2 reach + 1) size]``, centred at 0."""
    return torch.arange(-reach * size, (reach + 1) * size, dtype=torch.float64)


def periodic(values: Tensor, size: int) -> Tensor:
    """A function given on :func:`grid`, ``[K size, K size]``, with all its copies added up: ``[size, size]``."""
    copies = values.shape[0] // size
    return values.reshape(copies, size, copies, size).sum(dim=(0, 2))


def gaussian(size: int, sigma: float, angle: float = 0.0, slant: float = 1.0, frequency: float = 0.0) -> Tensor:
    """``exp(-|D R u|^2 / (2 sigma^2)) exp(i frequency (R u)_0)``, summing to 1 where ``frequency`` is 0: ``[H, H]``.

    Args:
        size: H, of the periodic grid.
        angle: of the rotation R.
        slant: D = diag(1, slant): below 1 it is longer across the waves' direction.
    """
    u = grid(size)
    rows, columns = torch.meshgrid(u, u, indexing="ij")
    along = math.cos(angle) * rows + math.sin(angle) * columns
    across = -math.sin(angle) * rows + math.cos(angle) * columns
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2)) * slant / (2 * math.pi * sigma**2)
    return periodic(torch.polar(envelope, frequency * along), size)


def morlet(size: int, sigma: float, angle: float, slant: float, frequency: float) -> Tensor:
    """A Gabor wave less as much of its envelope as makes the sum zero: constant images have no response."""
    wave = gaussian(size, sigma, angle, slant, frequency)
    envelope = gaussian(size, sigma, angle, slant)
    return wave - wave.sum() / envelope.sum() * envelope


class Scattering:
    """
    Args:
        pixels: height and width of the images.
        scales: J; the window reaches about 2^J pixels, and one feature in 2^J is kept in each direction.
        angles: L, evenly spread over half a turn.

    Attributes:
        channels: ``1 + J L + L^2 J (J - 1) / 2``.
        side: features in each direction.
    """

    def __init__(self, pixels: int = 28, scales: int = 2, angles: int = 8) -> None:
        self.step = 2**scales
        if pixels % self.step:
            raise ValueError(f"pixels={pixels} is not a multiple of 2^scales = {self.step}")
        size = pixels + 2 * self.step
        self.wavelets = [  # [L, H, H] for each scale, in the frequency domain
            torch.stack([self._wavelet(size, scale, k, angles) for k in range(angles)]) for scale in range(scales)
        ]
        self.window = torch.fft.fft2(gaussian(size, 0.8 * 2 ** (scales - 1))).to(torch.complex64)  # [H, H]
        self.channels = 1 + scales * angles + angles**2 * scales * (scales - 1) // 2
        self.side = pixels // self.step

    @staticmethod
    def _wavelet(size: int, scale: int, k: int, angles: int) -> Tensor:
        # a little over an octave wide, the first scale's frequency three quarters of the highest that the grid holds
        slant, frequency = 4 / angles, 0.75 * math.pi / 2**scale
        return torch.fft.fft2(morlet(size, 0.8 * 2**scale, math.pi * k / angles, slant, frequency)).to(torch.complex64)

    def __call__(self, images: Tensor) -> Tensor:
        """``[B, H, W]`` to ``[B, channels, side, side]``; images are mirrored at their borders."""
        padded = torch.nn.functional.pad(images[:, None], (self.step,) * 4, mode="reflect")  # [B, 1, H, H]
        spectrum = torch.fft.fft2(padded)
        found = [self._averaged(spectrum)]
        for scale, wavelets in enumerate(self.wavelets):
            first = torch.fft.fft2(torch.fft.ifft2(spectrum * wavelets).abs())  # [B, L, H, H]
            found.append(self._averaged(first))
            for larger in self.wavelets[scale + 1 :]:
                second = torch.fft.ifft2(first[:, :, None] * larger).abs()  # [B, L, L, H, H]
                found.append(self._averaged(torch.fft.fft2(second.flatten(1, 2))))
        return torch.cat(found, dim=1)

    def _averaged(self, spectrum: Tensor) -> Tensor:
        smooth = torch.fft.ifft2(spectrum * self.window).real[..., :: self.step, :: self.step]
        return smooth[..., 1:-1, 1:-1]  # the border's mirror image is left out
