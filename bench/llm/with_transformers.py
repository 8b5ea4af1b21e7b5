"""What a user has without us: `generate`, and transformers' own continuous batching."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pliant.bench.llm.outcome import Outcome, Recorder
from pliant.bench.llm.systems import Batch
from pliant.bench.llm.workload import Integers, Request, Workload
from pliant.errors import PliantError
from pliant.torchvision_ops import declare

_PAGE = 32
_POLL_S = 0.005
_GIVE_UP_S = 600


class ContinuousBatchingError(PliantError):
    """transformers' continuous batching stopped answering."""


def load(folder: Path, dtype: str, device: str, attention: str = "sdpa") -> Any:
    """The model as transformers runs it."""
    declare()
    from transformers import AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention, local_files_only=True
    )
    return model.eval().requires_grad_(False).to(device)


def greedy(model: Any, prompts: Sequence[Integers], tokens: int) -> Integers:
    """What `generate` answers to prompts of one length, [prompts, tokens]."""
    ids = torch.from_numpy(np.stack(prompts)).to(model.device)
    answers = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    new: Integers = answers[:, ids.shape[1] :].cpu().numpy()
    return new


class Generate:
    """`model.generate`, greedy, on a batch of prompts of one length; it goes on until the longest answer is there.

    Answers come as a whole, each when the batch is done, as `generate` returns them.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, batch: Batch, recorder: Recorder) -> None:
        longest = max(request.tokens for _, request in batch)
        generated = greedy(self._model, [request.prompt for _, request in batch], longest).shape[1]
        recorder.note_all((index, min(request.tokens, generated)) for index, request in batch)


class ContinuousBatching:
    """transformers' manager of a fused, paged batch.

    Its cache holds `tokens` tokens. Prefix sharing is off, since no two prompts share one, and is only work. Its thread
    computes nothing but takes a processor while it waits for requests, so it lives only while it is measured.
    """

    def __init__(self, model: Any, tokens: int, most: int, max_batch_tokens: int = 512) -> None:
        from transformers import ContinuousBatchingConfig

        model.generation_config.update(do_sample=False, eos_token_id=-1)
        self._model = model
        names = {field.name for field in fields(ContinuousBatchingConfig)}
        made: Any = ContinuousBatchingConfig
        size = "page_size" if "page_size" in names else "block_size"  # up to transformers 5.17
        self._config = made(
            **{size: _PAGE},
            num_blocks=-(-tokens // _PAGE) + most,
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=most,
            allow_block_sharing=False,
        )

    def run(self, workload: Workload) -> Outcome:
        manager = self._model.init_continuous_batching(continuous_batching_config=self._config)
        manager.start()
        try:
            self._answer(manager, [Request(workload[0].prompt, tokens=2)])
            return self._answer(manager, workload)
        finally:
            manager.stop(block=True)

    def _answer(self, manager: Any, workload: Workload) -> Outcome:
        recorder = Recorder(threads=1)
        indices: dict[str, int] = {}
        done = 0
        while done < len(workload):
            while len(indices) < len(workload) and workload[len(indices)].at_s <= recorder.now():
                request = workload[len(indices)]
                name = manager.add_request(request.prompt.tolist(), max_new_tokens=request.tokens)
                indices[name] = len(indices)
            answer = manager.get_result(timeout=_POLL_S)
            if answer is not None and answer.is_finished():
                if answer.error:
                    raise ContinuousBatchingError(f"transformers' continuous batching failed: {answer.error}")
                recorder.note(indices[answer.request_id], len(answer.generated_tokens))
                done += 1
            if recorder.now() > _GIVE_UP_S:
                raise ContinuousBatchingError(f"transformers' continuous batching answered {done} requests only")
        return recorder.outcome(workload)
