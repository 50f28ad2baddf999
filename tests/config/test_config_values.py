"""What the words of a YAML file and of `--set` become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from lemma.config import Options
from lemma.config.document import parse_value, read, write
from lemma.config.load import load
from lemma.core.errors import UserError


class Inner(Options):
    share: float = Field(0.5, ge=0, le=1)
    flag: bool = True
    name: str | None = None
    size: int | Literal["all"] = "all"


class Outer(Options):
    inner: Inner = Inner()
    many: list[Inner] = Field(default_factory=list)
    free: dict[str, Any] = Field(default_factory=dict)


def loaded(folder: Path, text: str, *overrides: str) -> Outer:
    path = folder / "file.yml"
    path.write_text(text, encoding="utf-8")
    return load(Outer, path, overrides)


def test_json_is_yaml(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{\n"inner": {"share": 1e-1, "flag": false, "name": null}}')
    assert load(Outer, tmp_path / "file.json").inner == Inner(share=0.1, flag=False, name=None)
    for dumped in ({"indent": "\t"}, {"separators": (",", ":")}, {"ensure_ascii": False}):
        for text in ("two\twords", "a \U0001f600 smile", "\\ud83d\\ude00", "é/\\", "\\\U0001f600"):
            (tmp_path / "file.json").write_text(json.dumps({"inner": {"name": text}}, **dumped))  # type: ignore[arg-type]
            assert load(Outer, tmp_path / "file.json").inner.name == text
    (tmp_path / "file.json").write_text('{\n"inner": {"shar": 1e-1}}')
    with pytest.raises(UserError, match=r"file.json:2: unknown key 'inner.shar'; did you mean 'share'\?"):
        load(Outer, tmp_path / "file.json")


@pytest.mark.parametrize("is_ascii", [True, False])
def test_every_character_and_any_layout_of_json(tmp_path: Path, is_ascii: bool) -> None:
    """YAML refuses some of them unescaped, ends a line at others, and wants keys short and next to their ':'."""
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000)]))
    free = {"k" * 1025: 1, "all": everything, "list": ["\x7f", "\u2028: "]}
    text = json.dumps({"free": free}, ensure_ascii=is_ascii, separators=("\r\n,", " \n\t: "))
    (tmp_path / "file.json").write_bytes(text.encode())
    assert load(Outer, tmp_path / "file.json").free == free


def test_the_line_of_a_mistake_below_characters_that_end_a_line_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"free"\n: {"a": "\u2028\x85"},\n"inner": {"shar": 1}}', encoding="utf-8")
    with pytest.raises(UserError, match=r"file.json:3: unknown key 'inner.shar'"):
        load(Outer, tmp_path / "file.json")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("5e-6", 5e-6),
        ("1E3", 1000.0),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", 16),
        (".5", 0.5),
        ("-3", -3),
        ("true", True),
        ("False", False),
        ("on", "on"),
        ("no", "no"),
        ("y", "y"),
        ("null", None),
        ("~", None),
        ("None", None),
        ("2024-01-31", "2024-01-31"),
        ("12:30", "12:30"),
        ("1.2.3", "1.2.3"),
        ("'5'", "5"),
        ("!!str 5", "5"),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
    ],
)
def test_scalars_mean_what_a_reader_expects(written: str, meant: Any, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(f"key: {written}\n", encoding="utf-8")
    value = read(path).data["key"]
    assert value == meant and type(value) is type(meant)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("", ""),
        ("0", 0),
        ("false", False),
        ("null", None),
        ("# no comment", "# no comment"),
        ("*.jsonl", "*.jsonl"),
        ("a: b", "a: b"),
        ("- a", "- a"),
        ("{a: 1}", {"a": 1}),
        ('"7"', "7"),
    ],
)
def test_values_of_overrides(written: str, meant: Any) -> None:
    assert parse_value(written) == meant and type(parse_value(written)) is type(meant)


@pytest.mark.parametrize(
    "value",
    [None, "None", "null", "on", "5e-6", "010", "", " x ", "a: b", "# x", "2024-01-31", 5e-06, 1e22, True, "é\n"],
)
def test_what_is_written_is_read_back(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(write({"key": value, "list": [value]}), encoding="utf-8")
    assert read(path).data == {"key": value, "list": [value]}


def test_words_for_true_and_false_are_understood_where_a_truth_value_stands(tmp_path: Path) -> None:
    assert loaded(tmp_path, "inner: {flag: off}").inner.flag is False
    assert loaded(tmp_path, "inner: {flag: yes, name: no}").inner == Inner(flag=True, name="no")


def test_true_is_not_the_number_one() -> None:
    with pytest.raises(ValueError, match="a number is wanted here"):
        Inner(share=True)
    with pytest.raises(ValueError, match="a number is wanted here"):
        Inner(size=True)


def test_keys_are_always_text(tmp_path: Path) -> None:
    assert loaded(tmp_path, "free: {on: 1, 5: 2, null: 3}").free == {"on": 1, "5": 2, "null": 3}


def test_anchors_and_merges(tmp_path: Path) -> None:
    text = "inner: &base {share: 0.25, name: a}\nmany:\n- *base\n- {name: b, <<: *base}\n"
    outer = loaded(tmp_path, text)
    assert outer.many == [Inner(share=0.25, name="a"), Inner(share=0.25, name="b")]


def test_a_merged_value_is_reported_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"file\.yml:1: 'inner\.share' cannot be 7"):
        loaded(tmp_path, "inner: &base\n  share: 0.25\nmany:\n- <<: *base\n".replace("\n  share: 0.25", " {share: 7}"))


def test_windows_line_ends_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(b"\xef\xbb\xbfinner:\r\n  name: a\r\n  shar: 1\r\n")
    with pytest.raises(UserError, match=r"file\.yaml:3: unknown key 'inner\.shar'; did you mean 'share'\?"):
        load(Outer, path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("inner.share=0", Outer(inner=Inner(share=0.0, name="a"))),
        ("inner.flag=false", Outer(inner=Inner(flag=False, name="a"))),
        ("inner.name=null", Outer(inner=Inner(name=None))),
        ("inner.name=", Outer(inner=Inner(name=""))),
        ("inner={}", Outer()),
        ("free.a.b=1", Outer(inner=Inner(name="a"), free={"a": {"b": 1}})),
        ("many=[{size: 3}]", Outer(inner=Inner(name="a"), many=[Inner(size=3)])),
    ],
)
def test_overrides_are_honoured(override: str, expected: Outer, tmp_path: Path) -> None:
    assert loaded(tmp_path, "inner: {name: a}", override) == expected


def test_overrides_reach_into_lists_and_the_last_one_wins(tmp_path: Path) -> None:
    outer = loaded(tmp_path, "many: [{size: 1}, {size: 2}]", "many.1.size=3", "many.1.size=4", "many.0.name=x")
    assert outer.many == [Inner(size=1, name="x"), Inner(size=4)]


def test_a_value_below_an_override_is_reported_as_that_override(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        loaded(tmp_path, "inner: {name: a}", "inner={share: 2}")
    assert str(caught.value) == (
        "--set inner={share: 2}: 'inner.share' cannot be 2; write a number of at least 0 and at most 1"
    )
