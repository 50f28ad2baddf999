"""A vLLM server for trainers on other machines: it waits for their weights and serves clients that have the key.

LEMMA_SERVERS_KEY=... python -m lemma.engines.vllm.stand_alone MODEL --host 0.0.0.0 --port 8000

MODEL gives the architecture and the tokenizer; the weights come from the trainer.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lemma.core.errors import UserError
from lemma.engines.remote.server_guard import check_key
from lemma.engines.vllm.settings import environment, plain_arguments, server_command, server_environment
from lemma.engines.vllm.versions import check_version, installed
from lemma.engines.vllm.vllm_options import VllmOptions


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lemma.engines.vllm.stand_alone", description=__doc__)
    defaults = VllmOptions()
    parser.add_argument("model", help="a folder or a hub name")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; 0.0.0.0 for other machines")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dtype", default="auto", help="bfloat16, float16 or float32; by default the model's own")
    parser.add_argument("--context", type=int, help="longest prompt and completion together")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--cache-gib", type=float, help="size of the key-value cache, in place of --memory")
    parser.add_argument("--sequences", type=int, default=defaults.sequences, help="generated at the same time")
    parser.add_argument("--lora-rank", type=int, default=0, help="room for an adapter of this rank")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share each layer")
    parser.add_argument("--eager", action="store_true", help="start sooner and run slower")
    return parser


def command(arguments: Sequence[str], temporary: Path) -> tuple[list[str], dict[str, str]]:
    """The server's command line and environment."""
    import torch

    args = _parser().parse_args(arguments)
    check_key()
    on_cpu = not torch.cuda.is_available()
    options = VllmOptions(
        memory=args.memory, cache_gib=args.cache_gib, sequences=args.sequences, eager=args.eager, mode="server"
    )
    model = str(Path(args.model).expanduser()) if Path(args.model).expanduser().exists() else args.model
    wanted = plain_arguments(model, args.dtype, options, args.context, 0, args.lora_rank, on_cpu)
    if args.tensor_parallel > 1:
        wanted["tensor_parallel_size"] = args.tensor_parallel
    variables = server_environment(environment(on_cpu), temporary)
    if not Path(model).exists():
        variables.pop("HF_HUB_OFFLINE", None)
    return server_command(wanted, args.host, args.port), variables


def main() -> int:
    try:
        line, variables = command(sys.argv[1:], Path(tempfile.mkdtemp(prefix="lemma-vllm-server-")))
        check_version(installed())
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    os.execve(line[0], line, variables)


if __name__ == "__main__":
    sys.exit(main())
