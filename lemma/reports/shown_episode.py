"""An episode turn by turn: what the policy read, what it sampled, and what the environment answered."""

from __future__ import annotations

from typing import Any

from lemma.core.terminal import visible
from lemma.rollouts import Episode

COLOURS = {"prompt": "2", "sampled": "1;32", "observed": "36", "note": "33"}


def shown(episode: Episode, tokenizer: Any, is_coloured: bool) -> list[str]:
    """The lines of an episode: what was read and said, in the words of its ids."""

    def text(ids: Any) -> str:
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def part(kind: str, label: str, words: str) -> list[str]:
        begin, end = (f"\x1b[{COLOURS[kind]}m", "\x1b[0m") if is_coloured else ("", "")
        words = visible(words)
        return [f"{begin}{label:>9} | {line}{end}" for line in words.split("\n")]

    lines = part("note", "problem", f"{episode.problem_id}, sample {episode.sample}")
    for number, turn in enumerate(episode.turns):
        lines += part("observed" if turn.extends else "prompt", "observed" if turn.extends else "prompt",
                      text(turn.context))  # fmt: skip
        lines += part("sampled", "sampled", text(turn.ids))
        facts = [f"turn {number + 1}", f"{len(turn.ids) - turn.given} tokens are learnt from", turn.finish]
        facts += [f"reward {turn.reward:g}"] if turn.reward is not None else []
        facts += ["the reply was cut"] if turn.cut else []
        lines += part("note", "", ", ".join(facts))
    last = episode.turns[-1]
    lines += part("observed", "unread", last.heard) if last.heard else []
    reward = "unknown" if episode.reward is None else f"{episode.reward:g}"
    lines += part("note", "outcome", f"reward {reward}, {episode.verdict}: {episode.reason}")
    return [*lines, ""]
