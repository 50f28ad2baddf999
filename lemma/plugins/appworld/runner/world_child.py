"""One world, or one judgement, in its own process, which is confined before this file's functions run."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from datetime import datetime
from typing import Any

import child_frames

EPISODE = "episode"
# What the policy reads is cut to far fewer tokens; this keeps a flood out of the trainer.
LONGEST_OUTPUT = 100_000


def warm(root: str) -> None:
    """Import all that a world and a judgement need, and fill their caches, once for all children."""
    os.environ["APPWORLD_ROOT"] = root
    import pytest  # noqa: F401  (AppWorld's tests compare with it)
    from appworld import environment, evaluator  # noqa: F401
    from appworld.apps import build_main_app, get_all_apps
    from appworld.apps.api_lib import set_local_date_and_time, unset_local_date_and_time
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.common.utils import import_models_module
    from fastapi.testclient import TestClient

    for app in get_all_apps():
        import_models_module(app)
    # The threads of this client are gone again when it is closed: only a process with a single thread may fork.
    with TestClient(build_main_app(tuple(sorted(get_all_apps())))):
        pass
    ApiDocCollection.load(load_apps=tuple(get_all_apps(skip_admin=True)), include_response_schemas=True)
    unset_local_date_and_time(set_local_date_and_time(datetime(2023, 5, 18, 12)))
    gc.collect()
    gc.freeze()


def play(connection: socket.socket, first: dict[str, Any]) -> None:
    """Serve one world until the other side is gone."""
    from appworld.environment import AppWorld

    world = AppWorld(first["task"], experiment_name=EPISODE, load_ground_truth=False, **first["settings"])
    connection.sendall(child_frames.pack({"number": first["number"]}))
    while True:
        message = child_frames.receive(connection.recv)
        answer: dict[str, Any]
        if message["call"] == "execute":
            answer = {"output": execute(world, message["code"]), "completed": completed(world)}
        else:
            world._save_state(world.output_db_home_path_on_disk)
            answer = {"files": saved(world.output_db_home_path_on_disk)}
        connection.sendall(child_frames.pack({**answer, "number": message["number"]}))


def execute(world: Any, code: str) -> str:
    """The output of the code, or how it failed. Errors inside AppWorld are reported in the same way."""
    code = code.encode("utf-8", "replace").decode("utf-8")
    said = len(world.environment_io)
    try:
        output = world.execute(code)
    except UnicodeError:
        # It was executed; the log of it cannot be written, now or later, before the text is made sound.
        heard = world.environment_io[said:]
        output = heard[-1]["output"] if heard else "Execution failed. Traceback:\nUnicodeError"
    except (KeyboardInterrupt, SystemExit, MemoryError, RecursionError) as error:
        output = f"Execution failed. Traceback:\n{type(error).__name__}"
    if getattr(world, "null_patch_unsafe_execution", False):
        with contextlib.suppress(Exception):
            world.safety_guard.disable()
    output = output.encode("utf-8", "backslashreplace").decode("utf-8")
    for entry in world.environment_io[said:]:
        entry["output"] = entry["output"].encode("utf-8", "backslashreplace").decode("utf-8")
    if len(output) > LONGEST_OUTPUT:
        half = LONGEST_OUTPUT // 2
        output = f"{output[:half]}\n[...]\n{output[-half:]}"
    return output


def completed(world: Any) -> bool:
    try:
        return bool(world.task_completed())
    except Exception:  # noqa: BLE001  (agent code may have broken anything in this process; the judge has its own eyes)
        return False


def saved(folder: str) -> dict[str, str]:
    """The changes of every app, as text."""
    files = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            files[name] = file.read()
    return files


def judge(connection: socket.socket, first: dict[str, Any]) -> None:
    """Run a task's tests on the changes that its world saved. No agent code runs here."""
    task = first["task"]
    from appworld.apps.supervisor.constants import TASK_STATUS_LITERAL
    from appworld.common.path_store import path_store
    from appworld.common.utils import get_type_args
    from appworld.evaluator import evaluate_task

    folder = os.path.join(path_store.experiment_outputs, EPISODE, "tasks", task, "dbs")
    os.makedirs(folder)
    for name, text in first["files"].items():
        if os.path.basename(name) != name or not name.endswith((".jsonl", ".json")):
            raise ValueError(f"'{name}' is no file of saved changes")
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    tests = evaluate_task(task, EPISODE, suppress_errors=True, save_report=False)
    status = final_status(folder)
    verdict = {
        "passed": tests.pass_count,
        "total": tests.num_tests,
        "free": len([one for one in tests.test_data or [] if one["label"] == "no_op_pass"]),
        "success": bool(tests.success),
        "completed": status in get_type_args(TASK_STATUS_LITERAL),
        "gave_up": status == "fail",
    }
    connection.sendall(child_frames.pack({**verdict, "number": first["number"]}))


def final_status(folder: str) -> str | None:
    """The status that the agent gave its task at the end, from the saved changes."""
    from appworld.apps import get_all_apps
    from appworld.collections.models import ModelCollection

    models = ModelCollection.load(":memory:lemma", folder, load_apps=get_all_apps())
    tasks = models.supervisor.Task.all()
    return str(tasks[-1].status) if tasks and tasks[-1].status is not None else None
