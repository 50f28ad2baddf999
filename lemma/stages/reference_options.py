"""What a recipe can say about the model that a stage compares the policy with."""

from __future__ import annotations

from pydantic import Field, model_validator

from lemma.config import Options


class ReferenceModelOptions(Options):
    """A reference other than the model that the stage starts from, or one that follows the policy."""

    path: str | None = Field(None, min_length=1)
    """A folder, a hub name or a GGUF file with the policy's vocabulary. Default: the model that the stage starts
    from."""
    every: int | None = Field(None, ge=1)
    """After every so many steps the reference takes over a share of the policy (TR-DPO). Default: it never changes."""
    mix: float = Field(0.6, gt=0, le=1)
    """That share: reference = mix x policy + (1 - mix) x reference; 1 replaces the reference by the policy."""

    @model_validator(mode="after")
    def _says_something(self) -> ReferenceModelOptions:
        if self.every is None and "mix" in self.model_fields_set:
            raise ValueError("mix has no effect without `every`; write for example `every: 512`")
        if self.every is None and self.path is None:
            raise ValueError("this is the reference anyway; name a `path`, let it follow with `every`, or remove it")
        return self

    @property
    def follows(self) -> bool:
        return self.every is not None

    def missing(self, *, has_adapter: bool) -> str:
        """What is wrong where the policy is trained as an adapter; empty if nothing is."""
        if self.every is not None and has_adapter:
            return "a reference that follows needs whole weights; remove model.lora, or remove `every`"
        return ""
