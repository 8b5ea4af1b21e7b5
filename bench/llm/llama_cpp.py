"""llama.cpp on the same weights, through llama-cpp-python's low-level interface, driven as its own server does it."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from pliant.bench.llm.outcome import Outcome, Recorder
from pliant.bench.llm.workload import Workload

INSTALLED = all(importlib.util.find_spec(package) for package in ("llama_cpp", "gguf"))
"""Whether the packages llama-cpp-python and gguf are there."""
_BATCH = 2048


class LlamaCpp:
    """Continuous batching over llama.cpp: prompts join the batch when they arrive, and sequences leave when done.

    `threads` compute; there are `slots` sequences of `max_length` tokens. Greedy tokens are taken from the logits with
    NumPy.
    """

    def __init__(
        self, model: Path, threads: int, slots: int, max_length: int, *, flash: bool, ubatch: int = 512
    ) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        loading.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), loading)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = slots * max_length
        settings.n_batch = _BATCH
        settings.n_ubatch = ubatch
        settings.n_seq_max = slots
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._slots = slots

    def run(self, workload: Workload) -> Outcome:
        return self.answer(workload)[0]

    def answer(self, workload: Workload) -> tuple[Outcome, list[list[int]]]:
        """The outcome, and the tokens of each answer."""
        self._lib.llama_memory_clear(self._memory, True)
        recorder = Recorder(threads=1)
        answers: list[list[int]] = [[] for _ in workload]
        free = list(range(self._slots))
        slots: dict[int, int] = {}
        sent = 0
        while sent < len(workload) or slots:
            if not slots:
                recorder.wait_until(workload[sent].at_s)
            entries = [(answers[index][-1], self._position(workload, answers, index), index, True) for index in slots]
            while sent < len(workload) and free and workload[sent].at_s <= recorder.now():
                prompt = workload[sent].prompt.tolist()
                if len(entries) + len(prompt) > _BATCH:
                    break
                slots[sent] = free.pop()
                entries += [(token, at, sent, at == len(prompt) - 1) for at, token in enumerate(prompt)]
                sent += 1
            self._decode(entries, slots)
            for row, (_, _, index, sampled) in enumerate(entries):
                if sampled:
                    answers[index].append(self._greedy(row))
            recorder.note_all((index, 1) for index in slots)
            recorder.passes += 1
            for index in [index for index in slots if len(answers[index]) == workload[index].tokens]:
                slot = slots.pop(index)
                self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
                free.append(slot)
        return recorder.outcome(workload), answers

    def close(self) -> None:
        """Free the model."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def _decode(self, entries: list[tuple[int, int, int, bool]], slots: dict[int, int]) -> None:
        batch = self._batch
        for row, (token, position, index, sampled) in enumerate(entries):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = slots[index]
            batch.logits[row] = sampled
        batch.n_tokens = len(entries)
        if code := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gave {code} for a batch of {len(entries)} tokens")

    def _greedy(self, row: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())

    @staticmethod
    def _position(workload: Workload, answers: list[list[int]], index: int) -> int:
        return len(workload[index].prompt) + len(answers[index]) - 1
