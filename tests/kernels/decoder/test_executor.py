"""Iterations of an executor: greedy answers are transformers', whatever else shares the slots and whenever it comes.

The same holds for adapters, in a memory that is too small for all of them: answers are PEFT's. And it holds for models
that several processes compute together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.decoders import FAMILIES, greedy, logits, save
from support.lora_adapters import KINDS, adapt
from support.waiting import HANGS_AFTER_S
from torch import Tensor

from pliant.formats.adapter_info import read_adapter
from pliant.kernels.decoder import executor, fp8, int8, parallel_executor
from pliant.kernels.decoder.adapter_pool import PoolError
from pliant.kernels.decoder.decode_step import Prefill, Step
from pliant.kernels.decoder.executor import Executor
from pliant.kernels.decoder.kv_pages import KVMemoryError
from pliant.kernels.decoder.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GREEDY = Sampling(temperature=0.0)
NO_TABLES = np.zeros((0, 0), np.int32)
Staged = tuple[tuple[int, ...], Tensor]
"""An adapter's ranks and blob."""


@dataclass
class Request:
    prompt: list[int]
    tokens: int
    """How many to answer with."""
    arrival: int
    """The iteration from which it may have a slot."""
    sampling: Sampling = GREEDY
    adapter: str | None = None
    slot: int = -1
    stored: int = 0
    answer: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        return bool(self.answer)

    @property
    def left(self) -> NDArray[np.int32]:
        """What of the prompt is not stored yet."""
        return np.array(self.prompt[self.stored :], np.int32)


class Scheduler:
    """Puts requests into slots and pages as carelessly as the contract allows: chunks of random sizes, windows with
    holes and any offset, requests that sit out, pages in any order, and random moves to slots and pages that are
    free."""

    def __init__(self, run: Executor, requests: list[Request], rng: np.random.Generator) -> None:
        self.run = run
        self.waiting = sorted(requests, key=lambda request: request.arrival)
        self.live: list[Request] = []
        self.rng = rng
        self.pages = rng.permutation(np.arange(1, self.most_pages + 1, dtype=np.int32)).tolist()

    def serve(self) -> None:
        now = 0
        while self.waiting or self.live:
            self._admit(now)
            self._move()
            self._iterate()
            now += 1

    @property
    def slots(self) -> int:
        """How many it may use."""
        return self.run.slots

    @property
    def most_pages(self) -> int:
        return self.slots * -(-self.run.max_length // self.run.page)

    def prepare(self, request: Request) -> None:
        """Called before the request is admitted."""

    def _free(self) -> list[int]:
        return sorted(set(range(self.slots)) - {request.slot for request in self.live})

    def _admit(self, now: int) -> None:
        while self.waiting and self.waiting[0].arrival <= now and (free := self._free()):
            request = self.waiting.pop(0)
            request.slot = int(self.rng.choice(free))
            self.prepare(request)
            request.pages = []
            self.run.admit(request.slot, request.sampling, request.adapter)
            self.live.append(request)

    def _move(self) -> None:
        targets = self._free()
        movers = self.rng.permutation(len(self.live))[: self.rng.integers(0, 3)]
        pairs = list(zip([self.live[i] for i in movers], targets, strict=False))
        self.run.move([(request.slot, target) for request, target in pairs])
        for request, target in pairs:
            request.slot = target
        moved = [request for request in self.live if request.pages and self.pages and self.rng.integers(4) == 0]
        moves = list(zip([request.pages[0] for request in moved], self.pages, strict=False))
        self.run.move_pages(moves)
        for request, (source, target) in zip(moved, moves, strict=False):
            self.pages[self.pages.index(target)] = source
            request.pages[0] = target

    def _grow(self, request: Request, tokens: int) -> NDArray[np.int32]:
        """The pages of a request, for so many tokens."""
        while len(request.pages) * self.run.page < tokens:
            request.pages.append(self.pages.pop())
        return np.array(request.pages, np.int32)

    def _chunks(self) -> list[tuple[Request, Prefill]]:
        found = []
        for request in self.live:
            if not request.decodes and (most := int(self.rng.integers(0, 25))):
                ids = request.left[:most]
                pages = self._grow(request, request.stored + len(ids))
                last = len(ids) == len(request.left)
                found.append((request, Prefill(request.slot, request.stored, ids, last, pages)))
        return found

    def _iterate(self) -> None:
        decoding = [request for request in self.live if request.decodes and self.rng.integers(6)]
        chunks = self._chunks()
        for request, chunk in chunks:
            request.stored += len(chunk.ids)
        slots = [request.slot for request in decoding]
        offset, stop = (min(slots), max(slots) + 1) if slots else (0, 0)
        held = {request.slot: (request.stored, len(request.answer)) for request in decoding}
        rows = np.array([held.get(slot, (0, 0)) for slot in range(offset, stop)]).reshape(-1, 2)
        tables = np.zeros((stop - offset, 2), np.int32)
        for request in decoding:
            pages = self._grow(request, request.stored + 1)
            tables[request.slot - offset, : len(pages)] = pages
        ended = [request for request, chunk in chunks if chunk.last]
        prefills = tuple(chunk for _, chunk in chunks)
        indices = rows[:, 1], np.zeros(len(ended), np.int64)
        step = Step(prefills, offset, rows[:, 0].astype(np.int32), tables, *indices)
        output = self.run.launch(step).result()
        assert (len(output.first), len(output.tokens)) == (len(ended), stop - offset)
        for request in decoding:
            request.stored += 1
            request.answer.append(int(output.tokens[request.slot - offset]))
        for request, token in zip(ended, output.first, strict=True):
            request.answer.append(int(token))
        for request in self.live:
            if len(request.answer) == request.tokens:
                self.pages += request.pages
        self.live = [request for request in self.live if len(request.answer) < request.tokens]


ALONE = [(name, 1) for name in FAMILIES]
TOGETHER = [("llama-biased", 2), ("qwen2-window-yarn", 2), ("qwen3-8-heads", 4)]


@pytest.mark.parametrize(("name", "ranks"), [*ALONE, *TOGETHER])
def test_greedy_answers_are_those_of_transformers(name: str, ranks: int, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    rng = np.random.default_rng(len(name))
    requests = [
        Request(rng.integers(0, 97, rng.integers(1, 60)).tolist(), int(rng.integers(1, 30)), int(rng.integers(0, 40)))
        for _ in range(12)
    ]
    Scheduler(parallel_executor.load(tmp_path, ranks, HANGS_AFTER_S, slots=5), requests, rng).serve()
    for request in requests:
        assert request.answer == greedy(model, request.prompt, request.tokens)


@pytest.mark.parametrize(("name", "ranks"), [("llama-biased", 1), ("qwen3", 1), ("qwen2", 1), ("llama-biased", 2)])
def test_int8_answers_are_those_of_transformers_with_such_numbers(name: str, ranks: int, tmp_path: Path) -> None:
    """But where a value lies between two whole numbers, and sums in another order make it the other one. By how much
    less likely tokens are chosen so, is a tenth of what it is if transformers does not round at all."""
    model = save(name, tmp_path)
    quantize(model, ranks, int8.quantized)
    round_inputs(model, ranks, int8.quantized)
    rng = np.random.default_rng(ranks)
    requests = [Request(rng.integers(0, 97, int(rng.integers(1, 60))).tolist(), 20, each) for each in range(12)]
    Scheduler(parallel_executor.load(tmp_path, ranks, HANGS_AFTER_S, slots=10, quantize="int8"), requests, rng).serve()
    missing = []
    for request in requests:
        found = logits(model, request.prompt + request.answer)[len(request.prompt) - 1 : -1]
        missing += [row.max() - row[token] for row, token in zip(found, request.answer, strict=True)]
    assert torch.stack(missing).mean() < 1e-3


@pytest.mark.parametrize(("name", "ranks"), [("llama-biased", 1), ("qwen3", 1), ("qwen2", 1), ("llama-biased", 2)])
def test_fp8_makes_texts_nearly_as_likely_as_transformers_does_with_such_weights(
    name: str, ranks: int, tmp_path: Path
) -> None:
    """Keys and values alone are rounded: each token is the likeliest, or nearly so, where logits deviate by 1.5."""
    model = save(name, tmp_path)
    quantize(model, ranks, fp8.quantized)
    rng = np.random.default_rng(ranks)
    requests = [Request(rng.integers(0, 97, int(rng.integers(1, 60))).tolist(), 20, each) for each in range(12)]
    loaded = parallel_executor.load(tmp_path, ranks, HANGS_AFTER_S, slots=10, quantize="fp8")
    assert loaded.page_bytes * 4 == executor.load(tmp_path, slots=1).page_bytes // ranks
    Scheduler(loaded, requests, rng).serve()
    behind = []
    for request in requests:
        text = [*request.prompt, *request.answer]
        following = logits(model, text)[len(request.prompt) - 1 : -1].log_softmax(-1)
        taken = following[range(20), request.answer]
        behind.append(following.amax(-1) - taken)
    assert torch.cat(behind).mean() < 0.1


@torch.no_grad()
def quantize(model: Any, ranks: int, quantized: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """Give its linear layers the weights that these values stand for, each rank's with scales of their own."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            summed = name.endswith(("o_proj", "down_proj"))
            for part in module.weight.tensor_split(ranks if summed else 1, dim=1):
                part.copy_(rounded(part, quantized))


def round_inputs(model: Any, ranks: int, quantized: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """Have its linear layers read what these values stand for, each rank with scales of its own."""

    def read(module: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        parts = given[0][0].tensor_split(ranks if module in summed else 1, dim=1)
        return (torch.cat([rounded(part, quantized) for part in parts], dim=1)[None],)

    summed = {module for name, module in model.named_modules() if name.endswith(("o_proj", "down_proj"))}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(read)


def rounded(rows: Tensor, quantized: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    values, scale = quantized(rows)
    return values.float() * scale[:, None]


def test_weights_take_what_they_are_kept_as(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    shape = executor.load(tmp_path, slots=1).shape
    for kind in (None, "int8", "fp8"):
        assert executor.load(tmp_path, slots=1, quantize=kind).weight_bytes == shape.weight_bytes(4, kind)


def test_drawn_answers_depend_on_their_seed_alone(tmp_path: Path) -> None:
    save("qwen3", tmp_path)

    def answers(slots: int, seed: int, ranks: int = 1) -> list[list[int]]:
        rng = np.random.default_rng(1)
        requests = [
            Request(rng.integers(0, 97, 5).tolist(), 20, arrival, Sampling(temperature=0.7, top_p=0.9, seed=arrival))
            for arrival in range(8)
        ]
        run = parallel_executor.load(tmp_path, ranks, HANGS_AFTER_S, slots=slots)
        Scheduler(run, list(requests), np.random.default_rng(seed)).serve()
        return [request.answer for request in requests]

    alone = answers(slots=1, seed=0)
    assert answers(slots=4, seed=1) == answers(slots=6, seed=2) == answers(slots=4, seed=3, ranks=2) == alone
    assert len(set(map(tuple, alone))) == 8


def test_a_first_token_outlives_the_row_of_its_slot(tmp_path: Path) -> None:
    model = save("llama2", tmp_path)
    run, prompt = executor.load(tmp_path, slots=2), np.arange(9, dtype=np.int32)
    expected = greedy(model, prompt.tolist(), 3)
    run.admit(1, GREEDY)
    zeros = np.zeros(2, np.int64)
    nothing, tables = np.zeros((2, 1), np.int32), np.array([[0], [1]], np.int32)
    chunk = Prefill(1, 0, prompt, True, tables[1])
    answer = [*run.launch(Step((chunk,), 0, nothing[:, 0], nothing, zeros, zeros[:1])).result().first]
    for stored in (9, 10):
        step = Step((), 0, np.array([0, stored], np.int32), tables, zeros, zeros[:0])
        answer.append(run.launch(step).result().tokens[1])
    assert answer == expected


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7, seed=3, presence_penalty=1.0)])
def test_an_answer_that_sits_out_goes_on_behind_its_last_token(sampling: Sampling, tmp_path: Path) -> None:
    save("llama3", tmp_path)
    run, prompt = executor.load(tmp_path, slots=3), np.arange(9, dtype=np.int32)
    tables = np.array([[1], [2], [3]], np.int32)

    def answer(pauses: Sequence[int]) -> list[int]:
        """Of slot 1, beside two others, which does not go on in these steps."""
        for slot in range(3):
            run.admit(slot, sampling)
        chunks = tuple(Prefill(slot, 0, prompt, True, tables[slot]) for slot in range(3))
        none, zeros = np.zeros(0, np.int64), np.zeros(3, np.int64)
        tokens = [run.launch(Step(chunks, 0, none.astype(np.int32), NO_TABLES, none, zeros)).result().first[1]]
        for number in range(6):
            goes = number not in pauses
            lengths = np.array([9 + number, (8 + len(tokens)) * goes, 9 + number], np.int32)
            indices = np.array([1 + number, len(tokens), 1 + number])
            output = run.launch(Step((), 0, lengths, tables * (lengths > 0)[:, None], indices, none)).result()
            tokens += [output.tokens[1]] * goes
        return tokens

    assert answer([0, 2, 3]) == answer([])[:4]


def test_log_probabilities_are_told_to_those_who_asked(tmp_path: Path) -> None:
    model = save("llama2", tmp_path)
    run, prompt = executor.load(tmp_path, slots=3), np.arange(9, dtype=np.int32)
    run.admit(0, GREEDY)
    run.admit(1, Sampling(temperature=0.0, logprobs=2))
    none = np.zeros(0, np.int64)
    chunks = tuple(Prefill(slot, 0, prompt, True, np.array([1 + slot], np.int32)) for slot in (0, 1))
    output = run.launch(Step(chunks, 0, none.astype(np.int32), NO_TABLES, none, np.zeros(2, np.int64))).result()
    assert output.first_logprobs is not None
    assert output.logprobs is None
    assert output.first_logprobs[0] is None
    theirs = logits(model, prompt.tolist())[-1].log_softmax(-1).topk(2)
    asked = output.first_logprobs[1]
    assert asked is not None
    assert asked.top_ids == theirs.indices.tolist()
    assert [asked.chosen, *asked.top[1:]] == pytest.approx(theirs.values.tolist(), abs=1e-4)


def test_steps_that_do_not_fit_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    save("llama2", tmp_path)
    run = executor.load(tmp_path, slots=2, max_length=10)
    zeros, pages = np.zeros(9, np.int64), np.array([[1], [2]], np.int32)
    chunk = Prefill(0, 0, np.arange(4, dtype=np.int32), True, pages[0])

    def step(offset: int, lengths: list[int], indices: int, ended: int, chunk: Prefill = chunk) -> Step:
        return Step((chunk,), offset, np.array(lengths, np.int32), pages, zeros[:indices], zeros[:ended])

    with pytest.raises(ValueError, match="the window 1 to 3 is not within 2 slots"):
        run.launch(step(1, [1, 1], 2, 1))
    with pytest.raises(ValueError, match=r"must hold 0 to 9 tokens, one less than max_length; got 3 to 10"):
        run.launch(step(0, [3, 10], 2, 1))
    with pytest.raises(ValueError, match=r"each of 2 rows and 1 prompts that end; got 1 and 0"):
        run.launch(step(0, [3, 4], 1, 0))
    ids = np.zeros(10, np.int32)
    for wrong in ((0, 4, ids), (2, 0, ids), (0, -1, ids)):
        with pytest.raises(ValueError, match="does not fit: there are 2 slots of 10 tokens"):
            run.launch(step(0, [3, 4], 2, 1, Prefill(*wrong, True, pages[0])))
    with pytest.raises(ValueError, match="has at least one"):
        run.launch(step(0, [3, 4], 2, 1, Prefill(0, 0, ids[:0], True, pages[0])))
    with pytest.raises(ValueError, match="ids must lie in 0 to 96, got 0 to 97"):
        run.launch(step(0, [3, 4], 2, 1, Prefill(0, 0, np.array([0, 97], np.int32), True, pages[0])))
    with pytest.raises(ValueError, match="0 pages do not hold a chunk's text of 4 tokens"):
        run.launch(step(0, [3, 4], 2, 1, chunk._replace(pages=pages[0, :0])))
    with pytest.raises(ValueError, match="0 pages do not hold the texts, of up to 4 tokens"):
        run.launch(step(0, [3, 4], 2, 1)._replace(tables=pages[:, :0]))


def test_loading_chooses_or_refuses_sizes(tmp_path: Path) -> None:
    save("llama2", tmp_path)
    run = executor.load(tmp_path)
    assert (run.slots, run.max_length, run.pipelined) == (32, 96, False)
    page = run.page_bytes
    few = executor.load(tmp_path, slots=32, max_length=96, budget_bytes=6 * page)
    assert (few.slots, few.arena_bytes) == (32, 5 * page), "there are fewer pages than slots can fill"
    with pytest.raises(KVMemoryError, match="a text of 128 tokens x"):
        executor.load(tmp_path, slots=32, max_length=96, budget_bytes=2 * page)
    with pytest.raises(ValueError, match="max_length must be 1 to 96"):
        executor.load(tmp_path, max_length=97)
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, got int8"):
        executor.load(tmp_path, dtype="int8")


class AdaptingScheduler(Scheduler):
    """Installs what a request needs when it comes, and drops as little for it as it must, in no order."""

    slots = 3

    def __init__(
        self, run: Executor, requests: list[Request], rng: np.random.Generator, staged: dict[str, Staged]
    ) -> None:
        super().__init__(run, requests, rng)
        run.keep_pages(self.most_pages)
        self.staged = staged
        """Of several ranks a row each, and then bytes are counted by rank, as the executor does."""
        self.installed: set[str] = set()
        self.room = run.arena_bytes - self.most_pages * run.page_bytes

    def prepare(self, request: Request) -> None:
        if request.adapter is None or request.adapter in self.installed:
            return
        ranks, blob = self.staged[request.adapter]
        idle = self.rng.permutation(sorted(self.installed - {other.adapter for other in self.live})).tolist()
        while self.room < bytes_of_rank(blob):
            self.room += bytes_of_rank(self.staged[idle[-1]][1])
            self.installed.remove(idle[-1])
            self.run.remove(idle.pop())
        self.run.install(request.adapter, ranks, blob)
        self.room -= bytes_of_rank(blob)
        self.installed.add(request.adapter)


def bytes_of_rank(blob: Tensor) -> int:
    return blob.shape[-1] * blob.element_size()


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str | None, PreTrainedModel]]:
    """A folder with a decoder ("base") and an adapter of every kind, and the models that result."""
    folder = tmp_path_factory.mktemp("adapted")
    models: dict[str | None, PreTrainedModel] = {kind: adapt("llama3", kind, folder / kind) for kind in KINDS}
    return folder, {None: save("llama3", folder / "base"), **models}


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapted_answers_are_those_of_peft(adapted: tuple[Path, dict[str | None, PreTrainedModel]], ranks: int) -> None:
    folder, models = adapted
    rng = np.random.default_rng(0)
    bare = parallel_executor.load(folder / "base", ranks, HANGS_AFTER_S, slots=1)
    infos = {kind: read_adapter(folder / kind, bare.shape) for kind in KINDS}
    staged = {kind: (info.ranks, bare.stage(info)) for kind, info in infos.items() if kind != "rank-256"}
    sizes = sorted(bytes_of_rank(blob) for _, blob in staged.values())
    requests = [
        Request(
            rng.integers(0, 97, rng.integers(1, 60)).tolist(),
            int(rng.integers(1, 20)),
            int(rng.integers(0, 60)),
            adapter=[None, *staged][rng.integers(0, 1 + len(staged))],
        )
        for _ in range(24)
    ]
    arena = (AdaptingScheduler.slots * 2 + 1) * bare.page_bytes + sum(sizes[-3:])
    run = parallel_executor.load(
        folder / "base", ranks, HANGS_AFTER_S, slots=4, arena_bytes=arena * ranks, most_rank=64
    )
    assert (run.adapters, run.arena_bytes) == (True, arena - run.page_bytes)
    AdaptingScheduler(run, requests, rng, staged).serve()
    for request in requests:
        assert request.answer == greedy(models[request.adapter], request.prompt, request.tokens), request.adapter


def test_adapters_that_are_not_there_are_never_used(adapted: tuple[Path, dict[str | None, PreTrainedModel]]) -> None:
    folder, _ = adapted
    run = executor.load(folder / "base", slots=4, most_rank=8)
    info = read_adapter(folder / "rank-8", run.shape)
    blob = run.stage(info)
    with pytest.raises(PoolError, match="adapters must be removed first"):
        run.install("a", info.ranks, blob)
    run.keep_pages(4)
    run.install("a", info.ranks, blob)
    with pytest.raises(PoolError, match="adapters must be removed first"):
        run.keep_pages(8)
    with pytest.raises(PoolError, match="a lies in the pool already"):
        run.install("a", info.ranks, blob)
    with pytest.raises(PoolError, match="slot 0 cannot use adapter b, which is not installed"):
        run.admit(0, GREEDY, "b")
    run.admit(0, GREEDY, "a")
    run.move([(0, 1)])
    run.remove("a")
    none = np.zeros(0, np.int64)
    tables = np.array([[0], [1]], np.int32)
    chunk = Prefill(1, 0, np.arange(4, dtype=np.int32), False, tables[1])
    for step in (
        Step((chunk,), 0, none.astype(np.int32), NO_TABLES, none, none),
        Step((), 0, np.array([0, 4], np.int32), tables, np.zeros(2, np.int64), none),
    ):
        with pytest.raises(PoolError, match="slot 1 uses adapter a, which was removed while a request needed it"):
            run.launch(step)
    run.launch(Step((), 0, np.zeros(2, np.int32), 0 * tables, np.zeros(2, np.int64), none)).result()
    run.admit(1, GREEDY)
    run.launch(Step((chunk,), 0, none.astype(np.int32), NO_TABLES, none, none)).result()


def test_adapters_of_other_sizes_are_refused(adapted: tuple[Path, dict[str | None, PreTrainedModel]]) -> None:
    folder, _ = adapted
    run = executor.load(folder / "base", slots=2)
    assert not run.adapters
    info = read_adapter(folder / "rank-8", run.shape)
    with pytest.raises(
        ValueError, match=r"adapter a: ranks 8, 0, 8, 0, 0, 0, 0 need [\d,]+ values and must be at most 0"
    ):
        run.install("a", info.ranks, run.stage(info))
    run = executor.load(folder / "base", slots=2, most_rank=8)
    with pytest.raises(ValueError, match="its blob has 32"):
        run.install("a", info.ranks, run.stage(info)[:32])
