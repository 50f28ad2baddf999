"""What a format is: how a problem becomes a prompt, a demonstration a target, and a completion an answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import field_validator

from lemma.config import Options
from lemma.core.errors import UserError
from lemma.core.files import from_json
from lemma.core.types import Demonstration, Problem
from lemma.formats.tags import Parsed
from lemma.formats.templates import render
from lemma.formats.tool_prompt import OFFERED, with_offer


class Format(Options):
    """How a problem becomes a prompt and a completion becomes an answer."""

    name: str = ""
    """Which format."""
    system: str | None = None
    """Instruction at the top of the prompt, replacing the format's own and the problem's: text, or {file: PATH}. Empty:
    none."""
    bos: bool | None = None
    """Begin the prompt with the beginning-of-sequence token, never twice. Default: whatever the tokenizer does."""

    @field_validator("system", mode="before")
    @classmethod
    def _from_file(cls, given: Any) -> Any:
        """`{file: PATH}` becomes the file's content, which the run then keeps; one final line break is dropped."""
        if not isinstance(given, Mapping):
            return given
        if list(given) != ["file"] or not isinstance(given["file"], str):
            raise ValueError("write the instruction as text, or `{file: path/to/instruction.txt}`")
        path = Path(given["file"]).expanduser()
        try:
            return path.read_text(encoding="utf-8").removesuffix("\n")
        except UnicodeDecodeError:
            raise ValueError(f"'{path}' is not UTF-8 text; save it as UTF-8") from None
        except OSError as error:
            raise ValueError(f"the file '{path}' cannot be read: {error.strerror}; correct the path") from None

    stop: ClassVar[tuple[str, ...]] = ()
    """Generation ends after one of these strings, which stays in the completion."""
    asks_by: ClassVar[str] = ""
    """The word by which an instruction asks for the form of the answer; under one without it the answer may stand
    anywhere. Empty: the tags imply the form."""
    takes_system: ClassVar[bool] = True
    """Whether a problem's own system message replaces the format's; otherwise it is dropped."""

    @property
    def default_system(self) -> str:
        """The format's own instruction; a problem's own system message replaces it."""
        return ""

    @property
    def opening(self) -> str:
        """The beginning of the response that the prompt already contains; a target does not repeat it."""
        return ""

    @property
    @abstractmethod
    def chat_template(self) -> str | None:
        """Jinja template of the prompt, with the beginning-of-sequence token in front if `bos` is true."""

    @abstractmethod
    def parse(self, completion: str) -> Parsed:
        """Split a completion into reasoning and answer, and list its faults."""

    @abstractmethod
    def compose(self, reasoning: str, answer: str) -> str:
        """The response made of these two, as a continuation of the prompt; the inverse of `parse`."""

    def prompt(self, problem: Problem, tokenizer: Any) -> str:
        """The prompt as text, special tokens included; tokenise it without adding any."""
        if OFFERED in problem.extra:
            problem = with_offer(self, problem, tokenizer)
        return self.written(self.messages(problem), tokenizer, tools=problem.extra.get("tools"), about=about(problem))

    def written(
        self,
        turns: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        *,
        tools: Sequence[Any] | None = None,
        is_open: bool = True,
        about: str = "a conversation",
    ) -> str:
        """Turns as text; if `is_open`, up to where the assistant speaks next."""
        if tools or any(turn.get("tool_calls") or turn["role"] == "tool" for turn in turns):
            raise UserError(
                f"format {self.name} cannot show the tools of {about}",
                fix="write `format: chat` with a model whose chat template supports tools",
            )
        template = self.template_for(tokenizer)
        assert template is not None, "a format without a template renders its own prompts"
        return render(template, turns, tokenizer, is_open)

    def install(self, tokenizer: Any) -> None:
        """Give the tokenizer the template that renders this format's prompts, so that plain transformers renders them
        too."""
        template = self.template_for(tokenizer)
        if template is not None:
            tokenizer.chat_template = template

    def template_for(self, tokenizer: Any) -> str | None:
        """The chat template, with the beginning-of-sequence token in front if it belongs there."""
        bare = self.model_copy(update={"bos": False}).chat_template
        if bare is None or not self.wants_bos(tokenizer):
            return bare
        example = render(bare, [{"role": "user", "content": "?"}], tokenizer)
        return bare if example.startswith(tokenizer.bos_token) else self.model_copy(update={"bos": True}).chat_template

    def wants_bos(self, tokenizer: Any) -> bool:
        """Whether a prompt begins with the beginning-of-sequence token, whether or not a template writes it."""
        if getattr(tokenizer, "bos_token", None) is None:
            return False
        return adds_bos(tokenizer) if self.bos is None else self.bos

    def messages(self, problem: Problem) -> list[dict[str, Any]]:
        """The turns of the prompt; the one system message at the front, if any, is the one that counts."""
        turns = [message.as_dict() for message in problem.messages if message.role != "system"]
        if not any(turn["role"] == "user" for turn in turns):
            raise UserError(f"problem {problem.id} asks nothing", fix="give it a message with the role 'user'")
        theirs = problem.system if self.takes_system and self.system is None else None
        system = theirs or self.own_system
        return [{"role": "system", "content": system}, *turns] if system else turns

    @property
    def own_system(self) -> str:
        """The text at the top of the prompt if the problem has no system message of its own."""
        return self.default_system if self.system is None else self.system

    def target(self, demonstration: Demonstration) -> str:
        """The response to train on, without the end-of-sequence token.

        A verbatim response is kept as it is, unless reasoning and answer are known and it does not follow this format:
        then they are put into the format's tags.
        """
        response, answer = demonstration.response, demonstration.answer
        if response is not None:
            continued = self._continue(response, demonstration.prompt)
            if answer is None or self.parse(continued).ok:
                return continued
        if answer is None or not answer.strip():
            raise UserError(
                f"the demonstration of problem {demonstration.problem.id} has neither a response nor an answer",
                fix="give the row a 'response', or a 'reasoning' with an 'answer'",
            )
        reasoning = demonstration.reasoning if demonstration.reasoning is not None else response or ""
        return self.compose(without_think_tags(reasoning).strip(), answer.strip())

    def _continue(self, response: str, prompt: str | None) -> str:
        """Drop the opening tag from a response if the prompt already ends in it."""
        if prompt is not None and not prompt.endswith(self.opening):
            return response
        return response.removeprefix(self.opening)


def about(problem: Problem) -> str:
    """How messages refer to a problem."""
    return f"problem {problem.id}"


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer prepends the beginning-of-sequence token when it encodes a text."""
    return bool(tokenizer.encode("a")[:1] == [tokenizer.bos_token_id])


def without_think_tags(text: str) -> str:
    """Reasoning of teachers often comes wrapped in think tags; a format puts its own around it."""
    return text.replace("<think>", "").replace("</think>", "")


PROMPT_FILE = "prompt.json"


def trained_system(folder: Path) -> str | None:
    """The system message from a stage's rows, or of an exported model; None if there was none."""
    try:
        return from_json((folder / PROMPT_FILE).read_text(encoding="utf-8")).get("system")
    except (OSError, ValueError, AttributeError):
        return None
