"""vLLM's server behind Lemma's guard: it serves clients that have the key, accepts files from them, and exits with its
parent process, if it has one.

python -m lemma.engines.vllm.serve <options of vllm.entrypoints.openai.api_server>
"""

from __future__ import annotations

import runpy

from lemma.engines.remote.server_guard import end_with_parent


def main() -> None:
    end_with_parent()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
