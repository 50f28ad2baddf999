"""Options that nothing would read are refused, so that nobody believes in them."""

from __future__ import annotations

from collections.abc import Iterable

from lemma.config import Options


def refuse_unused(options: Options, names: Iterable[str], where: str, instead: str = "") -> None:
    """Refuse those of the named options that differ from their defaults: `where` says why nothing reads them.

    A default that is written out is no mistake, because a resolved recipe writes out all of them.
    """
    fields = type(options).model_fields
    changed = [name for name in names if getattr(options, name) != fields[name].get_default(call_default_factory=True)]
    if not changed:
        return
    *others, last = changed
    which = f"{', '.join(others)} and {last} have" if others else f"{last} has"
    fix = f"remove {'them' if others else 'it'}" + (f", or {instead}" if instead else "")
    raise ValueError(f"{which} no effect {where}; {fix}")
