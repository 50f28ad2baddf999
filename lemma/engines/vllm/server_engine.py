"""vLLM as a supervised server: when it dies it is started again with the current weights and asked again."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lemma.engines.protocol import EngineError
from lemma.engines.vllm import jobs
from lemma.engines.vllm.jobs import Job, JobAnswer
from lemma.engines.vllm.server import SERVED, Server, ServerReply
from lemma.engines.vllm.settings import engine_arguments, environment
from lemma.engines.vllm.vllm_base import ADAPTER, VllmBase
from lemma.engines.vllm.vllm_probe import ProbeScores, compare, probe_arguments, probe_prompt
from lemma.engines.vllm.weights import write_adapter, write_weights

WAIT_SECONDS = 0.2


class VllmServerEngine(VllmBase):
    """The noise of a sample has a seed of its own, so a request that is issued again gives the same tokens."""

    server: Server | None = None
    restarts = 0  # in a row, without a completion in between

    def _start(self) -> None:
        if self.policy.is_adapter and not (self.folder / "adapter").exists():
            write_adapter(self.policy, self.folder / "adapter")
        wanted = engine_arguments(self.policy, self.options, self.context, self.seed, self.folder / "model")
        self.server = Server(wanted, environment(self.policy), self.folder / "server.log", self.options.start_seconds)
        self.server.rpc("lemma_prepare")
        if self.policy.is_adapter:
            self._load_adapter()

    def _stop(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    @property
    def _running(self) -> Server:
        if self.server is None:
            raise EngineError("the vLLM server is closed", fix="make another engine")
        return self.server

    def _ask(self, job: Job) -> None:
        eos = self.policy.tokenizer.eos_token_id
        body = jobs.arguments(job, self.seed, eos, self.context)
        if jobs.needs_cuts(job):
            body["vllm_xargs"] = {jobs.ARGUMENT: jobs.cuts_of(job, eos)}
        self._running.ask(job.name, self._body(job.request.prompt.tolist()) | body)

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        model = ADAPTER if self.policy.is_adapter else SERVED
        return {"model": model, "prompt": prompt, "return_token_ids": True, "add_special_tokens": False}

    def _abort(self, job: Job) -> None:
        self._running.drop(job.name)

    def _advance(self) -> None:
        """Wait for one reply and take all that are there; trouble with one does not lose the others."""
        try:
            replies = [self._running.replies.get(timeout=WAIT_SECONDS)]
            while not self._running.replies.empty():
                replies.append(self._running.replies.get_nowait())
        except queue.Empty:
            replies = []
        failures: list[EngineError] = []
        lost = not self._running.is_alive()
        for reply in replies:
            lost |= self._take(reply, failures)
        if lost:
            self._recover()
        if failures:
            raise failures[0]

    def _take(self, reply: ServerReply, failures: list[EngineError]) -> bool:
        """Finish the job of a reply, or note its failure; True where the server seems to be gone."""
        job = self._jobs.get(reply.name)
        if job is None:
            return False
        try:
            if reply.status == 200:
                self._finish(job, _answer(reply.body))
                self.restarts = 0
                return False
            if not self._running.is_well():
                return True
            if reply.status == 0:  # only the connection was lost
                self._ask(job)
                return False
            del self._jobs[job.name]
            not_finite = "JSON compliant" in reply.error
            failures.append(
                jobs.not_finite(job)
                if not_finite
                else EngineError(f"the vLLM server could not serve request {job.label}: {reply.error}")
            )
        except ConnectionError:
            self._jobs[job.name] = job
            return True
        except EngineError as error:
            failures.append(error)
        return False

    def _kept(self, job: Job, count: int) -> list[float]:
        return self._running.rpc("lemma_kept", job.name, str(count))

    def _hand_over(self) -> None:
        if self.policy.is_adapter:
            write_adapter(self.policy, self.folder / "adapter")
        else:
            write_weights(self.policy, self.folder / "model")
        try:
            with self._pause():
                if self.policy.is_adapter:
                    self._load_adapter()
                else:
                    self._running.rpc("lemma_load", str(self.folder / "model" / "model.safetensors"))
                answer = self._running.call("/reset_prefix_cache?reset_running_requests=true")
        except ConnectionError:
            self._recover(verify=False)  # it starts with the new weights
            return
        if not answer["success"]:
            raise EngineError("vLLM did not forget the cache of the old weights")

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """No token is made meanwhile: it would come from new weights over the old ones' cache."""
        self._running.call("/pause?mode=keep&clear_cache=false")
        yield
        self._running.call("/resume")

    def _load_adapter(self) -> None:
        body = {"lora_name": ADAPTER, "lora_path": str(self.folder / "adapter"), "load_inplace": True}
        self._running.call("/v1/load_lora_adapter", body)

    def _wipe(self) -> None:
        self._running.rpc("lemma_clear")

    def _score(self, prompt: list[int]) -> ProbeScores:
        body = self._body(prompt) | probe_arguments(self.policy)
        try:
            choice = self._running.call("/v1/completions", body)["choices"][0]
        except ConnectionError as error:
            raise EngineError(f"the vLLM server died while it was checked: {self._running.last_words()}") from error
        entries = (choice["prompt_logprobs"] or [])[1:]
        given = [entry[str(token)]["logprob"] for entry, token in zip(entries, prompt[1:], strict=bool(entries))]
        return ProbeScores([*prompt, *choice["token_ids"]], [*given, *choice["logprobs"]["token_logprobs"]])

    def _recover(self, verify: bool = True) -> None:
        """Start the server again with the weights it had, and issue what is unfinished again."""
        words = self._running.last_words()
        self._stop()
        self.restarts += 1
        if self.restarts > self.options.restarts:
            self._jobs.clear()
            raise EngineError(f"the vLLM server died {self.restarts} times in a row; its last words: {words}")
        self._start()
        if verify:  # the policy may have moved on: what counts is what the server held before
            compare(self.policy, self.scored, self._score(probe_prompt(self.policy, self.context)))
        for job in self._jobs.values():
            self._ask(job)

    def sleep(self) -> None:
        if self._can_sleep():
            self._running.call("/sleep?level=1")

    def wake(self) -> None:
        if self._can_sleep():
            self._running.call("/wake_up")

    def _can_sleep(self) -> bool:
        return self.options.sleep and self.policy.device.type != "cpu"


def _answer(body: Any) -> JobAnswer:
    choice = body["choices"][0]
    return JobAnswer(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])
