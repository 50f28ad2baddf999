"""What a recipe can say about generation servers of any kind. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from lemma.config import Options


class ServerOptions(Options):
    """Generation servers that Lemma starts on this machine, or finds by their addresses."""

    servers: Annotated[int, Field(ge=0, le=1024)] | list[str] = 0
    """How many generation servers Lemma starts on this machine, or the addresses of running servers, such as
    [http://node7:8000]; 0: this process generates. Requests are balanced across the servers, and each gets the
    weights."""
    gpus: list[Annotated[int, Field(ge=0)]] | None = None
    """GPUs for the servers that Lemma starts, one each. Default: those after the ranks' GPUs; for a single server the
    trainer's."""
    start_seconds: float = Field(600.0, gt=0)
    """Time limit for the start of a server."""
    answer_seconds: float = Field(1800.0, gt=0)
    """Maximum time without any completion of a server while some are pending."""
    restarts: int = Field(3, ge=0)
    """How many times in a row, without a single completion in between, a server that dies is restarted."""

    @field_validator("servers")
    @classmethod
    def _are_addresses(cls, servers: int | list[str]) -> int | list[str]:
        if isinstance(servers, list):
            wrong = [url for url in servers if not url.startswith(("http://", "https://"))]
            if wrong or not servers:
                raise ValueError(f"servers are addresses such as http://node7:8000, not {wrong or 'an empty list'}")
            if len(set(servers)) < len(servers):
                raise ValueError("every server is named once")
        return servers

    @field_validator("gpus")
    @classmethod
    def _one_each(cls, gpus: list[int] | None, info: ValidationInfo) -> list[int] | None:
        servers = info.data.get("servers")
        if gpus is not None and isinstance(servers, int) and len(gpus) != servers:
            raise ValueError(f"gpus has {len(gpus)} numbers for {servers} servers; write one for each")
        return gpus

    @property
    def has_own_devices(self) -> bool:
        """Whether it generates in processes of its own."""
        return bool(self.servers)

    @property
    def shares_gpu(self) -> bool:
        """Whether a server that Lemma starts has the trainer's GPU."""
        return self.servers == 1 and self.gpus is None

    @property
    def server_count(self) -> int:
        return self.servers if isinstance(self.servers, int) else len(self.servers)
