"""What both vLLM engines share: the folder they start from, the jobs, and the sequence of a weight update."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque

from lemma.engines.protocol import Completion, Engine, EngineError, Key, NewTokens, Request
from lemma.engines.remote.weights_folder import WeightsFolder
from lemma.engines.remote.weights_probe import ProbeScores, probe_prompt, verify
from lemma.engines.sampling import check_request
from lemma.engines.vllm import jobs
from lemma.engines.vllm.jobs import Job
from lemma.engines.vllm.versions import check_version, installed
from lemma.engines.vllm.vllm_options import VllmOptions
from lemma.engines.vllm.weights import check_policy, write_model
from lemma.models.policy import Policy


class VllmBase(Engine, ABC):
    """A copy of the policy in vLLM. The subclasses differ in how they reach vLLM.

    The temporary folder holds what vLLM starts from. It is removed at `close` or when the process ends; if the process
    was killed, by the next engine on this machine.
    """

    name = "vllm"
    may_sleep = True
    scored: ProbeScores  # by vLLM, at the last probe
    prefix = ""  # of the names of jobs

    def __init__(self, policy: Policy, seed: int, options: VllmOptions):
        self.options = options
        if isinstance(self.options.servers, int):  # with servers on other machines, this one needs no vLLM
            check_version(installed())
        check_policy(policy)
        self.policy, self.seed = policy, seed
        self.context = min(policy.context, self.options.context or policy.context)
        self.version = 0
        self.difference = 0.0  # between vLLM and the policy, at the last probe
        self._jobs: dict[str, Job] = {}
        self.finished: deque[Completion] = deque()
        self.new_tokens: deque[NewTokens] = deque()
        self._last_finished = time.monotonic()
        self._count = 0
        self._is_tainted = False  # the cache may hold numbers that are not finite
        self._own_folder = WeightsFolder()
        self.folder = self._own_folder.path
        try:
            self._write_model()
            self._start()
            self._check()
        except BaseException:
            self.close()
            raise

    def submit(self, request: Request) -> None:
        check_request(request, self.context)
        if not self._jobs:
            self._last_finished = time.monotonic()
        for sample in range(request.n):
            self._count += 1
            job = Job(f"{self.prefix}{self._count}-{sample}", request, sample, [(0, self.version)], time.monotonic())
            self._jobs[job.name] = job
            self._ask(job)

    def cancel(self, key: Key) -> None:
        for job in [job for job in self._jobs.values() if job.request.key == key]:
            del self._jobs[job.name]
            self._abort(job)
            self.finished.append(jobs.cancelled(job))

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def work(self) -> None:
        before = len(self.finished)
        self._advance()
        if len(self.finished) > before:
            self._last_finished = time.monotonic()
        elif self._jobs and time.monotonic() - self._last_finished > self.options.answer_seconds:
            self._give_up(f"vLLM gave no completion for {self.options.answer_seconds:g} seconds")

    def update_weights(self, version: int) -> None:
        """Give vLLM the policy's weights, then score a few tokens on both sides.

        Running requests continue with the new weights; their cache is recomputed.
        """
        self.version = version
        self.wake()
        self._hand_over()
        if self._is_tainted:
            self._wipe()
            self._is_tainted = False
        self._check()

    def invalidate(self) -> None:
        self.update_weights(self.version)

    def close(self) -> None:
        self._jobs.clear()
        self.finished.clear()
        self._stop()
        self._own_folder.remove()

    def _write_model(self) -> None:
        write_model(self.policy, self.folder / "model")

    def _check(self) -> None:
        try:
            self.scored, self.difference = self._compared()
        except EngineError:
            self._is_tainted = True
            raise

    def _compared(self) -> tuple[ProbeScores, float]:
        """The probe, scored by vLLM, and how far the policy is from it."""
        scored = self._score(probe_prompt(self.policy, self.context))
        return scored, verify(self.policy, scored, self.version)

    def _give_up(self, problem: str) -> None:
        """Drop everything unfinished, so that the engine can be used again, and raise."""
        for job in list(self._jobs.values()):
            self._abort(job)
        self._jobs.clear()
        raise EngineError(problem, fix="raise `answer_seconds`, or write `engine: native`")

    def _finish(self, job: Job, answer: jobs.JobAnswer) -> None:
        """A job has ended: queue its completion, or raise what is wrong with it."""
        del self._jobs[job.name]
        kept = self._kept(job, len(answer.ids)) if jobs.needs_cuts(job) else None
        try:
            self.finished.append(jobs.finish(job, answer, kept, self.policy.tokenizer))
        except EngineError:
            self._is_tainted = True
            raise

    @abstractmethod
    def _start(self) -> None:
        """Start vLLM with the weights in the folder, and with the policy's adapter."""

    @abstractmethod
    def sleep(self) -> None:
        """Free memory until `wake`, if the platform can and the options say so; otherwise do nothing."""

    @abstractmethod
    def wake(self) -> None:
        """Allocate the memory again."""

    @abstractmethod
    def _stop(self) -> None: ...
    @abstractmethod
    def _ask(self, job: Job) -> None: ...
    @abstractmethod
    def _abort(self, job: Job) -> None: ...
    @abstractmethod
    def _advance(self) -> None:
        """Wait briefly for answers; finished jobs go through `_finish`."""

    @abstractmethod
    def _kept(self, job: Job, count: int) -> list[float]: ...
    @abstractmethod
    def _hand_over(self) -> None:
        """vLLM loads the policy's weights and drops its cache."""

    @abstractmethod
    def _wipe(self) -> None:
        """Set the whole cache to zero."""

    @abstractmethod
    def _score(self, prompt: list[int]) -> ProbeScores:
        """Log-probabilities of the prompt and of a few greedy tokens after it."""
