"""Builds a small root for AppWorld, with tasks of our own: run by the Python of AppWorld's virtual environment.

    python appworld_root.py FOLDER

One base of databases with three notes; five tasks in three scenarios, of difficulty 1 to 3; splits `train` and `dev`.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

NOW = datetime(2023, 5, 18, 12)
USER = {"first_name": "Ada", "last_name": "Byron", "email": "ada.byron@gmail.com", "phone_number": "5550001111"}
PASSWORD = "poetical-science"
NOTES = [("Bread", "flour, water", ["kitchen"]), ("Report", "due friday", ["work"]), ("Budget", "ask jo", ["work"])]

COUNT = """
import json

def evaluate(test, models, public_data, private_data, main_user, ground_truth_answer):
    with test("assert answers match."):
        test.answer(json.loads(models.end.supervisor.Task.all()[-1].answer), ground_truth_answer)
    with test("assert no note has changed."):
        test.case(models.changed_model_names(), "==", set())
"""
WRITE = """
def evaluate(test, models, public_data, private_data, main_user, ground_truth_answer):
    old = {one.id for one in models.start.simple_note.Note.all()}
    new = [one for one in models.end.simple_note.Note.all() if one.id not in old]
    with test("assert one note is new."):
        test.case(len(new), "==", 1)
    with test("assert its title is right."):
        test.case(new[0].title, "==", private_data["title"])
    with test("assert its content is right."):
        test.case(new[0].content, "==", private_data["content"])
    with test("assert the old notes are there."):
        test.case(len(models.end.simple_note.Note.all()) - len(new), "==", 3)
"""
COUNT_TESTS = [("assert answers match.", "no_op_fail"), ("assert no note has changed.", "no_op_pass")]
WRITE_TESTS = [
    ("assert one note is new.", "no_op_fail"),
    ("assert its title is right.", "no_op_fail"),
    ("assert its content is right.", "no_op_fail"),
    ("assert the old notes are there.", "no_op_pass"),
]
TASKS: dict[str, dict[str, Any]] = {
    "aaaaaa1_1": {"ask": "How many notes do I have in Simple Note?", "answer": 3, "difficulty": 1},
    "aaaaaa1_2": {"ask": "How many of my notes are tagged work?", "answer": 2, "difficulty": 1},
    "bbbbbb2_1": {"ask": "Write a note titled Plan that says rest.", "note": ("Plan", "rest"), "difficulty": 2},
    "bbbbbb2_2": {"ask": "Write a note titled Fish that says cod.", "note": ("Fish", "cod"), "difficulty": 2},
    "cccccc3_1": {"ask": "How many of my notes mention a lighthouse?", "answer": 0, "difficulty": 3},
}
SPLITS = {"train": ["aaaaaa1_1", "aaaaaa1_2", "bbbbbb2_1"], "dev": list(TASKS)}


def build_bases(data: Path) -> None:
    from appworld.api_docs import prepare_api_docs
    from appworld.apps import get_all_apps
    from appworld.apps.api_lib import set_local_date_and_time
    from appworld.collections.api_docs import ApiDocCollection
    from appworld.collections.models import ModelCollection

    base = data / "base_dbs"
    base.mkdir(parents=True)
    freezer = set_local_date_and_time(NOW)
    models = ModelCollection.load(to_db_home_path=str(base), load_apps=get_all_apps(), create_db=True)
    models.admin.MainUser.create_save(**USER, birthday="1990-12-10", sex="female")
    owner = models.supervisor.Supervisor.create_save(**USER, birthday="1990-12-10", sex="female")
    models.supervisor.Task.create_save(supervisor_id=owner.id, instruction="what the prompt says")
    password = {"account_name": "simple_note", "password": PASSWORD}
    models.supervisor.AccountPassword.create_save(supervisor_id=owner.id, **password)
    names = {name: USER[name] for name in ("first_name", "last_name", "email")}
    user = models.simple_note.User.create_save(**names, password=PASSWORD, verified=True)
    for title, content, tags in NOTES:
        models.simple_note.Note.create_save(user_id=user.id, title=title, content=content, tags=tags)
    docs = data / "api_docs" / "standard"
    docs.mkdir(parents=True)
    for app, described in ApiDocCollection.build().items():
        written = {name: {**doc, "canary_string": ""} for name, doc in described.items()}
        (docs / f"{app}.json").write_text(json.dumps(written))
    for app in ("simple_note", "supervisor"):
        for doc in prepare_api_docs(app):
            models.api_docs.ApiDoc.create_save(**{("app_name_" if k == "app_name" else k): v for k, v in doc.items()})
    freezer.stop()


def build_task(data: Path, name: str, task: dict[str, Any]) -> None:
    folder = data / "tasks" / name
    (folder / "dbs").mkdir(parents=True)
    for one in (data / "base_dbs").glob("*.db"):
        (folder / "dbs" / f"{one.stem}.jsonl").write_text("")
    specs = {"instruction": task["ask"], "supervisor": USER, "datetime": NOW.isoformat(), "db_version": "0.1.0"}
    (folder / "specs.json").write_text(json.dumps(specs))
    gold = folder / "ground_truth"
    gold.mkdir()
    title, content = task.get("note", (None, None))
    tests = WRITE_TESTS if title else COUNT_TESTS
    counts = {"num_apps": 1, "num_apis": 2, "num_api_calls": 3, "num_solution_code_lines": 4}
    files: dict[str, Any] = {
        "metadata.json": {"difficulty": task["difficulty"], "mode": "minimal", **counts},
        "public_data.json": {}, "private_data.json": {"title": title, "content": content},
        "answer.json": task.get("answer"),
        "test_data.json": [{"requirement": requirement, "label": label} for requirement, label in tests],
    }  # fmt: skip
    for file, value in files.items():
        (gold / file).write_text(json.dumps(value))
    (gold / "evaluation.py").write_text(WRITE if title else COUNT)


def main(root: Path) -> None:
    os.environ["APPWORLD_ROOT"] = str(root)
    data = root / "data"
    build_bases(data)
    for name, task in TASKS.items():
        build_task(data, name, task)
    (data / "datasets").mkdir()
    for split, names in SPLITS.items():
        (data / "datasets" / f"{split}.txt").write_text("\n".join(names) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
