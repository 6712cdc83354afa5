"""The fine-tuning examples on a tiny encoder, a handful of sentences and images; nothing is downloaded."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

Example = Callable[[str], ModuleType]
COMMON = ["--delta", "1e-3", "--eps", "2", "--steps", "3", "--batch-size", "8", "--csv", "runs.csv"]


@pytest.fixture
def weights(example: Example, tmp_path: Path) -> str:
    torch.manual_seed(0)
    torch.save(example("finetune_image").EfficientNetLite0().state_dict(), tmp_path / "lite0.pth")
    return str(tmp_path / "lite0.pth")


def watch(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The model that ``main`` trains, and a copy of its parameters before."""
    seen: dict[str, Any] = {}
    fit = module.fit

    def watched(name: str, model: nn.Module, *args: Any) -> dict[str, Any]:
        seen.update(model=model, before={key: p.detach().clone() for key, p in model.named_parameters()})
        return fit(name, model, *args)

    monkeypatch.setattr(module, "fit", watched)
    return seen


def changed(seen: dict[str, Any]) -> set[str]:
    return {key for key, p in seen["model"].named_parameters() if not torch.equal(p, seen["before"][key])}


@pytest.mark.parametrize("engine", ["vmap", "ghost"])
@pytest.mark.parametrize("mechanism", ["laplace", "gaussian"])
def test_text_trains_the_adapters_and_the_head_alone(
    example: Example,
    encoder: str,
    sentences: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    mechanism: str,
) -> None:
    text = example("finetune_text")
    seen = watch(text, monkeypatch)
    arguments = ["--encoder", encoder, "--data", sentences, "--tokens", "8", "--rank", "2", *COMMON]
    row = text.main([*arguments, "--engine", engine, "--mechanism", mechanism])

    assert 0 < row["epsilon spent"] <= 2 and row["steps"] == 3 and 0 <= row["accuracy"] <= 1
    trainable = {key for key, p in seen["model"].named_parameters() if p.requires_grad}
    assert changed(seen) == trainable == {key for key in seen["before"] if "lora" in key or key.startswith("head")}
    # query, value, both feed-forward layers and the attention's output, of one layer; the head
    assert row["n"] == 2 * (3 * (16 + 16) + 2 * (16 + 32)) + (16 * 2 + 2)
    assert not any(module.training for layer in seen["model"].layers for module in layer.modules())  # no dropout
    assert (Path(capsys.readouterr().out.split()[-1])).exists()
    assert [line["mechanism"] for line in csv.DictReader(Path("runs.csv").read_text().splitlines())] == [mechanism]


def test_text_head_alone_and_without_privacy(
    example: Example, encoder: str, sentences: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = example("finetune_text")
    seen = watch(text, monkeypatch)
    arguments = ["--encoder", encoder, "--data", sentences, "--tokens", "8", "--lora-layers", "0", *COMMON]
    assert text.main(arguments)["n"] == 16 * 2 + 2
    assert changed(seen) == {"head.weight", "head.bias"}
    row = text.main([*arguments, "--no-private"])
    assert row["mechanism"] == "none" and math.isinf(row["epsilon spent"])
    assert len(list(csv.DictReader(Path("runs.csv").read_text().splitlines()))) == 2


@pytest.mark.parametrize("lora_layers", [0, 1, 3])
def test_text_the_parts_make_the_whole_encoder(
    example: Example, encoder: str, sentences: str, lora_layers: int
) -> None:
    from transformers import AutoModel, AutoTokenizer

    text = example("finetune_text")
    split = text.adapted_encoder(encoder, lora_layers, 2)
    x, mask, labels = text.frozen_part(split, encoder, Path(sentences) / "train.tsv", lora_layers, 8)
    assert labels.tolist() == [0, 1] * 12
    for layer in split.encoder.layer[3 - lora_layers :]:
        x = layer(x, attention_mask=text.additive(mask))  # adapters start at zero

    lines = [line.split("\t")[0] for line in (Path(sentences) / "train.tsv").read_text().splitlines()]
    tokens = AutoTokenizer.from_pretrained(encoder)(lines, padding="max_length", max_length=8, return_tensors="pt")
    assert 1 not in tokens["input_ids"]  # no unknown words
    whole = AutoModel.from_pretrained(encoder).eval()(**tokens).last_hidden_state
    expected = text.mean(whole, tokens["attention_mask"].float())
    torch.testing.assert_close(text.mean(x, mask), expected, rtol=1e-4, atol=1e-5)


def test_text_a_sentence_does_not_depend_on_the_others(example: Example, encoder: str, tmp_path: Path) -> None:
    text = example("finetune_text")
    frozen = text.adapted_encoder(encoder, 1, 2)
    (tmp_path / "alone.tsv").write_text("good film\t1\n")
    (tmp_path / "beside.tsv").write_text("good film\t1\na very very very bad plot\t0\n")
    alone, beside = (text.frozen_part(frozen, encoder, tmp_path / f"{name}.tsv", 1, 8) for name in ("alone", "beside"))
    torch.testing.assert_close(alone[0][0], beside[0][0])
    assert torch.equal(alone[1][0], beside[1][0])


@pytest.mark.parametrize("engine", ["vmap", "ghost"])
def test_image_trains_the_head_alone(
    example: Example, images: str, weights: str, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    image = example("finetune_image")
    seen = watch(image, monkeypatch)
    made = []
    backbone = image.EfficientNetLite0
    monkeypatch.setattr(image, "EfficientNetLite0", lambda: made.append(backbone()) or made[-1])
    arguments = ["--weights", weights, "--data", images, "--pixels", "32", *COMMON, "--engine", engine]
    row = image.main([*arguments, "--cache", "features.pt"])

    assert 0 < row["epsilon spent"] <= 2 and row["n"] == 1280 * 2 + 2
    assert changed(seen) == {"head.weight", "head.bias"}
    norms = [module for module in made[0].modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 49 and not any(module.training for module in made[0].modules())
    assert not any(p.requires_grad for p in made[0].parameters())
    stored = torch.load(weights, weights_only=True)  # running means too
    assert all(torch.equal(value, stored[key]) for key, value in made[0].state_dict().items())

    (Path(images) / "train.zip").unlink()  # the cache has it
    assert image.main([*arguments, "--cache", "features.pt", "--held-out", "4"])["steps"] == 3
    with pytest.raises(ValueError, match="delete it, or name another file"):
        image.main([*arguments, "--cache", "features.pt", "--pixels", "48"])


def test_image_features_do_not_depend_on_the_others(example: Example, images: str, weights: str) -> None:
    image = example("finetune_image")
    backbone = image.EfficientNetLite0()
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    many, labels = image.features(backbone, Path(images) / "train.zip", None, 32)
    few, _ = image.features(backbone, Path(images) / "train.zip", 5, 32)
    torch.testing.assert_close(many[:5], few, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(many.norm(dim=1), torch.ones(24))
    assert sorted(labels.tolist()) == [0] * 12 + [1] * 12
