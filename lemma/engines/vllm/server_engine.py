"""vLLM as a pool of servers (`lemma.engines.remote.servers`)."""

from __future__ import annotations

import secrets
from typing import Any

from lemma.core import ranks
from lemma.engines.protocol import EngineError
from lemma.engines.remote.served_jobs import ServedJobs
from lemma.engines.remote.server_client import ServerReply
from lemma.engines.remote.server_pool import Member
from lemma.engines.remote.weights_probe import ProbeScores
from lemma.engines.vllm import jobs
from lemma.engines.vllm.jobs import Job, JobAnswer
from lemma.engines.vllm.vllm_base import VllmBase
from lemma.engines.vllm.vllm_servers import VllmServers


class VllmServerEngine(ServedJobs, VllmBase):
    """Each sample has its own seed, so a request gives the same tokens on any server at any time."""

    has_own_devices = True
    updates_in_flight = True
    servers: VllmServers

    def _write_model(self) -> None:
        self.prefix = f"{secrets.token_hex(4)}-"
        self._waiting: dict[str, Job] = {}
        self.servers = VllmServers(
            self.policy, self.options, self.folder, self.prefix, self.context, self.seed, self._ask_again
        )
        self.servers.write_all()

    @property
    def server(self) -> Any:
        """The first server that is up."""
        return self.servers.first

    def _start(self) -> None:
        self.servers.start()

    def _stop(self) -> None:
        self._waiting.clear()
        self.servers.close()

    def _ask(self, job: Job) -> None:
        job.versions, job.is_sampled = [(0, self.version)], False  # a job that is sent again starts over
        sampling = job.request.sampling
        tokens = len(job.request.prompt) + min(sampling.max_tokens, self.context - len(job.request.prompt))
        client = self.pool.give(job.name, tokens)
        if client is None:
            self._waiting[job.name] = job
            return
        eos = self.policy.tokenizer.eos_token_id
        body = jobs.arguments(job, self.seed, eos, self.context)
        body["vllm_xargs"] = {jobs.ARGUMENT: jobs.extra_of(job, eos)}
        body["request_id"] = job.name
        client.ask(job.name, "/v1/completions", self.servers.body(job.request.prompt.tolist()) | body)

    def _advance(self) -> None:
        """Process the replies that have come; an error in one does not lose the others."""
        failures: list[EngineError] = []
        for job, member, reply in self._replies():
            self._take(job, member, reply, failures)
        self._look_after()
        if failures:
            raise failures[0]

    def _take(self, job: Job, member: Member, reply: ServerReply, failures: list[EngineError]) -> None:
        """Finish the job of a reply, send it again if only the connection was lost, or record the failure."""
        assert member.client is not None
        is_lost = False
        try:
            if reply.status == 200:
                self._finish(job, _answer(reply.body))
                self.pool.release(job.name)
                member.deaths = 0
            elif not member.client.is_well():
                is_lost = True
            elif reply.status == 0:  # only the connection was lost
                self.pool.release(job.name)
                self._ask(job)
            else:
                del self._jobs[job.name]
                self.pool.release(job.name)
                said = f"the vLLM server could not serve request {job.label}: {reply.error}"
                failures.append(jobs.not_finite(job) if "JSON compliant" in reply.error else EngineError(said))
        except ConnectionError:
            self._jobs[job.name] = job
            is_lost = True
        except EngineError as error:
            self.pool.release(job.name)
            failures.append(error)
        if is_lost:
            self.servers.lose(member)

    def _kept(self, job: Job, count: int) -> list[float]:
        holder = self.pool.holder(job.name)
        assert holder is not None and holder.client is not None
        return holder.client.rpc("lemma_kept", job.name, str(count))

    def _hand_over(self) -> None:
        self.servers.write_news()
        counts = ranks.from_leader(self.servers.publish, "publishing weights to the vLLM servers")
        for name, job in self._jobs.items():
            count = counts.get(name, 0)
            job.is_sampled = job.is_sampled or count is None
            if count is not None and not job.is_sampled:
                job.start_span(count, self.version)

    def _wipe(self) -> None:
        def clear() -> None:
            for member, _ in self.pool.each(lambda client: client.rpc("lemma_clear")):
                self.servers.lose(member)

        ranks.from_leader(clear, "wiping the caches of the vLLM servers")

    def _compared(self) -> tuple[ProbeScores, float]:
        difference = self.servers.check(self.version)
        assert self.servers.scored is not None
        return self.servers.scored, difference

    def _score(self, prompt: list[int]) -> ProbeScores:
        return self.servers.score(self.server)

    def sleep(self) -> None:
        if self._can_sleep():
            self.pool.each(lambda client: client.call("/sleep?level=1"))

    def wake(self) -> None:
        if self._can_sleep():
            self.pool.each(lambda client: client.call("/wake_up"))

    def _can_sleep(self) -> bool:
        return self.options.sleep and self.policy.device.type != "cpu" and ranks.is_leader()


def _answer(body: Any) -> JobAnswer:
    choice = body["choices"][0]
    return JobAnswer(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])
