"""vLLM as a pool of servers, with load balancing, weight updates and supervision. If a server dies, the others take its
requests, and it is restarted."""

from __future__ import annotations

import os
import queue
import secrets
import time
from contextlib import suppress
from typing import Any

from lemma.core import ranks
from lemma.core.errors import warn
from lemma.engines.protocol import EngineError
from lemma.engines.vllm import jobs
from lemma.engines.vllm.jobs import Job, JobAnswer
from lemma.engines.vllm.publishing import ADAPTER, Publisher
from lemma.engines.vllm.serve import KEY_VARIABLE
from lemma.engines.vllm.server import Server
from lemma.engines.vllm.server_client import SERVED, ServerClient, ServerReply
from lemma.engines.vllm.server_gpus import gpus_of_servers
from lemma.engines.vllm.server_pool import RETRY_SECONDS, Member, ServerPool
from lemma.engines.vllm.settings import engine_arguments, environment
from lemma.engines.vllm.vllm_base import VllmBase
from lemma.engines.vllm.vllm_probe import ProbeScores, compare, probe_arguments, probe_prompt, verify

WAIT_SECONDS = 0.2


class VllmServerEngine(VllmBase):
    """Each sample has its own seed, so a request gives the same tokens on any server at any time. Ranks share the
    servers: the first rank starts, updates and restarts them."""

    has_own_devices = True
    updates_in_flight = True

    def _write_model(self) -> None:
        self.pool = ServerPool()
        self.prefix = f"{secrets.token_hex(4)}-"
        self._waiting: dict[str, Job] = {}
        self._published = 0
        self.key = os.environ.get(KEY_VARIABLE) or secrets.token_hex(16)
        self.publisher = Publisher(self.policy, self.folder, self.prefix)
        self.publisher.write_all()

    @property
    def server(self) -> Any:
        """The first server that is up."""
        return self.pool.up[0].client if self.pool.up else None

    @property
    def restarts(self) -> int:
        return max((member.deaths for member in self.pool.members), default=0)

    def _start(self) -> None:
        if isinstance(self.options.servers, list):
            self._find(self.options.servers)
        else:
            self._launch_all(self.options.servers)

    def _find(self, urls: list[str]) -> None:
        """Connect to running servers; the first thing they get is the weights."""
        end = time.monotonic() + self.options.start_seconds
        for number, url in enumerate(urls):
            client = ServerClient(url, self.key, self.pool.replies)
            self.pool.members.append(Member(number, client))
            while (wrong := client.refusal()) is not None or not client.is_well():
                if time.monotonic() > end or (wrong and wrong.startswith("it ")):
                    raise EngineError(
                        f"the vLLM server {url} does not serve: {wrong or 'it is not well'}",
                        fix=f"start it with `python -m lemma.engines.vllm.stand_alone` and the {KEY_VARIABLE} of here",
                    )
                time.sleep(RETRY_SECONDS / 10)
        ranks.from_leader(lambda: self._publish(is_first=True), "publishing weights to the vLLM servers")

    def _launch_all(self, count: int) -> None:
        """The first rank starts the servers and tells the others their addresses."""
        if ranks.world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size())):
            raise EngineError(
                "vLLM servers that Lemma starts serve the ranks of one machine",
                fix="start them with `python -m lemma.engines.vllm.stand_alone` and give their addresses as `servers`",
            )

        def start() -> list[tuple[str, str]]:
            self.pool.members += [Member(number) for number in range(count)]
            started = [self._launch(member) for member in self.pool.members]
            for member, server in zip(self.pool.members, started, strict=True):
                server.wait_until_ready()
                member.client, member.coming = server, None
                self.publisher.prepare(server)
            return [(server.url, server.key) for server in started]

        addresses = ranks.from_leader(start, "starting the vLLM servers")
        if not ranks.is_leader():
            clients = [ServerClient(url, key, self.pool.replies) for url, key in addresses]
            self.pool.members += [Member(number, client) for number, client in enumerate(clients)]

    def _launch(self, member: Member) -> Server:
        wanted = engine_arguments(self.policy, self.options, self.context, self.seed, self.folder / "model")
        variables = environment(self.policy) | gpus_of_servers(self.policy.device.type, self.options, member.number)
        log = self.folder / f"server-{member.number}.log"
        member.published = self._published
        seconds = self.options.start_seconds
        member.coming = Server(wanted, variables, log, seconds, self.pool.replies, self.key, member.port)
        member.port = member.coming.port
        return member.coming

    def _stop(self) -> None:
        self._waiting.clear()
        self.pool.close()

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
        client.ask(job.name, self._body(job.request.prompt.tolist()) | body)

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        model = ADAPTER if self.policy.is_adapter else SERVED
        return {"model": model, "prompt": prompt, "return_token_ids": True, "add_special_tokens": False}

    def _abort(self, job: Job) -> None:
        self._waiting.pop(job.name, None)
        holder = self.pool.holder(job.name)
        self.pool.release(job.name)
        if holder is not None and holder.client is not None:
            holder.client.drop(job.name)

    def _advance(self) -> None:
        """Wait for one reply and process all that have arrived; an error in one does not lose the others."""
        if not self.pool.members:
            raise EngineError("the vLLM server is closed", fix="make another engine")
        replies = []
        with suppress(queue.Empty):
            replies.append(self.pool.replies.get(timeout=WAIT_SECONDS))
            while True:
                replies.append(self.pool.replies.get_nowait())
        failures: list[EngineError] = []
        for reply in replies:
            self._take(reply, failures)
        self._look_after()
        if failures:
            raise failures[0]

    def _take(self, reply: ServerReply, failures: list[EngineError]) -> None:
        """Finish the job of a reply, send it again if only the connection was lost, or record the failure."""
        job, member = self._jobs.get(reply.name), self.pool.holder(reply.name)
        is_stale = member is None or (reply.source is not None and reply.source is not member.client)
        if job is None or member is None or member.client is None or is_stale:
            return
        member.heard = time.monotonic()
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
            self._lose(member)

    def _kept(self, job: Job, count: int) -> list[float]:
        holder = self.pool.holder(job.name)
        assert holder is not None and holder.client is not None
        return holder.client.rpc("lemma_kept", job.name, str(count))

    def _lose(self, member: Member) -> None:
        """Restart a server if Lemma started it, otherwise wait for it to return; the others take its requests."""
        client = member.client
        assert client is not None
        words = client.last_words()
        names = self.pool.lose(member)
        if isinstance(client, Server):
            client.close()
            self._start_again(member, words)
        else:
            member.away = client
        for name in names:
            if name in self._jobs:
                self._ask(self._jobs[name])

    def _start_again(self, member: Member, words: str) -> None:
        member.deaths += 1
        if member.deaths <= self.options.restarts:
            self._launch(member)
            return
        member.coming = None
        said = f"the vLLM server died {member.deaths} times in a row; its last words: {words}"
        if not any(other.has_hope for other in self.pool.members):
            self._jobs.clear()
            raise EngineError(said)
        warn(f"{said}; the others go on without it")

    def _look_after(self) -> None:
        """Find servers that died or hang, and take back those that work again; then send all waiting jobs, if a server
        is up."""
        for member in self.pool.up:
            if member.client is not None and not member.client.is_alive():
                self._lose(member)
        for member in self.pool.hung():
            self._lose(member)
        for member in self.pool.members:
            if member.coming is not None:
                self._look_at_coming(member, member.coming)
            elif member.away is not None and self._is_back(member):
                member.client, member.away = member.away, None
        if self.pool.up:
            waiting, self._waiting = self._waiting, {}
            for job in waiting.values():
                self._ask(job)
        elif not any(member.coming or member.away for member in self.pool.members):
            self._jobs.clear()
            urls = ", ".join(self.options.servers) if isinstance(self.options.servers, list) else "started by Lemma"
            raise EngineError(f"no vLLM server is left ({urls})", fix="start them again, then run the same command")

    def _look_at_coming(self, member: Member, server: Server) -> None:
        try:
            if not server.is_ready():
                return
            self.publisher.prepare(server)
            if member.published != self._published:
                self.publisher.load(server)
            self._compare(server)
            member.client, member.coming = server, None
        except (EngineError, ConnectionError) as error:
            words = server.last_words()
            server.close()
            if "other weights" in str(error):
                raise
            self._start_again(member, words)

    def _is_back(self, member: Member) -> bool:
        """Whether a lost server on another machine answers again; it gets the weights again, as it may have lost
        them."""
        assert member.away is not None
        now = time.monotonic()
        if now - member.lost_at > self.options.start_seconds:
            member.away.close()
            member.away = None
            return False
        if now - member.heard < RETRY_SECONDS:
            return False
        member.heard = now
        try:
            if not member.away.is_well(RETRY_SECONDS):
                return False
            if ranks.is_leader():
                member.away.rpc("lemma_prepare")
                self.publisher.load(member.away, is_new=True)
            self._compare(member.away)
        except ConnectionError:
            return False
        return True

    def _compare(self, client: ServerClient) -> None:
        """Compare with the servers' last scores, since the policy may have changed after them."""
        if hasattr(self, "scored"):
            compare(self.policy, self.scored, self._scored_by(client, probe_prompt(self.policy, self.context)))

    def _hand_over(self) -> None:
        self.publisher.write_news()
        counts = ranks.from_leader(self._publish, "publishing weights to the vLLM servers")
        for name, job in self._jobs.items():
            count = counts.get(name, 0)
            job.is_sampled = job.is_sampled or count is None
            if count is not None and not job.is_sampled:
                job.start_span(count, self.version)

    def _publish(self, is_first: bool = False) -> dict[str, int | None]:
        """All servers that are up load the weights in the folder; those that are starting load them when they are up.
        Returns how many tokens each job that has begun has from the old weights, or None if it was finished."""
        self._published += 1
        counts: dict[str, int | None] = {}

        def load(client: ServerClient) -> None:
            if is_first:
                client.rpc("lemma_prepare")
            counts.update(self.publisher.load(client, is_new=is_first))

        for member, _ in self.pool.each(load):
            self._lose(member)
        return counts

    def _wipe(self) -> None:
        def clear() -> None:
            for member, _ in self.pool.each(lambda client: client.rpc("lemma_clear")):
                self._lose(member)

        ranks.from_leader(clear, "wiping the caches of the vLLM servers")

    def _check(self) -> None:
        """Every server scores the probe, and every rank compares all of them with its policy."""
        try:
            scores = ranks.from_leader(self._score_all, "the probe of the vLLM servers")
            self.difference = max(verify(self.policy, scored, self.version) for scored in scores)
            self.scored = scores[0]
        except EngineError:
            self._is_tainted = True
            raise

    def _score_all(self) -> list[ProbeScores]:
        prompt = probe_prompt(self.policy, self.context)
        end = time.monotonic() + self.options.start_seconds
        while True:
            scores, words = [], ""
            for member in self.pool.up:
                assert member.client is not None
                try:
                    scores.append(self._scored_by(member.client, prompt))
                except ConnectionError:
                    words = member.client.last_words()
                    self._lose(member)
            if scores:
                return scores
            if time.monotonic() > end:
                raise EngineError(f"the vLLM server died while it was checked: {words}")
            time.sleep(WAIT_SECONDS)
            self._look_after()

    def _score(self, prompt: list[int]) -> ProbeScores:
        return self._scored_by(self.server, prompt)

    def _scored_by(self, client: ServerClient, prompt: list[int]) -> ProbeScores:
        body = self._body(prompt) | probe_arguments(self.policy)
        choice = client.call("/v1/completions", body)["choices"][0]
        entries = (choice["prompt_logprobs"] or [])[1:]
        given = [entry[str(token)]["logprob"] for entry, token in zip(entries, prompt[1:], strict=bool(entries))]
        return ProbeScores([*prompt, *choice["token_ids"]], [*given, *choice["logprobs"]["token_logprobs"]])

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
