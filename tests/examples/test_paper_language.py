"""The paper's experiments on pretrained networks and on language: tiny models, nothing is downloaded."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from shutil import which
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples.conftest import AVERAGES

pytest.importorskip("transformers")
pytest.importorskip("peft")

Example = Callable[[str], ModuleType]
TINY = ["--delta", "1e-3", "--max-steps", "2", "--batch-size", "8", "--csv", "rows.csv", "--eps", "2", "--seeds", "1"]
MECHANISMS = ["--mechanism", "laplace", "gaussian", "laplace_l1"]


def rows(file: str = "rows.csv") -> list[dict[str, str]]:
    return list(csv.DictReader(Path(file).read_text().splitlines()))


def check_private(found: list[dict[str, str]], eps: float = 2.0) -> None:
    assert all(0.9 * eps < float(row["epsilon"]) <= eps and row["steps"] == "2" for row in found)


# what the experiments share


def test_l1_clipping_norm_is_that_of_an_evenly_spread_gradient(example: Example) -> None:
    norm = example("training").clipping_norm
    draws = np.random.default_rng(0).normal(size=(200, 5000))
    draws *= 3 / np.linalg.norm(draws, axis=1, keepdims=True)
    assert norm("laplace_l1", 3.0, 5000) == pytest.approx(np.abs(draws).sum(1).mean(), rel=5e-3)
    assert norm("laplace", 3.0, 5000) == norm("gaussian", 3.0, 5000) == 3.0


def test_spread(example: Example) -> None:
    training = example("training")
    assert training.spread([1.0, 2.0, 6.0]) == "3 (1 to 6)"
    found = [{"mechanism": "laplace", "eps": "1", "a": value} for value in ("0.5", "0.7")]
    assert training.summary(found, ["a"]).splitlines()[-1] == "| laplace | 1 | 2 | 0.6 (0.5 to 0.7) |"


# Table II, the vision transformer


@pytest.fixture
def vit(tmp_path: Path) -> str:
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 6, "mlp_ratio": 2}
    model = Dinov2Model(Dinov2Config(**sizes, patch_size=4, image_size=8))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # layer scales and biases too
    model.save_pretrained(tmp_path / "vit")
    return str(tmp_path / "vit")


def as_onnx(folder: str, file: Path) -> None:
    """An export as torch makes it: products with unnamed, transposed weights, then a sum with a named bias."""
    onnx = pytest.importorskip("onnx")
    from safetensors.numpy import load_file

    weights = {f"backbone.{key}": value for key, value in load_file(Path(folder) / "model.safetensors").items()}
    positions = weights.pop("backbone.embeddings.position_embeddings")
    del weights["backbone.embeddings.mask_token"]
    arrays = {"onnx::Concat_1": positions[:, :1], "onnx::Reshape_2": positions[:, 1:]}
    nodes = []
    for name, value in weights.items():
        if value.ndim == 2 and name.endswith(".weight"):
            arrays[f"onnx::MatMul_{len(arrays)}"] = np.ascontiguousarray(value.T)
            nodes.append(onnx.helper.make_node("MatMul", ["x", list(arrays)[-1]], [f"product of {name}"]))
            bias = name.removesuffix("weight") + "bias"
            nodes.append(onnx.helper.make_node("Add", [bias, f"product of {name}"], [f"sum of {name}"]))
        else:
            arrays[name] = value
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in arrays.items()]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "vit", [], [], initializers)), str(file))


def test_vit_weights_come_out_of_an_onnx_file_as_they_went_in(example: Example, vit: str, tmp_path: Path) -> None:
    load = example("vit").load_vit
    as_onnx(vit, tmp_path / "vit.onnx")
    one, other = load(vit, 8), load(tmp_path / "vit.onnx", 8)
    image = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(one(image).last_hidden_state, other(image).last_hidden_state, rtol=0, atol=0)
    assert not any(p.requires_grad for p in other.parameters()) and not other.training
    with pytest.raises(ValueError, match="pixels=10 is not a multiple of the patch size 4"):
        load(tmp_path / "vit.onnx", 10)


@AVERAGES
@pytest.mark.parametrize("tune", ["head", "lora"])
def test_table2_vit(example: Example, vit: str, images: str, tune: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = example("table2_vit")
    flags = ["--vit", vit, "--data", images, "--pixels", "8", "--tune", tune, "--cache", "features", *TINY]
    found = table.main([*flags, *(MECHANISMS if tune == "head" else []), "--physical-batch", "4"])
    check_private(found)
    head = 24 * 2 + 2
    adapters = 2 * 3 * (12 * 4 + 4 * 12)  # query, key and value in two layers, rank 4
    assert {row["dimension"] for row in found} == {str(head + adapters * (tune == "lora"))}
    assert all(0 <= float(row["accuracy"]) <= 1 for row in found)

    assert table.main([*flags, "--physical-batch", "4"]) == found[:1]  # nothing is run again
    assert "in rows.csv already" in capsys.readouterr().out and len(rows()) == len(found)
    plain = table.main([*flags, "--physical-batch", "4", "--no-private"])
    assert [(row["mechanism"], row["epsilon"]) for row in plain] == [("none", "inf")]
    with pytest.raises(ValueError, match="--batch-size 8 is no multiple of --physical-batch 3"):
        table.main([*flags, "--physical-batch", "3"])


def test_table2_vit_subsets_are_nested(example: Example, images: str) -> None:
    read = example("table2_vit").read_images
    whole, part = read(Path(images) / "train.zip"), read(Path(images) / "train.zip", 5)
    assert torch.equal(whole.images[:5], part.images) and torch.equal(whole.labels[:5], part.labels)
    assert sorted(whole.labels.tolist()) == [0] * 12 + [1] * 12


# Table III


def test_table3_reads_the_usual_formats(example: Example, tmp_path: Path) -> None:
    table = example("table3")
    file = tmp_path / "x.tsv"
    for content, expected in (
        ('a " film\t1\nbad\t0\n', [(('a " film',), 1), (("bad",), 0)]),
        ("sentence\tlabel\nbad\t0\n", [(("bad",), 0)]),
        ("index\tquestion\tsentence\tlabel\n0\tWho?\tHe.\tnot_entailment\n", [(("Who?", "He."), 1)]),
    ):
        file.write_text(content)
        assert table.read_tsv(file) == expected
    file.write_text("good\t1\nbad\t7\n")
    with pytest.raises(ValueError, match="record 2: expected 2 fields that end in a label"):
        table.read_tsv(file)


def test_table3_splits_a_development_set_without_overlap(example: Example, tmp_path: Path) -> None:
    splits = example("table3").splits
    (tmp_path / "dev.tsv").write_text("".join(f"text {i}\t{i % 2}\n" for i in range(50)))
    train, test = splits(tmp_path)
    assert (len(train), len(test)) == (40, 10)
    assert sorted(text for (text,), _ in train + test) == sorted(f"text {i}" for i in range(50))
    assert splits(tmp_path) == (train, test) and splits(tmp_path, 7) == (train[:7], test)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    folder = tmp_path / "qnli"
    folder.mkdir()
    kinds = ("entailment", "not_entailment")
    lines = [f"{i}\tgood film and {'very ' * (i % 5)}\tbad plot\t{kinds[i % 2]}" for i in range(40)]
    (folder / "dev.tsv").write_text("\n".join(["index\tquestion\tsentence\tlabel", *lines]) + "\n")
    return str(folder)


def test_table3_features_are_the_encoder_s_and_each_record_s_own(example: Example, encoder: str, pairs: str) -> None:
    from transformers import AutoModel, AutoTokenizer

    table = example("table3")
    records, _ = table.splits(pairs)
    found = table.frozen_features(table.load_encoder(encoder), encoder, records, 16)
    assert found.shape == (32, 4 * 16)
    tokenizer, net = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()
    expected = []
    for (question, answer), _ in records:
        u, v = (net(**tokenizer(t, return_tensors="pt")).last_hidden_state[0].mean(0) for t in (question, answer))
        u, v = u / u.norm(), v / v.norm()
        expected.append(torch.cat([u, v, (u - v).abs(), u * v * 4.0]))
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=0.03)  # bfloat16 has 8 bits


@AVERAGES
@pytest.mark.parametrize("tune", ["head", "lora", "bias", "full"])
def test_table3(example: Example, encoder: str, sentences: str, pairs: str, tune: str) -> None:
    table = example("table3")
    flags = ["--encoder", encoder, "--tokens", "12", "--tune", tune, *TINY]
    check_private(table.main([*flags, "--task", "sst2", "--data", sentences]))
    qnli = [*flags, "--task", "qnli", "--data", pairs, "--subset", "20", "--cache", "kept"]
    check_private(table.main(qnli) + (table.main([*qnli, "--held-out", "8"]) if tune == "head" else []))
    assert [(row["experiment"], row["train_records"]) for row in rows()][:2] == [("sst2", "24"), ("qnli", "20")]
    assert [row["train_records"] for row in rows()[2:]] == ["12"] * (tune == "head")
    if tune != "head":
        assert int(rows()[0]["dimension"]) == int(rows()[1]["dimension"])  # pairs are read at once


# Table IV


BYTE_PAIRS = ["Ġ n", "Ġ :", "a m", "Ġn am", "Ġnam e"]


@pytest.fixture
def bpe(tmp_path: Path) -> str:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), *(pair.replace(" ", "") for pair in BYTE_PAIRS), "<|endoftext|>"]
    folder = tmp_path / "bpe"
    folder.mkdir()
    (folder / "encoder.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "vocab.bpe").write_text("\n".join(["#version: 0.2", *BYTE_PAIRS]) + "\n")
    return str(folder)


@pytest.fixture
def e2e(tmp_path: Path) -> str:
    folder = tmp_path / "e2e"
    folder.mkdir()
    lines = [
        f"name : {name} | area : {area}||{text}"
        for name, area in (("Zizzi", "riverside"), ("The Mill", "city centre"))
        for text in (f"{name} is in {area} .", f"In {area} there is {name} .")
    ]
    (folder / "valid.txt").write_text("\n".join(lines * 6) + "\n")
    (folder / "test.txt").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_e2e_data(example: Example, tmp_path: Path) -> None:
    data = example("e2e_data")
    record = data.Record("name : The Mill | near : Café Rouge | food : French", "The Mill near Café Rouge is French .")
    hidden = data.delexicalised(record)
    assert hidden.meaning == "name : Xname | near : Xnear | food : French"
    assert hidden.sentence == "Xname near Xnear is French ."
    assert data.lexicalised(hidden.sentence, record.meaning) == record.sentence
    file = tmp_path / "x.txt"
    file.write_text("name : A||one\nname : B||two\nname : A||three\n")
    assert data.grouped(data.read_e2e(file)) == {"name : A": ["one", "three"], "name : B": ["two"]}
    file.write_text("name : A||one\nname : B\n")
    with pytest.raises(ValueError, match="line 2 is no 'key : value"):
        data.read_e2e(file)


def test_e2e_tokenizer_is_gpt2_s(example: Example, bpe: str) -> None:
    from transformers import GPT2TokenizerFast

    data = example("e2e_data")
    files = {"vocab": str(Path(bpe) / "encoder.json"), "merges": str(Path(bpe) / "vocab.bpe")}
    whole = GPT2TokenizerFast(**files)
    text = "name : Café £20-25 name"
    assert data.bpe_tokenizer(bpe, 50_000)(text)["input_ids"] == whole(text)["input_ids"]
    short = data.bpe_tokenizer(bpe, 2)
    assert len(short) == 256 + 2 + 1 and short.eos_token_id == 258
    assert short.decode(short(text)["input_ids"]) == text


def test_e2e_labels_are_on_the_sentence_alone(example: Example, bpe: str) -> None:
    data = example("e2e_data")
    tokenizer = data.bpe_tokenizer(bpe, 5)
    ids, labels = data.encoded(tokenizer, [data.Record("name : A", "A is"), data.Record("name : A", "A is not it")], 18)
    told = labels != data.NO_LABEL
    assert tokenizer.decode(ids[0][told[0]]) == " A is<|endoftext|>"
    assert torch.equal(ids[told], labels[told]) and ids.shape == labels.shape == (2, 18)
    start = data.prompt(tokenizer, "name : A")
    assert ids[0, : len(start)].tolist() == start and not told[:, : len(start)].any()


@pytest.fixture
def without_java(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """METEOR's process reads its paraphrases for seconds; a test of its own runs it."""
    monkeypatch.setattr(example("nlg_scores"), "which", lambda name: None)


@pytest.mark.usefixtures("without_java")
def test_scores_against_other_implementations(example: Example) -> None:
    pytest.importorskip("sacrebleu")
    from torchmetrics.text import BLEUScore

    nlg = example("nlg_scores")
    references = [["there is a pub in the city", "a pub is in the city centre"], ["the mill is cheap and good"]]
    hypotheses = ["there is a pub in the city centre", "the mill is good and very cheap"]
    found = nlg.scores(hypotheses, references)
    assert found["bleu"] == pytest.approx(100 * float(BLEUScore()(hypotheses, references)), rel=1e-5)
    # longest common subsequences by hand: 7 of 8 and 7, then "the mill is good" 4 of 7 and 6 words
    assert found["rouge_l"] == pytest.approx((2 * 7 / 15 + 2 * 4 / 13) / 2)
    # NLTK's documented value
    one = "It is a guide to action which ensures that the military always obeys the commands of the party"
    others = [
        "It is a guide to action that ensures that the military will forever heed Party commands",
        "It is the guiding principle which guarantees the military forces always being under the command of the Party",
        "It is the practical guide for the army always to heed the directions of the party",
    ]
    assert nlg.nist([one], [others]) == pytest.approx(3.3709, abs=1e-4)
    same = nlg.scores([group[0] for group in references], references)
    assert (same["bleu"], same["rouge_l"]) == (pytest.approx(100), 1.0) and same["cider"] > found["cider"] > 0
    assert 0 < nlg.nist(["a pub", ""], references) < found["nist"]
    empty = nlg.scores(["", ""], references)
    assert math.isnan(empty.pop("meteor")) and empty == {"bleu": 0.0, "nist": 0.0, "rouge_l": 0.0, "cider": 0.0}
    with pytest.raises(ValueError, match="2 hypotheses need as many lists of references"):
        nlg.scores(hypotheses, [["a"], []])


@pytest.mark.skipif(which("java") is None, reason="METEOR runs in a Java process")
def test_meteor_knows_synonyms_and_word_order(example: Example) -> None:
    pytest.importorskip("pycocoevalcap")
    nlg = example("nlg_scores")
    reference = [["the cheap pub is near the river"]]
    whole, inflected, shuffled, other = (
        nlg.meteor([text], reference)
        for text in (
            "The cheap pub is near the river",
            "the inexpensive pubs are near the river",
            "river near the is pub the cheap",
            "",
        )
    )
    assert whole == pytest.approx(1.0) and other == 0.0
    assert whole > inflected > 0.4 and whole > shuffled > 0.2


def test_scores_name_the_package_that_is_missing(example: Example) -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"scoring needs nosuchpackage: pip install 'lightning-lap2\[paper\]'"
    ):
        example("nlg_scores").package("nosuchpackage.part")


SMALL = ["--layers", "1", "--width", "32", "--merges", "5", "--tokens", "64", "--new-tokens", "24", "--beams", "2"]


@pytest.mark.usefixtures("without_java")
def test_table4(example: Example, e2e: str, bpe: str) -> None:
    pytest.importorskip("pycocoevalcap")
    table = example("table4")
    flags = ["--data", e2e, "--tokenizer", bpe, *SMALL, *TINY, "--samples", "sentences.txt"]
    check_private(table.main([*flags, *MECHANISMS, "--test-subset", "1"]))
    assert len(Path("sentences.txt").read_text().splitlines()) == 3 * 2
    public = ["--public", "8", "--public-steps", "2", "--cache", "public.pt", "--tune", "lora"]
    (adapted,) = table.main([*flags, *public])
    check_private([adapted])
    assert Path("public.pt.seed1").exists() and adapted["train_records"] == "16"
    assert int(adapted["dimension"]) == 4 * 32 + 3 * 32 * 4  # rank 4 on one c_attn
    with pytest.raises(ValueError, match="give --tokenizer"):
        table.main(["--data", e2e, *TINY])


@pytest.mark.usefixtures("without_java")
def test_table4_draws_several_generations_for_held_out_meanings(example: Example, e2e: str, bpe: str) -> None:
    pytest.importorskip("pycocoevalcap")
    table = example("table4")
    flags = ["--data", e2e, "--tokenizer", bpe, *SMALL, *TINY, "--tune", "bias", "--held-out", "1", "--public", "2"]
    flags += ["--generations", "3", "--public-steps", "1"]
    (row,) = table.main([*flags, "--plot", "figure7.png"])
    check_private([row])
    drawn = table.from_text(row["generations"])
    assert len(drawn) == 3 and all(set(one) == set(table.NAMES) for one in drawn)
    assert float(row["nist"]) == pytest.approx(sum(one["nist"] for one in drawn) / 3, rel=1e-4)
    assert row["train_records"] == str(12 - 2)  # one of two meanings, two of its records public
    assert int(row["dimension"]) == 3 * 32 + 32 + 4 * 32 + 32 + 3 * 2 // 2 * 32  # c_attn, c_proj, c_fc, c_proj, norms
    assert Path("figure7.png").read_bytes().startswith(b"\x89PNG")


def test_bias_tuning_gives_biases_to_a_network_without_any(example: Example) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    net = LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes))
    ids = torch.tensor([[1, 2, 3]])
    before = net(ids).logits
    trained = {n: p for n, p in example("tuning").prepare(net, "bias", 4).named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == 4 * 16 + 2 * 24 + 16 and all(n.endswith("bias") for n in trained)
    torch.testing.assert_close(net(ids).logits, before)


@pytest.mark.usefixtures("without_java")
def test_table4_says_what_it_was_taught(example: Example, e2e: str, bpe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without privacy: training, generation from padded prompts and scoring agree with each other."""
    pytest.importorskip("pycocoevalcap")
    valid = Path(e2e) / "valid.txt"
    valid.write_text("\n".join(valid.read_text().splitlines()[::2]) + "\n")  # one sentence for each meaning
    steps = ["--delta", "1e-3", "--steps", "80", "--batch-size", "12", "--csv", "rows.csv", "--lr", "1e-2"]
    flags = [*SMALL, *steps, "--seeds", "1", "--no-private", "--new-tokens", "40", "--samples", "said.txt"]
    (row,) = example("table4").main(["--data", e2e, "--tokenizer", bpe, *flags])
    said = Path("said.txt").read_text().splitlines()[1:]
    assert said == [
        "name : Zizzi | area : riverside||Zizzi is in riverside .",
        "name : The Mill | area : city centre||The Mill is in city centre .",
    ]
    assert float(row["bleu"]) == pytest.approx(100) and float(row["rouge_l"]) == 1.0


def test_table4_a_record_s_loss_is_the_mean_over_its_own_words(example: Example) -> None:
    table = example("table4")

    class Net(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return type("Out", (), {"logits": torch.nn.functional.one_hot(input_ids, 5).float()})

    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 2, 2]])
    labels = torch.tensor([[-100, 2, 3, 4], [-100, 2, -100, -100]])
    other = math.log(math.e + 4)  # -log softmax of a wrong word
    assert float(table.Decoder(Net(), 1e-3).training_step([ids, labels], 0)) == pytest.approx(other, rel=1e-6)
    right = torch.tensor([[-100, 2, 2, 2], [-100, 2, -100, -100]])
    ids = torch.tensor([[1, 2, 2, 2], [1, 2, 2, 2]])
    expected = ((other + 2 * (other - 1)) / 3 + other) / 2
    assert float(table.Decoder(Net(), 1e-3).training_step([ids, right], 0)) == pytest.approx(expected, rel=1e-6)


# Figure 8


def test_figure8(example: Example, mnist_like: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = example("figure8")
    flags = ["--data", str(mnist_like), "--delta", "1e-3", "--max-steps", "4", "--every", "2", "--batch-size", "64"]
    flags += ["--eps", "3.42", "--seeds", "1", "--csv", "rows.csv", "--targets", "0.0", "1.0", "--plot", "curve.png"]
    found = figure.main([*flags, *MECHANISMS])
    assert [list(figure.from_text(row["curve"])) for row in found] == [[2, 4]] * 3
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert sum("| 2 (2 to 2), 1 of 1 runs | not reached |" in line for line in lines) == 3
    assert figure.main(flags) == found[:1] and len(rows()) == 3


def test_figure8_the_first_look_that_reaches_the_target(example: Example) -> None:
    figure = example("figure8")
    points = {100: 0.5, 200: 0.71, 300: 0.69, 400: 0.8}
    assert [figure.steps_to(points, target) for target in (0.5, 0.7, 0.75, 0.9)] == [100, 200, 400, None]
    assert figure.from_text(figure.as_text(points)) == points
    assert figure.reached([points, {100: 0.1}], 0.7) == "200 (200 to 200), 1 of 2 runs"
