"""The trainer's side of one worker process. Nothing here blocks, except waiting for its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from lemma.children import ChildGone, PythonChild
from lemma.children.child_frames import pack
from lemma.environments.env_server import EnvAnswer, EnvOrder, answer_from
from lemma.environments.environment import EnvironmentOptions

WorkerLost = ChildGone


class WorkerProcess(PythonChild):
    """A process with environments."""

    def __init__(self, options: EnvironmentOptions):
        from lemma.environments import ENVIRONMENTS

        super().__init__("lemma.environments.worker_main:serve")
        kind = type(options)
        self.out += pack(
            {
                "options": options.model_dump(mode="json", by_alias=True),
                "class": [kind.__module__, kind.__qualname__],
                "by_name": ENVIRONMENTS.find(options.name) is kind,
                "at_once": options.calls_at_once,
            }
        )

    def send(self, order: EnvOrder) -> None:
        super().send(asdict(order))

    def read(self) -> Iterator[EnvAnswer]:
        """The answers that have arrived."""
        try:
            yield from map(answer_from, super().read())
        except (KeyError, TypeError) as error:
            raise ChildGone("it wrote what is no answer") from error
