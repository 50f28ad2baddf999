"""`lemma report`: which samples go into the file, and writing it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lemma.core.errors import UserError
from lemma.core.files import write_whole
from lemma.reports.page import make_page, packed
from lemma.reports.page_data import PageData
from lemma.reports.run_reader import ChunkPlace, RunReader

MEGABYTE = 1_000_000
# Maximum characters of a text, and samples of a step, in a report; the live page has all of them.
LONGEST = 20_000
SAMPLES = 128
# Maximum number of steps of a stage whose journals are read: reading all of a long run would take minutes.
STEPS = 80
# What samples of other types than a run writes raise.
DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError)


@dataclass
class Written:
    """What a report contains, for the summary at the end."""

    path: Path
    size: int
    chunks: int
    chunks_there: int


def write_report(runs: Sequence[RunReader], words: Sequence[str], to: Path, megabytes: float) -> Written:
    """The numbers of all steps, and the samples of as many steps as fit, spread evenly."""
    data = PageData(runs, words).whole()
    room = int(megabytes * MEGABYTE) - len(make_page("", packed(data), {})) - 20_000
    if room < 0:
        raise UserError(f"the numbers alone are larger than {megabytes:g} MB", fix="write --size and a larger number")
    chunks: dict[str, str] = {}
    there = sum(len(one["chunks"]) for one in data["runs"])
    for number, (run, own) in enumerate(zip(runs, data["runs"], strict=True)):
        kept = _fill(run, number, chunks, room // len(runs))
        own["chunks"] = [{**one, **kept[one["key"]]} for one in own["chunks"] if one["key"] in kept]
    title = ", ".join(run.name for run in runs)
    page = make_page(title, packed(data), chunks).encode()
    write_whole(to, page)
    return Written(to, len(page), len(chunks), there)


def _fill(run: RunReader, number: int, chunks: dict[str, str], room: int) -> dict[str, dict[str, object]]:
    """Add samples to `chunks` until the size limit is reached; returns what the page needs to know about each chunk."""
    kept: dict[str, dict[str, object]] = {}
    for place in in_turn(run.chunks()):
        try:
            chunk = run.read(place, LONGEST, SAMPLES)
            problems = list(dict.fromkeys(sample["problem"] for sample in chunk["samples"]))
        except (UserError, OSError, *DAMAGE):  # removed in the meantime, or damaged: show the others
            continue
        if not chunk["samples"]:
            continue
        text = packed(chunk)
        if len(text) > room:
            if kept:
                break
            continue
        room -= len(text) + 100
        chunks[f"{number}:{place.key}"] = text
        kept[place.key] = {"problems": problems, "count": len(chunk["samples"])}
    return kept


def in_turn(places: Sequence[ChunkPlace]) -> Iterable[ChunkPlace]:
    """The places in the order in which they are worth having: of each source the last and the first, then the middle,
    the middles of the halves and so on; sources take turns."""
    by_source: dict[str, list[ChunkPlace]] = {}
    for place in places:
        by_source.setdefault(place.source, []).append(place)
    queues = [[own[i] for i in spread(len(own))][:STEPS] for own in by_source.values()]
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue):
                yield queue[turn]


def spread(count: int) -> list[int]:
    """0 to count - 1 in an order of which every prefix is spread evenly: the ends, then halves, quarters, eighths."""
    order: dict[int, None] = {}
    if count:
        order[count - 1] = order[0] = None
    parts = 2
    while len(order) < count:
        for part in range(1, parts, 2):
            order[round((count - 1) * part / parts)] = None
        parts *= 2
    return list(order)
