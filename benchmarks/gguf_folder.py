"""A GGUF file as a folder that every program loads: `python -m benchmarks.gguf_folder FILE FOLDER`.

The embeddings are tied where the architecture's published models tie them (`--untied` keeps both): many files store
them twice, in two roundings.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lemma.plugins.gguf.gguf import load_tokenizer, load_weights, set_ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--untied", action="store_true")
    wanted = parser.parse_args()
    tokenizer = load_tokenizer(wanted.file)
    config, weights = load_weights(wanted.file, torch.bfloat16)
    config.tie_word_embeddings = not wanted.untied
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    missing, unknown = model.load_state_dict(weights, strict=False, assign=True)
    assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)
    model.tie_weights()
    set_ends(model, tokenizer, wanted.file)
    model.save_pretrained(wanted.folder)
    tokenizer.save_pretrained(wanted.folder)


if __name__ == "__main__":
    main()
