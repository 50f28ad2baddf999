"""`cluster.config`: DeepSpeed, Accelerate and FSDP files, read and put in the place of what a recipe leaves open.

A file decides nothing that the recipe says: where both speak, the recipe stands and `sentences` names the difference.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lemma.cluster.cluster_options import ClusterOptions
from lemma.config import Options
from lemma.config.document import read
from lemma.config.load import load_values
from lemma.core.errors import UserError
from lemma.learning.learning_options import OptimOptions
from lemma.models.model_options import ModelOptions
from lemma.plugins.foreign_configs.accelerate_config import FSDP_KEYS, STRATEGIES, read_accelerate, read_fsdp
from lemma.plugins.foreign_configs.deepspeed_config import read_deepspeed
from lemma.plugins.foreign_configs.foreign_mapping import Mapped, Place

# The key of `batch` that counts the examples of a step, by the kind of a stage.
STEP_KEYS = {"supervised": "sequences", "preference": "examples"}
OF_STAGES = ("optim", "batch")
SECTIONS: Mapping[str, type[Options]] = {"optim": OptimOptions, "cluster": ClusterOptions, "model": ModelOptions}
ACCELERATE_KEYS = {"distributed_type", "compute_environment", "num_processes"}
DEEPSPEED_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16"}

STRING = r'("(?:\\.|[^"\\])*")'
COMMENT = re.compile(STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
LAST_COMMA = re.compile(STRING + r"|,(?=\s*[}\]])")


@dataclass(frozen=True)
class ForeignConfig:
    """A configuration of another system in Lemma's words, and what it says that Lemma has no word for."""

    file: str
    system: str
    values: Mapping[Place, Any]
    notes: tuple[str, ...]

    def sentences(self, recipe: Mapping[str, Any]) -> list[str]:
        """What has no counterpart, and where the recipe says something else. `recipe` is its plain data."""
        said = [f"{self.file}: {note}" for note in self.notes]
        for key, (mine, theirs) in self._differences(recipe).items():
            said.append(f"{self.file}: the recipe says {key}: {mine}, which stands against {theirs}")
        return said

    def _differences(self, recipe: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        differences = {}
        for (section, key), theirs in self.values.items():
            for place, block, name in _blocks(recipe, section, key, lambda name, stage: stage.get("kind")):
                mine = block.get(name)
                if mine is not None and _plain(mine) != _plain(theirs):
                    differences[f"{place}.{name}"] = (mine, theirs)
            if section == "batch" and not any(stage.get("kind") in STEP_KEYS for stage in recipe["stages"].values()):
                differences["stages"] = ("reinforcement learning counts problems", f"{theirs} examples a step")
        return differences


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def read_foreign(path: str) -> ForeignConfig:
    """Read a file of another system; every mistake in it is a `UserError` of one sentence."""
    file = Path(os.path.expanduser(path))  # which leaves `~nobody` as it is
    values = _load(file)
    mapped = Mapped(path)
    plain = {key.removeprefix("fsdp_") for key in values}
    if ACCELERATE_KEYS & values.keys():
        system = "Accelerate"
        read_accelerate(values, mapped)
        own = mapped.part(values, "deepspeed_config").get("deepspeed_config_file")
        if own and str(values.get("distributed_type")).upper() == "DEEPSPEED":
            read_deepspeed(_load(_beside(file, str(own)), "deepspeed_config_file"), mapped)
    elif DEEPSPEED_KEYS & values.keys():
        system = "DeepSpeed"
        read_deepspeed(values, mapped)
    elif {"fsdp", "fsdp_config"} & values.keys():
        system = "FSDP"
        read_fsdp(mapped.part(values, "fsdp_config") | _strategy_of(values.get("fsdp")), mapped)
    elif plain & FSDP_KEYS:
        system = "FSDP"
        read_fsdp(values, mapped)
    else:
        raise UserError(
            "this is no configuration of DeepSpeed, Accelerate or FSDP",
            file=path,
            fix="name a file with `zero_optimization`, `distributed_type` or FSDP's keys in it",
        )
    _check(mapped)
    return ForeignConfig(path, system, dict(mapped.values), tuple(mapped.sentences()))


def _check(mapped: Mapped) -> None:
    """Refuse, in the words of the file, what the options do not take."""
    for place, value in mapped.values.items():
        section, key = place
        kind = SECTIONS.get(section)
        try:
            if kind is not None:
                load_values(kind, {key: value})
        except UserError as error:
            raise UserError(f"`{mapped.keys[place]}`: {error.problem}", file=mapped.file, fix=error.fix) from None


def _strategy_of(word: Any) -> dict[str, Any]:
    """`fsdp: full_shard auto_wrap offload`, as transformers' Trainer takes it."""
    words = str(word or "").split() if not isinstance(word, list) else [str(one) for one in word]
    values: dict[str, Any] = {"cpu_offload": True} if "offload" in words else {}
    strategies = [one for one in words if one.upper() in STRATEGIES]
    return values | ({"sharding_strategy": strategies[0]} if strategies else {})


def _beside(file: Path, named: str) -> Path:
    """A file that another names: from the working folder, as Accelerate reads it, or next to the other."""
    path = Path(os.path.expanduser(named))
    return path if path.exists() else file.parent / path


def _load(file: Path, option: str = "cluster.config") -> dict[str, Any]:
    """A block of keys; `option` is what names the file."""
    if file.suffix.lower() != ".json":
        return read(file, "cluster configuration").data
    fix = f"correct `{option}`"
    try:
        values = json.loads(_plain_json(file.read_text(encoding="utf-8-sig")), object_pairs_hook=_once)
    except FileNotFoundError:
        raise UserError(f"there is no file {file}", fix=fix) from None
    except json.JSONDecodeError as error:
        raise UserError(f"this is no JSON: {error.msg}", file=file, line=error.lineno, fix="correct the line") from None
    except KeyError as error:
        raise UserError(f"the key '{error.args[0]}' is there twice", file=file, fix="remove one of them") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"it cannot be read: {error}", file=file, fix=fix) from None
    if not isinstance(values, dict):
        raise UserError("this is JSON, but no block of keys", file=file, fix=fix)
    return values


def _plain_json(text: str) -> str:
    """Without comments and the commas after a last element, which DeepSpeed's own reader passes over."""
    blank = re.sub(COMMENT, lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)
    return re.sub(LAST_COMMA, lambda found: found[1] or " ", blank)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise KeyError(twice[0])
    return dict(pairs)


def fill(data: dict[str, Any], kind_of: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A recipe's data with the values of its `cluster.config` wherever it has none of its own.

    `kind_of` tells the kind of a stage by its name and what is written under it.
    """
    cluster = data.get("cluster")
    path = cluster.get("config") if isinstance(cluster, dict) else None
    if not isinstance(path, str) or not path:
        return data
    data = {**data, "stages": _copied(data.get("stages"))}
    for (section, key), value in read_foreign(path).values.items():
        if section not in OF_STAGES and isinstance(data.setdefault(section, {}), dict):
            data[section] = dict(data[section])
        for _, block, name in _blocks(data, section, key, kind_of):
            block.setdefault(name, value)
    return data


def _copied(stages: Any) -> Any:
    """Stages whose blocks may be written into; what is wrong with them is said when they are validated."""
    if not isinstance(stages, dict):
        return stages
    copies = {name: dict(stage) if isinstance(stage, dict) else stage for name, stage in stages.items()}
    for stage in copies.values():
        if isinstance(stage, dict):
            for section in OF_STAGES:
                inner = stage.get(section, {})
                stage[section] = dict(inner) if isinstance(inner, dict) else inner
    return copies


def _blocks(
    data: Mapping[str, Any], section: str, key: str, kind_of: Callable[[str, Any], Any]
) -> list[tuple[str, dict[str, Any], str]]:
    """Where a value stands in a recipe's data: the name of each block, the block, and the key in it."""
    if section not in OF_STAGES:
        block = data.get(section)
        return [(section, block, key)] if isinstance(block, dict) else []
    stages = data.get("stages")
    blocks = []
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        inner = stage.get(section) if isinstance(stage, dict) else None
        own_key = STEP_KEYS.get(kind_of(name, stage)) if section == "batch" and isinstance(stage, dict) else key
        if isinstance(inner, dict) and own_key:
            blocks.append((f"stages.{name}.{section}", inner, own_key))
    return blocks
