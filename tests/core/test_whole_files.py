"""Files that are whole or absent, whoever else writes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lemma.core.files import write_whole


def test_writers_with_the_same_process_number_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Threads have one number between them, as processes on two machines or in two containers may."""
    path = tmp_path / "shared.json"
    texts = [f"{writer}" * 2000 for writer in range(4)]
    with ThreadPoolExecutor(len(texts)) as writers:
        list(writers.map(lambda number: write_whole(path, texts[number % len(texts)]), range(80)))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"
