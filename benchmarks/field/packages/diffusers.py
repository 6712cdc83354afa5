"""diffusers: its UNets and schedulers in the training step of its documentation, as a LightningModule."""

from __future__ import annotations

from typing import Any

from benchmarks.field.cases import TORCH_WITH_VISION, Case, Package, Run
from benchmarks.field.small import image, random, trainer

_IMAGES, _SIDE = 12, 16


def _module(make: Any, conditional: bool) -> Any:
    import diffusers
    import lightning as L
    import torch
    import torch.nn.functional as F

    class Denoiser(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make(diffusers)
            self.noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            # the noise and the time step of each image come with it, so that the gradients can be compared
            clean, noise, timesteps, text = batch
            noisy = self.noise_scheduler.add_noise(clean, noise, timesteps)
            condition = {"encoder_hidden_states": text} if conditional else {}
            predicted = self.model(noisy, timesteps, return_dict=False, **condition)[0]
            loss = F.mse_loss(predicted, noise)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    return Denoiser()


def _records() -> list[tuple[Any, ...]]:
    import torch

    return [
        (2 * image(k, _SIDE) - 1, torch.randn(3, _SIDE, _SIDE, generator=random(k)), 7 * k,
         torch.randn(4, 8, generator=random(k)))
        for k in range(_IMAGES)
    ]  # fmt: skip


def _case(name: str, make: Any, *, conditional: bool = False) -> Case:
    def fit(run: Run) -> Any:
        from torch.utils.data import DataLoader

        loader = DataLoader(_records(), batch_size=run.batch_size, shuffle=True)
        trainer(run).fit(_module(make, conditional), loader)

    return Case(name, fit, "`Trainer(callbacks=[Lap2Privacy(eps=8.0)])`", records=_IMAGES)


PACKAGE = Package(
    name="diffusers",
    environment="vision",
    requires=("diffusers", "transformers", "accelerate"),
    torch=TORCH_WITH_VISION,
    cases=(
        _case("UNet2DModel", lambda d: d.UNet2DModel(
            sample_size=_SIDE, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"))),
        _case("UNet2DConditionModel", lambda d: d.UNet2DConditionModel(
            sample_size=_SIDE, in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1,
            norm_num_groups=4, attention_head_dim=4, cross_attention_dim=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")), conditional=True),
    ),
)  # fmt: skip
