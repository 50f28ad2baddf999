"""The sink of a run: its loggers, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lemma.config.registry import Registry
from lemma.core.errors import UserError, nearest, warnings_said
from lemma.core.events import Event, Said, Sink
from lemma.core.ranks import rank
from lemma.reporting.console import Console
from lemma.reporting.logfile import LogFile
from lemma.reporting.loggers import Logger, Loggers
from lemma.reporting.tensorboard import TensorBoard
from lemma.reporting.wandb import WeightsAndBiases

if TYPE_CHECKING:
    from lemma.recipe import Recipe


@dataclass(frozen=True)
class Logged:
    """What a logger may know about the run: its folder, its recipe, a Weights & Biases project, and a way to print."""

    run_dir: Path
    recipe: Mapping[str, Any]
    project: str
    say: Callable[[str], None]


def _mlflow(run: Logged) -> Logger:
    from lemma.plugins.mlflow import MLflow

    return MLflow(run.run_dir, run.recipe, run.say)


def _trackio(run: Logged) -> Logger:
    from lemma.plugins.trackio import Trackio

    return Trackio(run.run_dir, run.recipe, run.say)


LOGGERS: Registry[Callable[[Logged], Logger]] = Registry(
    "loggers",
    object,
    {
        "console": lambda run: Console(),
        "run.log": lambda run: LogFile(run.run_dir / "run.log"),
        "tensorboard": lambda run: TensorBoard(run.run_dir / "tensorboard"),
        "wandb": lambda run: WeightsAndBiases(run.run_dir, run.project, run.recipe, run.say),
        "mlflow": _mlflow,
        "trackio": _trackio,
    },
)


class OwnLogger:
    """A custom logger: a function of an event, or a class made with the run folder and the recipe.

    Whatever goes wrong in it, the run continues.
    """

    troubles: tuple[type[Exception], ...] = (Exception,)

    def __init__(self, name: str, log: Any, run: Logged):
        self.name = name
        try:
            self._log = log(run.run_dir, run.recipe) if isinstance(log, type) else log
        except Exception as error:
            raise UserError(
                f"the logger {name} does not start ({type(error).__name__}: {error})",
                fix="repair it, or leave it out of run.loggers",
            ) from error

    def __call__(self, event: Event) -> None:
        self._log(event)

    def close(self, failed: bool) -> None:
        close = getattr(self._log, "close", None)
        if close is not None:
            close(failed)


def make_logger(name: str, run: Logged) -> Logger:
    """A logger by its name, by `path.py:Name`, or from another package."""
    logger = LOGGERS.find(name)
    if not callable(logger):
        raise UserError(f"there is no logger '{name}'", fix=nearest(name, LOGGERS.names()))
    return logger(run) if name in LOGGERS else OwnLogger(name, logger, run)


@contextmanager
def make_sink(
    run_dir: Path,
    *,
    tensorboard: bool,
    wandb: str | None,
    recipe: Mapping[str, Any],
    console: bool = True,
    loggers: Sequence[str] = (),
) -> Iterator[Sink]:
    """The sink of a run in `run_dir`, open until the block ends. `wandb` is the name of a project, or none; `loggers`
    are names of further ones.

    Nothing is written before the first event: until then the folder may be locked, cleared or refused.
    """
    usual = {"console": console, "run.log": True, "tensorboard": tensorboard, "wandb": wandb is not None}
    names = dict.fromkeys([*(name for name, is_wanted in usual.items() if is_wanted), *loggers])
    run = Logged(run_dir, recipe, wandb or "lemma", say=lambda text: sink(Said(text)))
    sink = Loggers([make_logger(name, run) for name in names])
    with _open_until_the_end(sink):
        yield sink


@contextmanager
def rank_sink(run_dir: Path) -> Iterator[Sink]:
    """Messages of every rank but the first go to a file per rank."""
    sink = Loggers([LogFile(run_dir / "logs" / f"rank-{rank()}.log")])
    with _open_until_the_end(sink):
        yield sink


@contextmanager
def _open_until_the_end(sink: Loggers) -> Iterator[None]:
    """Inside the block Python's warnings go to the sink; afterwards it is closed and told whether the block failed."""
    failed = True
    try:
        with warnings_said(lambda text: sink(Said(text, "warning"))):
            yield
        failed = False
    except BaseException as error:
        sink.note_end(error)
        raise
    finally:
        sink.close(failed)


def sink_of(recipe: Recipe, *, console: bool = True) -> AbstractContextManager[Sink]:
    """The recipe's sink; for ranks other than the first, a log file each."""
    if rank() != 0:
        return rank_sink(Path(recipe.run.dir))
    run, values = recipe.run, recipe.model_dump(mode="json")
    return make_sink(
        Path(run.dir),
        tensorboard=run.tensorboard,
        wandb=run.wandb or None,
        recipe=values,
        console=console,
        loggers=run.loggers,
    )
