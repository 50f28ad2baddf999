"""`lemma serve MODEL`: a model behind the wire that OpenAI's clients speak."""

from __future__ import annotations

import argparse
import copy
import os
import secrets
import signal
import sys
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from lemma.cli.parser import Parser, add_device, add_engine, say
from lemma.core.errors import UserError

if TYPE_CHECKING:
    from lemma.formats import Format

DESCRIPTION = """\
Answer clients of OpenAI's chat and text completions: point their base_url to the address that is printed. MODEL is a
run folder, an exported model, an adapter folder, any folder in the Hugging Face format, a GGUF file, or a hub name.
Conversations are written in the format that the model was trained in, else by its tokenizer's own chat template.
docs/serve.md says what is offered. Ctrl-C ends it: answers in progress have {seconds} seconds."""
KEY_VARIABLE = "LEMMA_API_KEY"
# For answers in progress when the server is to end.
DRAIN_SECONDS = 30


def add(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser(
        "serve", help="answer OpenAI clients", description=DESCRIPTION.format(seconds=DRAIN_SECONDS)
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a run, a model folder, an adapter folder, a GGUF file or a hub name"
    )
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="address (default: this machine only)")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="port (default: any free one)")
    parser.add_argument(
        "--api-key", metavar="K", help=f"clients must send this key (default: {KEY_VARIABLE}, or none is asked for)"
    )
    parser.add_argument(
        "--cors",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="let pages of this site ask in a browser, such as http://localhost:3000; may be repeated",
    )
    parser.add_argument(
        "--rollouts",
        action="store_true",
        help="serve trainers, which bring the weights and read token ids, with the key in LEMMA_SERVERS_KEY; "
        "docs/servers.md",
    )
    parser.add_argument("--name", metavar="NAME", help="what clients call the model (default: MODEL)")
    parser.add_argument("--format", metavar="NAME", help="how conversations are written")
    parser.add_argument("--system", metavar="TEXT", help="system message in place of the format's own; empty: none")
    parser.add_argument("--seed", metavar="S", type=int, help="seed of calls that bring none (default: by chance)")
    add_device(parser)
    add_engine(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from lemma.core.collector import set_aside
    from lemma.serving.http_server import LOOPBACK, HttpServer
    from lemma.serving.openai_app import openai_app

    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    if not 0 <= args.port < 65536:
        raise UserError(f"--port is {args.port}", fix="write a number below 65536")
    if args.rollouts:
        return _serve_trainers(args)
    if args.host not in LOOPBACK and key is None:
        raise UserError(
            f"everybody who reaches {args.host} could use the model",
            fix="write --api-key and a key that is hard to guess",
        )
    signal.signal(signal.SIGTERM, _leave)
    host, engine = _host(args, key)
    try:
        server = HttpServer(openai_app(host, args.cors), args.host, args.port).start()

        def drain(number: int, frame: FrameType | None) -> None:
            for ending in (signal.SIGINT, signal.SIGTERM):
                signal.signal(ending, _leave)
            server.end(DRAIN_SECONDS)
            print(f"\nlemma: answers in progress have {DRAIN_SECONDS} s; Ctrl-C again ends at once", file=sys.stderr)

        try:
            for ending in (signal.SIGINT, signal.SIGTERM):
                signal.signal(ending, drain)
            print(f"{server.url}\nCtrl-C ends it.", flush=True)
            with set_aside():  # a body of many small lists would have the collector go through the model's objects
                host.driver.run(lambda: not server.is_open)
        except KeyboardInterrupt:
            print()
        finally:
            for ending in (signal.SIGINT, signal.SIGTERM):
                signal.signal(ending, signal.SIG_IGN)
            server.close()
    finally:
        engine.close()
    return 0


def _serve_trainers(args: argparse.Namespace) -> int:
    from lemma.engines.remote.server_guard import check_key
    from lemma.serving.rollout_server import serve_rollouts

    check_key()
    signal.signal(signal.SIGTERM, _leave)
    try:
        serve_rollouts(args.model, args.host, args.port, say, lambda url: print(f"{url}\nCtrl-C ends it.", flush=True))
    except KeyboardInterrupt:
        print()
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _host(args: argparse.Namespace, key: str | None) -> tuple[Any, Any]:
    from lemma.api.evaluate_call import open_model
    from lemma.engines.stop_strings import ends_of
    from lemma.formats.dialogue import Dialogue
    from lemma.serving.engine_driver import EngineDriver
    from lemma.serving.likeliest import likeliest
    from lemma.serving.plain_host import PlainHost

    seed = secrets.randbits(31) if args.seed is None else args.seed
    policy, engine = open_model(args.model, args.device, args.engine, seed, say)
    engine.take_turns()
    tokenizer = copy.deepcopy(policy.tokenizer)
    dialogue = Dialogue(_format(args, tokenizer), tokenizer, ends_of(policy))
    names = dict.fromkeys([args.name] if args.name else [args.model, os.path.basename(args.model.rstrip("/"))])
    # The transformers engine has the model as it came, which knows nothing of packs.
    is_plain = engine.name == "transformers"
    tell = None if is_plain or policy.strangeness() is not None else partial(likeliest, policy)
    return PlainHost(EngineDriver(engine), dialogue, names, key, tell), engine


def _format(args: argparse.Namespace, tokenizer: Any) -> Format:
    """The format that is named, or the run's own, or the tokenizer's own template with nothing added; without one, the
    format for models that know no chats."""
    from lemma.api.model_of_run import format_to_ask_in

    fmt, is_chosen = format_to_ask_in(args.model, tokenizer, args.format or None, args.system)
    if is_chosen or not getattr(tokenizer, "chat_template", None):
        return fmt
    return format_to_ask_in(args.model, tokenizer, "own", args.system)[0]
