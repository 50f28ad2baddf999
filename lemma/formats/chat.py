"""Formats that use the tokenizer's own chat template, or ours if it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from lemma.core.errors import UserError
from lemma.formats.format import Format
from lemma.formats.templates import (
    SILENCE,
    chatml,
    rendering,
    with_default_system,
    with_suffix,
    without_clock,
    without_system,
)


class ChatFormat(Format):
    """A system message and turns, rendered by a chat template that says nothing about reasoning."""

    template: Literal["auto", "tokenizer", "own"] = "auto"
    """Whose chat template: the tokenizer's, our own (<|im_start|> turns), or auto: the tokenizer's if it has one, else
    our own."""

    suffix: ClassVar[str] = ""
    """Appended to every user message."""

    @property
    def chat_template(self) -> str:
        template = with_suffix(chatml(self.own_system, self.bos), self.suffix)
        return template if self.takes_system else without_system(template)

    def written(
        self,
        turns: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        *,
        tools: Sequence[Any] | None = None,
        is_open: bool = True,
        about: str = "a conversation",
    ) -> str:
        theirs = self._tokenizer_template(tokenizer, "tool_use" if tools else "default")
        if theirs is None:
            return super().written(turns, tokenizer, tools=tools, is_open=is_open, about=about)

        def render(turns: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
            given = {"tools": list(tools)} if tools else {}
            return str(
                tokenizer.apply_chat_template(
                    list(turns), chat_template=theirs, tokenize=False, add_generation_prompt=is_open, **given
                )
            )

        with rendering(about, "write `template: own` under format, or `system: ''` where it takes no system message"):
            text = render(turns, tools or ())
        _check_tools(text, turns, tools or (), about, render)
        return text

    def install(self, tokenizer: Any) -> None:
        """Save our template, or the tokenizer's with this format's system message as its default."""
        theirs = self._tokenizer_template(tokenizer)
        if theirs is None:
            super().install(tokenizer)
            return
        template = with_default_system(theirs, self.own_system)
        tokenizer.chat_template = template if self.takes_system else without_system(template)

    def _tokenizer_template(self, tokenizer: Any, kind: str = "default") -> str | None:
        """The tokenizer's template to use, None for ours; some tokenizers have several kinds."""
        if self.template == "own":
            return None
        theirs = getattr(tokenizer, "chat_template", None)
        if isinstance(theirs, dict):
            theirs = theirs.get(kind, theirs.get("default"))
        if theirs is None and self.template == "tokenizer":
            raise UserError("the tokenizer has no chat template", fix="write `template: own` under format")
        return None if theirs is None else with_suffix(without_clock(theirs.removeprefix(SILENCE)), self.suffix)


def _check_tools(
    text: str,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    about: str,
    render: Callable[[Sequence[Mapping[str, Any]], Sequence[Any]], str],
) -> None:
    """Refuse tools or calls that a template without tool support silently leaves out: the model would be trained on an
    empty turn."""
    calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
    said = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in turns]
    for what, ones, rest in (("calls", calls, (said, tools)), ("tools", tools, (turns, ()))):
        found = [(one.get("function") or one).get("name") for one in ones if isinstance(one, Mapping)]
        names = [name for name in found if isinstance(name, str)]
        if any(name not in text for name in names) or (names and text == _rendered(render, *rest)):
            raise UserError(
                f"the tokenizer's chat template leaves out the {what} of {about}",
                fix="use a model whose chat template supports tools, or write them into the messages as text",
            )


def _rendered(render: Callable[..., str], *given: Any) -> str | None:
    """None if the template refuses it."""
    try:
        with rendering("a conversation", ""):
            return render(*given)
    except UserError:
        return None
