"""vLLM in the trainer's process: weights are passed as tensors, without files."""

from __future__ import annotations

import gc
import logging
import os
import random
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lemma.engines.protocol import EngineError
from lemma.engines.remote.weights_probe import ProbeScores, probe_arguments
from lemma.engines.vllm import jobs
from lemma.engines.vllm.jobs import Job, JobAnswer
from lemma.engines.vllm.settings import engine_arguments, environment
from lemma.engines.vllm.vllm_base import VllmBase
from lemma.engines.vllm.vllm_servers import ADAPTER
from lemma.engines.vllm.weights import base_state, write_adapter

PROBE = "probe"


class VllmEngine(VllmBase):
    """Only one at a time, because vLLM keeps global state in the process.

    While it exists, torch.distributed is initialised with this process alone.
    """

    _engine: Any = None

    def _start(self) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise EngineError(
                "vLLM cannot share a process with others of its kind or with distributed training",
                fix="close the first engine, or write `mode: server`",
            )
        os.environ.update(environment(self.policy.device.type == "cpu") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        with _as_it_was(self.folder):
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            wanted = engine_arguments(self.policy, self.options, self.context, self.seed, self.folder / "model")
            try:
                self._engine = LLMEngine.from_engine_args(EngineArgs(**wanted, disable_log_stats=True))
            except (RuntimeError, ValueError, AssertionError, ImportError, OSError) as error:
                raise EngineError(f"vLLM does not start: {_first_line(error)}") from error
        self._engine.collective_rpc("lemma_prepare")
        if self.policy.is_adapter:
            self._hand_over()

    def _stop(self) -> None:
        if self._engine is None:
            return
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        self._engine.engine_core.shutdown()
        self._engine = None
        destroy_model_parallel()
        destroy_distributed_environment()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _ask(self, job: Job) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        tokenizer = self.policy.tokenizer
        params = SamplingParams(
            **jobs.arguments(job, self.seed, tokenizer.eos_token_id, self.context),
            detokenize=bool(job.request.sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={jobs.ARGUMENT: jobs.extra_of(job, tokenizer.eos_token_id)},
        )
        self._add(job.name, job.request.prompt.tolist(), params)

    def _add(self, name: str, prompt: list[int], params: Any) -> None:
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=self._adapter())

    def _adapter(self, load_inplace: bool = False) -> Any:
        if not self.policy.is_adapter:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(ADAPTER, 1, str(self.folder / "adapter"), load_inplace=load_inplace)

    def _abort(self, job: Job) -> None:
        self._engine.abort_request([job.name])
        self._engine.collective_rpc("lemma_kept", args=(job.name, "0"))

    def _advance(self) -> None:
        self._collect(self._outputs())

    def _collect(self, outputs: list[Any]) -> None:
        """Finish every job that has ended; an error in one does not lose the others."""
        failures = []
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is not None and output.finished:
                part = output.outputs[0]
                answer = JobAnswer(list(part.token_ids), _chosen(part.logprobs, part.token_ids), part.finish_reason)
                try:
                    self._finish(job, answer)
                except EngineError as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def _outputs(self) -> list[Any]:
        try:
            return self._engine.step()
        except (RuntimeError, ValueError, AssertionError) as error:
            self._jobs.clear()
            raise EngineError(
                f"vLLM broke down while generating: {_first_line(error)}", fix="close this engine and make another"
            ) from error

    def _kept(self, job: Job, count: int) -> list[float]:
        return self._engine.collective_rpc("lemma_kept", args=(job.name, str(count)))[0]

    def _hand_over(self) -> None:
        if self.policy.is_adapter:
            write_adapter(self.policy, self.folder / "adapter")
            self._engine.add_lora(self._adapter(load_inplace=True))
        else:
            self._engine.collective_rpc("lemma_take", args=(base_state(self.policy),))
        if not self._engine.reset_prefix_cache(reset_running_requests=bool(self._jobs)):
            raise EngineError("vLLM did not forget the cache of the old weights")

    def _wipe(self) -> None:
        self._engine.collective_rpc("lemma_clear")

    def _score(self, prompt: list[int]) -> ProbeScores:
        from vllm import SamplingParams

        params = SamplingParams(**probe_arguments(self.policy), detokenize=False)
        self._add(PROBE, prompt, params)
        output = None
        try:
            while output is None:
                outputs = self._outputs()
                output = next((o for o in outputs if o.request_id == PROBE and o.finished), None)
                self._collect(outputs)
        finally:
            self._engine.abort_request([PROBE])
        part = output.outputs[0]
        ids = [*prompt, *part.token_ids]
        entries = [*(output.prompt_logprobs or [])[1:], *part.logprobs]
        return ProbeScores(ids, _chosen(entries, ids[-len(entries) :]))

    def sleep(self) -> None:
        if self._can_sleep():
            self._engine.sleep(level=1)

    def wake(self) -> None:
        if self._can_sleep() and self._engine.is_sleeping():
            self._engine.wake_up()

    def _can_sleep(self) -> bool:
        return bool(self._engine.vllm_config.model_config.enable_sleep_mode)


@contextmanager
def _as_it_was(folder: Path) -> Iterator[None]:
    """vLLM seeds every global generator and replaces torch.set_num_threads: restore them.

    Its temporary files, which it never removes, go to `folder`; its warnings go nowhere.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads, setter = torch.get_num_threads(), torch.set_num_threads
    temporary, tempfile.tempdir = tempfile.tempdir, str(folder)
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        tempfile.tempdir = temporary
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads = setter
        torch.set_num_threads(threads)


def _chosen(entries: Sequence[Any], ids: Sequence[int]) -> list[float]:
    """The log-probability of each id in vLLM's dictionaries."""
    return [entry[token].logprob for entry, token in zip(entries, ids, strict=True)]


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
