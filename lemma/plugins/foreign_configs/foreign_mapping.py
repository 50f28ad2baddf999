"""What is gathered while a foreign configuration is read: values in Lemma's words, and sentences about the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lemma.config.explain import show
from lemma.core.errors import UserError

AUTO = "auto"
# What lies beyond, as infinity and a whole number of 400 digits do, is no number of a configuration.
LEAST, MOST = -1e300, 1e300
# A value of the recipe by its place; `optim` and `batch` stand for those of every stage.
Place = tuple[str, str]
RANKS: Place = ("cluster", "ranks")
SHARD: Place = ("cluster", "shard")
PRECISION: Place = ("model", "precision")
CHECKPOINTING: Place = ("model", "checkpointing")
COMPILE: Place = ("model", "compile")
DEVICE: Place = ("run", "device")
CLIP: Place = ("optim", "clip")
STEP: Place = ("batch", "step")


@dataclass(slots=True)
class Mapped:
    """`values` has what could be mapped, and `keys` where the file says it. `autos` and `tuned` are keys: left to the
    recipe, and decided by Lemma."""

    file: str
    values: dict[Place, Any] = field(default_factory=dict)
    keys: dict[Place, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    autos: list[str] = field(default_factory=list)
    tuned: list[str] = field(default_factory=list)

    def put(self, place: Place, value: Any, key: str) -> None:
        """Take a value over; `auto` leaves it to the recipe."""
        if value == AUTO:
            self.autos.append(key)
        elif value is not None:
            self.values[place], self.keys[place] = value, key

    def say(self, key: str, why: str) -> None:
        self.notes.append(f"`{key}` {why}")

    def unknown(self, key: str) -> None:
        self.say(key, "is not known to Lemma and has no effect")

    def rest(
        self, values: Mapping[str, Any], known: Collection[str], tuned: Collection[str],
        not_done: Mapping[str, str] | None = None, prefix: str = "",
    ) -> None:  # fmt: skip
        """Of every key what becomes of it, but of those that are `known`. What has no counterpart is said where it is
        on."""
        lacking = not_done or {}
        for key, value in values.items():
            is_unset = value in (False, None, {}) or (isinstance(value, dict) and value.get("enabled") is False)
            if key in lacking and not is_unset:
                self.say(prefix + key, lacking[key])
            elif key in tuned:
                self.tuned.append(prefix + key)
            elif key not in known and key not in lacking:
                self.unknown(prefix + key)

    def number(self, values: Mapping[str, Any], key: str, name: str = "") -> float | None:
        """A number where there is one; `auto` is noted, and text that is no number refused."""
        value, name = values.get(key), name or key
        if value is None:
            return None
        if value == AUTO:
            self.autos.append(name)
            return None
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value <= MOST:
            raise UserError(f"`{name}` is {show(value)}, not a number", file=self.file, fix="write a number or auto")
        return int(value) if float(value).is_integer() else float(value)

    def whole(self, values: Mapping[str, Any], key: str, name: str = "") -> int | None:
        value = self.number(values, key, name)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise UserError(f"`{name or key}` is {value}, not a whole number of at least 1", file=self.file)
        return None if value is None else int(value)

    def switch(self, values: Mapping[str, Any], key: str, name: str) -> bool | None:
        """Whether something is on, also as a word or a number; None where that is `auto`."""
        value = values.get(key, False)
        if value == AUTO:
            return None
        if not is_on(value) and not is_off(value):
            raise UserError(f"`{name}` is {show(value)}", file=self.file, fix="write true, false or auto")
        return is_on(value)

    def part(self, values: Mapping[str, Any], key: str) -> dict[str, Any]:
        """A block of keys; empty where there is none."""
        value = values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise UserError(f"`{key}` is {show(value)}, not a block of keys", file=self.file, fix=f"leave `{key}` out")
        return value

    def sentences(self) -> list[str]:
        """All that has to be said, a sentence each."""
        said = list(self.notes)
        if self.autos:
            said.append(f"auto is what the recipe says: {_listed(self.autos)}")
        if self.tuned:
            said.append(f"Lemma decides these by itself: {_listed(self.tuned)}")
        return said


def _listed(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in dict.fromkeys(keys))


def is_on(value: Any) -> bool:
    """Accelerate writes booleans as words at times."""
    return value is True or str(value).lower() in ("true", "yes", "1")


def is_off(value: Any) -> bool:
    return value is None or value is False or str(value).lower() in ("false", "no", "0")
