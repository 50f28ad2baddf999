"""`lemma download` as people run it: the real client in its own process, against a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.hub import Hub, serve

MEGABYTE = 1 << 20
BIG = np.random.Generator(np.random.Philox(key=1)).bytes(24 * MEGABYTE)


@pytest.fixture
def hub():
    repositories = {
        "models/someone/small": {"config.json": b'{"model_type": "qwen3"}', "weights/model.safetensors": b"w" * 70_000},
        "models/someone/big": {"model.safetensors": BIG},
        "datasets/openai/gsm8k": {"README.md": b"# GSM8K", "main/train-00000-of-00001.parquet": b"PAR1"},
    }
    with serve(Hub(repositories, gated={"models/someone/gated"})) as running:
        yield running


def environment(folder: Path, url: str) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"}
    values = {name: value for name, value in os.environ.items() if name not in offline}
    return {**values, "HF_ENDPOINT": url, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}


def lemma(folder: Path, url: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lemma", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**environment(folder, url), **more}, capture_output=True, text=True, timeout=500
    )


def test_a_model_goes_into_its_folder_and_is_not_fetched_twice(hub, tmp_path):
    first = lemma(tmp_path, hub.url, "download", "model", "someone/small")
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip() == "someone/small: 2 files, 0.1 MB in model/someone/small"
    folder = tmp_path / "model" / "someone" / "small"
    for name, data in hub.repositories["models/someone/small"].items():
        assert (folder / name).read_bytes() == data
    assert len(hub.files_sent()) == 2
    hub.requests.clear()
    (folder / "config.json").unlink()
    assert lemma(tmp_path, hub.url, "download", "model", "someone/small").returncode == 0
    assert [path.rsplit("/", 1)[1] for path, _ in hub.files_sent()] == ["config.json"]
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "qwen3"}


def test_a_dataset_by_its_short_name_into_a_folder_of_ones_own(hub, tmp_path):
    done = lemma(tmp_path, hub.url, "download", "dataset", "gsm8k", "--to", "here", "--revision", "main")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "main" / "train-00000-of-00001.parquet").read_bytes() == b"PAR1"


def test_one_file_of_many(hub, tmp_path):
    done = lemma(tmp_path, hub.url, "download", "model", "someone/small", "--only", "*.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "someone/small: 1 files, 0.1 MB in model/someone/small"
    none = lemma(tmp_path, hub.url, "download", "model", "someone/small", "--only", "*.gguf")
    assert none.returncode == 2
    assert "no file of 'someone/small' is called '*.gguf'; it has config.json, weights/model.safetensors" in none.stderr


def test_a_killed_download_goes_on_where_it_stopped(hub, tmp_path):
    hub.stop_after = 15 * MEGABYTE
    command = [sys.executable, "-m", "lemma", "download", "model", "someone/big"]
    folder = tmp_path / "model" / "someone" / "big"
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path, hub.url), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 400
        while not any(part.stat().st_size >= 10 * MEGABYTE for part in (folder / ".cache" / "lemma").glob("*")):
            assert process.poll() is None and time.monotonic() < deadline, "nothing arrived"
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert not (folder / "model.safetensors").exists()
    hub.requests.clear()
    again = lemma(tmp_path, hub.url, "download", "model", "someone/big")
    assert again.returncode == 0, again.stderr
    assert (folder / "model.safetensors").read_bytes() == BIG
    ((_, span),) = hub.files_sent()
    assert span is not None and int(span.removeprefix("bytes=").split("-")[0]) >= 10 * MEGABYTE
    assert not (folder / ".cache" / "lemma").exists()


def test_a_spoilt_part_is_found_and_fetched_anew(hub, tmp_path):
    folder = tmp_path / "model" / "someone" / "big"
    part = folder / ".cache" / "lemma" / hashlib.sha256(BIG).hexdigest()
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" + BIG[1 : 12 * MEGABYTE])
    assert lemma(tmp_path, hub.url, "download", "model", "someone/big").returncode == 0
    assert (folder / "model.safetensors").read_bytes() == BIG


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model", "someone/missing"], "there is no model 'someone/missing' on HUB; check the spelling"),
        (["dataset", "someone/small"], "there is no dataset 'someone/small' on HUB; check the spelling"),
        (["model", "someone/gated"], "the model 'someone/gated' is gated on HUB; accept its terms there"),
        (["model", "someone/small", "--revision", "v9"], "the model 'someone/small' has no revision 'v9' on HUB"),
        (["model", "not a name"], "'not a name' cannot be the name of a model; write it like owner/name"),
    ],
)
def test_wrong_names_get_one_sentence_and_leave_nothing(hub, tmp_path, arguments, sentence):
    done = lemma(tmp_path, hub.url, "download", *arguments)
    said = done.stderr.strip()
    assert done.returncode == 2 and sentence.replace("HUB", hub.url) in said and "\n" not in said
    assert not (tmp_path / "model").exists() and not (tmp_path / "data").exists()


def test_a_hub_that_cannot_be_reached(hub, tmp_path):
    assert lemma(tmp_path, hub.url, "download", "model", "someone/small").returncode == 0
    nowhere = "http://127.0.0.1:9"
    done = lemma(tmp_path, nowhere, "download", "model", "someone/small")
    assert done.returncode == 2, "an old folder must not pass for a download"
    assert done.stderr.strip().startswith(f"lemma: error: {nowhere} cannot be reached for the model 'someone/small'")
    offline = lemma(tmp_path, hub.url, "download", "model", "someone/small", HF_HUB_OFFLINE="1")
    assert offline.returncode == 2 and "cannot be fetched offline; unset HF_HUB_OFFLINE" in offline.stderr
