"""How likely a pass finds the tokens of a prompt is what transformers finds, whatever it computes beside them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support import prompt_scores as prompt_scores_of
from support.decoders import FAMILIES, save
from support.lora_adapters import KINDS, adapt
from support.waiting import HANGS_AFTER_S

from pliant.formats.adapter_info import read_adapter
from pliant.kernels.decoder import executor, parallel_executor, prompt_scores
from pliant.kernels.decoder.decode_step import Prefill, RowLogprobs, Step
from pliant.kernels.decoder.executor import Executor
from pliant.kernels.decoder.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB, ALTERNATIVES = 97, 3
PAGES = np.array([1, 2], np.int32)
GREEDY = Sampling(temperature=0.0)


def check(model: PreTrainedModel, prompt: list[int], rows: list[RowLogprobs]) -> None:
    prompt_scores_of.check(model, prompt, rows, [row.chosen for row in rows], ALTERNATIVES)


def scored(run: Executor, prompt: list[int], chunk: int, adapter: str | None = None) -> list[RowLogprobs]:
    """A prompt in chunks in slot 1, beside an answer in slot 0 and another prompt in slot 2."""
    beside = np.array(prompt[::-1], np.int32)
    run.admit(0, GREEDY)
    run.admit(1, GREEDY, adapter)
    run.admit(2, GREEDY)
    begins = Prefill(0, 0, beside[:3], True, PAGES + 2)
    run.launch(step(begins, length=0)).result()
    rows: list[RowLogprobs] = []
    for index, start in enumerate(range(0, len(prompt), chunk)):
        stop = min(start + chunk, len(prompt))
        own = Prefill(
            slot=1,
            start=start,
            ids=np.array(prompt[start:stop], np.int32),
            last=stop == len(prompt),
            pages=PAGES,
            targets=np.array(prompt[start + 1 : stop + 1], np.int32),
            alternatives=ALTERNATIVES,
        )
        other = Prefill(2, index, beside[index : index + 1], False, PAGES + 4)
        output = run.launch(step(other, own, length=3 + index)).result()
        if output.targets:  # of a chunk that is the prompt's last token nothing follows
            assert not output.targets[0]
            rows += output.targets[1]
    return rows


def step(*prefills: Prefill, length: int) -> Step:
    """These chunks, and the next token of the answer in slot 0 if it has begun."""
    count = int(length > 0)
    ends = sum(prefill.last for prefill in prefills)
    tables = np.tile(PAGES + 2, (count, 1))
    lengths = np.full(count, length, np.int32)
    return Step(prefills, 0, lengths, tables, np.ones(count, np.int64), np.zeros(ends, np.int64))


def some(tokens: int) -> list[int]:
    rng = random.Random(tokens)
    return [rng.randrange(VOCAB) for _ in range(tokens)]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(family, tmp_path)
    run = executor.load(tmp_path, slots=3)
    for chunk, block in ((1, 1000), (7, 1000), (16, 4), (90, 1000), (90, 7)):
        monkeypatch.setattr(prompt_scores, "_BLOCK_VALUES", block * VOCAB)
        check(model, some(90), scored(run, some(90), chunk))


def test_and_those_of_peft(tmp_path: Path) -> None:
    base, folder = save("llama3", tmp_path / "base"), tmp_path / "adapter"
    adapted = adapt("llama3", next(iter(KINDS)), folder, seed=1)
    run = executor.load(tmp_path / "base", slots=3, most_rank=256, arena_bytes=2**22)
    info = read_adapter(folder, run.shape)
    run.keep_pages(8)
    run.install("a", info.ranks, run.stage(info))
    check(adapted, some(60), scored(run, some(60), 25, adapter="a"))
    check(base, some(60), scored(run, some(60), 25))


def test_ranks_that_compute_together_give_the_same(tmp_path: Path) -> None:
    model = save("qwen3", tmp_path)
    run = parallel_executor.load(tmp_path, 2, HANGS_AFTER_S, slots=3)
    check(model, some(60), scored(run, some(60), 25))


def test_a_chunk_has_no_more_targets_than_tokens(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    run = executor.load(tmp_path, slots=3)
    chunk = Prefill(0, 0, np.arange(2, dtype=np.int32), False, PAGES, np.arange(3, dtype=np.int32))
    with pytest.raises(ValueError, match="a chunk of 2 tokens cannot have 3 targets"):
        run.launch(step(chunk, length=0))
    with pytest.raises(ValueError, match="token ids must lie in 0 to 96, got 0 to 97"):
        run.launch(step(chunk._replace(targets=np.array([97], np.int32)), length=0))
