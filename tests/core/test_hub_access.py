"""Names and paths, and a hub that is out of reach."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from lemma.core import hub_access
from lemma.core.errors import LemmaWarning, UserError
from lemma.core.hub_access import hub_answers, looks_like_path, notice_offline
from lemma.data.data_options import SourceOptions
from lemma.data.sources import files_of
from lemma.models.load_model import load_policy
from lemma.models.places import resolve


def test_what_is_meant_as_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    for name in ("./a", "/a", "~/a", "a/b/c", "runs/typo", "experiments/typo", "owner/name/", "a\\b", "my model"):
        assert looks_like_path(name), name
    for name in ("gpt2", "Qwen/Qwen2.5-0.5B", "openai/gsm8k"):
        assert not looks_like_path(name), name


def test_a_mistyped_run_folder_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "gsm8k" / "stages").mkdir(parents=True)
    (tmp_path / "runs" / "gsm8k" / "recipe.yaml").touch()
    (tmp_path / "runs" / "gsm").mkdir()  # neither a run nor a model
    (tmp_path / "runs" / "gsm8.log").touch()
    with pytest.raises(UserError, match="there is no model folder runs/gsm8; did you mean 'runs/gsm8k'"):
        resolve("runs/gsm8")
    with pytest.raises(UserError, match=r"there is no model folder ./runs/gsm7/; did you mean './runs/gsm8k'"):
        resolve("./runs/gsm7/")
    with pytest.raises(UserError, match=r"there is no model folder ./absent; check the spelling"):
        resolve("./absent")
    with pytest.raises(UserError, match="the file or folder 'runs/rows' does not exist"):
        files_of(SourceOptions(source="runs/rows"))


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has switched the hub off or put a proxy in between; what the test changes is put back."""
    for name in (*hub_access.SWITCHES, *(one for one in os.environ if one.lower().endswith("_proxy"))):
        monkeypatch.setenv(name, "")
    for module in ("huggingface_hub.constants", "datasets.config"):
        pytest.importorskip(module)
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_access, "_is_out_of_reach", False)
    hub_answers.cache_clear()


def test_a_hub_out_of_reach_is_noticed_once_and_switched_off(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.warns(LemmaWarning, match="the hub cannot be reached"):
        notice_offline()
    assert huggingface_hub.constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE and hub_access.is_offline()
    notice_offline()  # a second warning would be an error
    with pytest.raises(UserError, match="there is no folder owner/absent, and the hub cannot be reached;"):
        load_policy("owner/absent", "cpu")


def test_a_warning_shows_the_line_of_the_program_that_called_lemma(
    online: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.warns(LemmaWarning, match="the hub cannot be reached") as caught, pytest.raises(UserError):
        load_policy("owner/absent", "cpu")
    assert caught[0].filename == __file__


def test_the_variable_that_switches_the_hub_off_is_named(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "yes")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # as read when it was imported
    with pytest.raises(UserError, match=r"and the hub is switched off \(TRANSFORMERS_OFFLINE=yes\);"):
        load_policy("owner/absent", "cpu")


def test_a_hub_that_answers_is_not_asked_again(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        notice_offline()
    notice_offline()
    assert not hub_access.is_offline()


def test_a_name_that_is_never_found_does_not_hold_anybody_up(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_access, "SECONDS_TO_WAIT", 0.2)

    def never(*args: object, **more: object) -> None:
        time.sleep(5)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", never)
    begin = time.perf_counter()
    assert not hub_answers("http://nowhere.invalid")
    assert time.perf_counter() - begin < 3
