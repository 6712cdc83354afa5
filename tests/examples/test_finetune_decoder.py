"""The decoder example on a tiny Llama and a handful of records: in one process, and from one command on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
Example = Callable[[str], ModuleType]
FEW = ["--steps", "3", "--batch-size", "4", "--tokens", "12", "--delta", "1e-3"]


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """``--model`` and ``--data`` of a model with two layers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["[UNK]", "[END]", "name", ":", "Blue", "Red", "Spice", "=>", "a", "coffee", "shop", "."]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model, data = tmp_path / "model", tmp_path / "data"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[END]").save_pretrained(model)
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes)).save_pretrained(model)
    data.mkdir()
    lines = [f"name : {('Blue', 'Red')[k % 2]} Spice||{'a ' * (k % 3)}coffee shop .\n" for k in range(24)]
    for file in ("train.txt", "test.txt"):
        (data / file).write_text("".join(lines))
    return ["--model", str(model), "--data", str(data)]


def test_adapters_train_alone(example: Example, folders: list[str]) -> None:
    decoder = example("finetune_decoder")
    found = decoder.main([*folders, *FEW, "--devices", "1"])
    assert found["steps"] == 3 and 0 < found["epsilon"] <= 8
    assert found["loss before"] != found["loss after"]
    net, tokenizer = decoder.adapted(folders[1], None, 2)
    assert {name.split(".")[-3] for name, p in net.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    tokens, targets = decoder.records(Path(folders[3]) / "test.txt", tokenizer, 12, 5).tensors
    assert tokens.shape == targets.shape == (5, 12)
    # name : Red Spice => a coffee shop . [END], and padding that no loss is taken of
    assert tokens[1].tolist() == [2, 3, 5, 6, 7, 8, 9, 10, 11, 1, 1, 1]
    assert targets[1].tolist() == [-100] * 5 + [8, 9, 10, 11, 1, -100, -100]


@pytest.mark.ddp
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_command_starts_two_processes(folders: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "finetune_decoder.py"), *folders, *FEW]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "MASTER_", "PYTEST_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(next(tmp_path.rglob("privacy_report.json")).read_text())
    assert report["steps"] == 3 and report["world_size"] == 2
    # LoRA of rank 2 on query and value of two layers
    assert report["dimension"] == 2 * 2 * (12 * 2 + 2 * 12)
