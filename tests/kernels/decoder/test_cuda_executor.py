"""The GPU's executor does what the plain one does, launched one step ahead.

It needs a GPU; or Triton's interpreter, where steps run as they would be recorded (see `test_triton_decode`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.interpreted_fp8 import rounded_by_torch
from support.pretend_gpu import in_the_interpreter
from torch import Tensor

from pliant.kernels.decoder.decode_step import Launched, Output, Prefill, RowMasks, Step
from pliant.kernels.decoder.executor import Executor
from pliant.kernels.decoder.kernels import DecoderKernels, TorchKernels
from pliant.kernels.decoder.kv_pages import KVPages
from pliant.kernels.decoder.lora import LoraBatch
from pliant.kernels.decoder.model import Decoder
from pliant.kernels.decoder.sampling import Sampled, Sampler, Sampling
from pliant.kernels.decoder.weights import RandomWeights
from pliant.models.decoder_shape import DecoderShape, Quantize
from pliant.models.lora_layout import LoraLayout

pytest.importorskip("triton")
from pliant.kernels.cuda_graph import graph_rows
from pliant.kernels.decoder import cuda_executor
from pliant.kernels.decoder.cuda_executor import CudaExecutor, Drawn, Forward, RecordedStep, Tables
from pliant.kernels.decoder.cuda_kernels import CudaKernels
from pliant.kernels.decoder.triton_lora import LoraTiles, tables_of
from pliant.kernels.upload import packed, unpacked

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SLOTS = 5
SHAPE = DecoderShape.from_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "layer_types": ["full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 6,
    }
)
Moves = Sequence[tuple[int, int]]
needs_gpu = pytest.mark.skipif(
    not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or Triton's interpreter"
)


class Eager(RecordedStep):
    """A step that is computed when it runs, as there is no GPU to record it on."""

    def __init__(
        self,
        forward: Forward,
        tables: Tables,
        drawn: Drawn,
        pool: None,
        stream: None,
        tiles: LoraTiles | None = None,
    ) -> None:
        self.rows, self._drawn, self._forward, self._tiles = len(drawn[0]), drawn, forward, tiles

    def run(self, tables: Tables, count: int, lora: LoraBatch | None = None) -> Drawn:
        given = unpacked(torch.from_numpy(packed(tables)), tables)
        if self._tiles is not None:
            for tensor, table in zip((self._tiles.rows, self._tiles.places), tables_of(lora, self.rows), strict=True):
                tensor.copy_(torch.from_numpy(table))
        for kept, found in zip(self._drawn, self._forward(given, self._tiles), strict=True):
            kept.copy_(found)
        logits, tokens = self._drawn
        return logits[:count], tokens[:count].clone()  # as what is copied from a GPU is


class NoEvent:
    def __init__(self, blocking: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """Writes down which stream waits for which."""

    waits: ClassVar[list[tuple[Stream, Stream]]] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append((self, other))


warm_up = CudaExecutor._warm_up


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Executor, CudaExecutor]:
    """The plain one and the GPU's, with the same weights, quantized as a test's parameter says."""
    quantize: Quantize | None = getattr(request, "param", None)
    if not ON_GPU:
        rounded_by_torch(monkeypatch)
        monkeypatch.setattr(cuda_executor, "RecordedStep", Eager)
        monkeypatch.setattr(torch.cuda, "Event", NoEvent)
        default = Stream()
        monkeypatch.setattr(Stream, "waits", [])
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: default)
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(CudaExecutor, "_warm_up", lambda _: None)  # seconds in the interpreter; see `warm_up`
    plain, ours = (parts(kernels, quantize) for kernels in (TorchKernels(), CudaKernels(processors=2)))
    return Executor(*plain, 8), CudaExecutor(*ours, 8)


@torch.inference_mode()
def parts(kernels: DecoderKernels, quantize: Quantize | None) -> tuple[Decoder, Sampler]:
    torch.manual_seed(0)
    weights = RandomWeights(SHAPE, torch.float32, DEVICE, quantize=quantize)
    sizes = SLOTS, SHAPE.max_length, torch.float32, DEVICE
    kv = KVPages(SHAPE, *sizes, kernels, arena_bytes=400_000, stored=weights.kv_dtype)
    return Decoder(weights, kernels, kv), Sampler(SLOTS, SHAPE.vocab, DEVICE, kv.max_length)


def step(
    prefills: Sequence[tuple[int, int, int, bool]],
    offset: int,
    lengths: Sequence[int],
    index: int = 0,
    order: Sequence[int] = range(SLOTS),
) -> Step:
    """Prefills are (slot, start, tokens, last); `index` is that of every token to be sampled, and slot i has page
    1 + order[i]."""
    pages = 1 + np.array(order, np.int32)[:, None]
    chunks = tuple(
        Prefill(slot, start, np.arange(start, start + count, dtype=np.int32), last, pages[slot])
        for slot, start, count, last in prefills
    )
    stored = np.array(lengths, np.int32)
    tables = pages[offset : offset + len(stored)] * (stored > 0)[:, None]
    indices = [np.full(count, index) for count in (len(lengths), sum(chunk.last for chunk in chunks))]
    return Step(chunks, offset, stored, tables, *indices)


SCRIPT: list[tuple[Moves, Step, list[int]]] = [
    ([], step([(1, 0, 7, True), (2, 0, 3, True)], 0, []), []),
    ([], step([], 1, [7, 3]), [0, 1]),
    ([], step([(3, 0, 5, False)], 1, [8, 4, 0], 1), [0, 1]),
    ([], step([(3, 5, 4, True)], 1, [9, 5, 0], 2), [0, 1]),
    ([], step([], 1, [10, 6, 9], 3), [0, 1, 2]),
    ([(3, 1)], step([], 1, [10, 7], 4, (0, 3, 2, 1, 4)), [0, 1]),
    ([], step([], 0, [0, 11, 8, 0, 0], 5, (0, 3, 2, 1, 4)), [1, 2]),
    ([(1, 4), (2, 3)], step([(0, 0, 2, True)], 3, [9, 12], 6, (0, 1, 4, 2, 3)), [0, 1]),
    ([], step([], 0, [2, 0, 0, 10, 13], 7, (0, 1, 4, 2, 3)), [0, 3, 4]),
]
"""Moves, the step that follows, and the rows that mean something."""


ASKED = {2: Sampling(temperature=0.8, top_p=0.9, seed=3, logprobs=2)}
"""How slots that are not greedy sample at first."""


def outputs(
    executor: Executor,
    adapters: Sequence[str | None] = (None,) * SLOTS,
    asked: Mapping[int, Sampling] = ASKED,
    masked: Mapping[int, RowMasks] = MappingProxyType({}),
) -> Iterator[Output]:
    """Of the script's steps, each read when the next one is launched; slots use `adapters` at first, and of the steps
    some are `masked`."""
    for slot, adapter in enumerate(adapters):
        executor.admit(slot, asked.get(slot, Sampling(temperature=0.0)), adapter)
    under_way: Launched | None = None
    for index, (moves, following, _) in enumerate(SCRIPT):
        executor.move(moves)
        masks = (lambda at=index: masked[at]) if index in masked else None
        launched = executor.launch(following._replace(masks=masks))
        if under_way is not None:
            yield under_way.result()
        under_way = launched
    assert under_way is not None
    yield under_way.result()


@needs_gpu
def test_outputs_are_those_of_the_plain_executor(executors: tuple[Executor, CudaExecutor]) -> None:
    plain, ours = executors
    assert ours.pipelined
    with torch.inference_mode():
        warm_up(ours)
    told = 0
    for expected, found, (_, _, rows) in zip(outputs(plain), outputs(ours), SCRIPT, strict=True):
        assert found.first.tolist() == expected.first.tolist()
        assert found.tokens[rows].tolist() == expected.tokens[rows].tolist()
        for row in rows:
            asked, theirs = ((output.logprobs or {row: None})[row] for output in (found, expected))
            assert (asked is None) == (theirs is None)
            if asked and theirs:
                told += 1
                assert asked.top_ids == theirs.top_ids
                assert [asked.chosen, *asked.top] == pytest.approx([theirs.chosen, *theirs.top], abs=1e-5)
    assert told == 8


@needs_gpu
@pytest.mark.skipif(ON_GPU and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8")
@pytest.mark.parametrize("executors", ["fp8"], indirect=True)
def test_with_fp8_tokens_are_as_likely_as_in_the_plain_executor(executors: tuple[Executor, CudaExecutor]) -> None:
    """Nearly: of keys and values that lie between two numbers of fp8, each may take another one."""
    plain, ours = (list(likelihoods(executor)) for executor in executors)
    assert len(plain) == 8
    assert ours == pytest.approx(plain, abs=1e-3)


def likelihoods(executor: Executor) -> Iterator[float]:
    """How likely its tokens are to those who asked, in the script's steps."""
    for output, (_, _, rows) in zip(outputs(executor), SCRIPT, strict=True):
        for row in rows:
            if output.logprobs and (asked := output.logprobs[row]):
                yield asked.chosen


@needs_gpu
def test_what_no_graph_can_draw_is_sampled_behind_it(
    executors: tuple[Executor, CudaExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 2, 3 and 7 have chunks, 4 has a mask, and in 8 a row comes whose logits are edited; 1, 5 and 6 are drawn by
    their graphs."""
    asked = ASKED | {0: Sampling(seed=5, presence_penalty=2.0, logit_bias=((7, 3.0),)), 3: Sampling(top_k=9, top_p=0.8)}
    masked = {4: RowMasks(np.array([0, 2]), np.array([[2**20, 0], [0, 2**7 + 2**9]], np.uint32))}
    windows = []
    _, ours = executors
    sample = ours._sampler.sample

    def seen(logits: Tensor, slots: slice | Tensor, *arguments: Any) -> Sampled:
        if isinstance(slots, slice):
            windows.append(slots)
        return sample(logits, slots, *arguments)

    monkeypatch.setattr(ours._sampler, "sample", seen)
    given = [outputs(executor, asked=asked, masked=masked) for executor in executors]
    tokens = []
    for expected, found, (_, _, rows) in zip(*given, SCRIPT, strict=True):
        assert found.first.tolist() == expected.first.tolist()
        assert found.tokens[rows].tolist() == expected.tokens[rows].tolist()
        tokens.append(found.tokens)
    assert tokens[4][0] == 20
    assert tokens[4][2] in (39, 41)
    assert windows == [slice(1, 4), slice(1, 4), slice(1, 4), slice(3, 5), slice(0, 5)]


@needs_gpu
@pytest.mark.parametrize(
    ("chunks", "masks", "sampling"),
    [
        ([], None, Sampling(temperature=0.0)),
        ([(3, 0, 4, False)], None, Sampling(temperature=0.0)),
        ([], RowMasks(np.array([0, 2]), np.full((2, 2), 2**9, np.uint32)), Sampling(temperature=0.0)),
        ([], None, Sampling(temperature=0.0, frequency_penalty=1.0)),
    ],
    ids=["drawn by a graph", "beside a chunk", "beside masks", "with penalties"],
)
def test_an_answer_that_sits_out_goes_on_behind_its_last_token(
    executors: tuple[Executor, CudaExecutor],
    chunks: list[tuple[int, int, int, bool]],
    masks: RowMasks | None,
    sampling: Sampling,
) -> None:
    """Launched behind the step that gave it, before that is read."""
    going = [step([], 0, [length] * 3, index) for index, length in enumerate((7, 8, 9), 1)]
    paused = step(chunks, 0, [7, 0, 7], 1)._replace(masks=masks and (lambda: masks))
    for executor in executors:
        answers = []
        for steps in (going, [going[0], paused, *going[1:]]):
            for slot in range(3):
                executor.admit(slot, sampling)
            executor.launch(step([(slot, 0, 7, True) for slot in range(3)], 0, [])).result()
            outputs = [launched.result() for launched in [executor.launch(each) for each in steps]]
            answers.append([output.tokens[1] for output, each in zip(outputs, steps, strict=True) if each.lengths[1]])
        assert answers[0] == answers[1]


@needs_gpu
def test_prompts_are_as_likely_as_in_the_plain_executor(executors: tuple[Executor, CudaExecutor]) -> None:
    """Beside a chunk that asks for nothing, and read after the next step is launched."""
    first, *later = (
        step([(0, 0, 3, False), (1, start, count, last)], 0, []) for start, count, last in ((0, 7, False), (7, 4, True))
    )
    found = []
    for executor in executors:
        for slot in range(2):
            executor.admit(slot, Sampling(temperature=0.0))
        under_way = [executor.launch(asking(one)) for one in (first, *later)]
        scored = [launched.result().targets for launched in under_way]
        assert [[len(chunk) for chunk in each or ()] for each in scored] == [[0, 7], [0, 3]]
        found.append([row for each in scored for row in (each or ([], []))[1]])
    for theirs, ours in zip(*found, strict=True):
        assert (theirs.rank, theirs.top_ids) == (ours.rank, ours.top_ids)
        assert [theirs.chosen, *theirs.top] == pytest.approx([ours.chosen, *ours.top], abs=1e-5)


def asking(one: Step) -> Step:
    """How likely the tokens are that follow those of its second chunk."""
    beside, chunk = one.prefills
    targets = chunk.ids[: len(chunk.ids) - chunk.last] + np.int32(1)
    return one._replace(prefills=(beside, chunk._replace(targets=targets, alternatives=2)))


@needs_gpu
def test_adapters_add_what_they_add_in_the_plain_executor(executors: tuple[Executor, CudaExecutor]) -> None:
    bare = [output.tokens.tolist() for output in outputs(executors[0])]
    found = []
    for executor in executors:
        executor.keep_pages(SLOTS)
        for key, ranks in {"a": [8] * 7, "b": [0, 3, 0, 0, 0, 5, 1]}.items():
            torch.manual_seed(len(ranks))
            blob = torch.randn(LoraLayout(SHAPE, ranks).values) / 10
            executor.install(key, ranks, blob.pin_memory() if torch.cuda.is_available() else blob)
        found.append(list(outputs(executor, (None, "a", "b", "a", None))))
    for expected, output, (_, _, rows) in zip(*found, SCRIPT, strict=True):
        assert output.first.tolist() == expected.first.tolist()
        assert output.tokens[rows].tolist() == expected.tokens[rows].tolist()
    assert [output.tokens.tolist() for output in found[0]] != bare


@needs_gpu
@pytest.mark.skipif(ON_GPU, reason="looks at streams that do nothing")
def test_a_load_is_waited_for_by_what_uses_it(executors: tuple[Executor, CudaExecutor]) -> None:
    _, ours = executors
    loads, computing = ours._loads, torch.cuda.current_stream()
    blob = torch.zeros(LoraLayout(SHAPE, [8] * 7).values)
    ours.keep_pages(SLOTS)
    for key in ("a", "b"):
        ours.install(key, [8] * 7, blob)
        ours.admit(1, Sampling(temperature=0.0), key)
        begun = [(loads, computing)]
        ours.launch(step([(2, 0, 3, True)], 0, []))
        assert Stream.waits == begun, "the copy follows what was launched, and slot 2 does not use it"
        ours.launch(step([(1, 0, 3, True)], 0, []))
        ours.launch(step([], 1, [3, 3], 1))
        assert Stream.waits == [*begun, (computing, loads)]
        Stream.waits.clear()
    ours.install("c", [8] * 7, blob)
    ours.remove("a")
    ours.keep_pages(SLOTS)
    assert Stream.waits == [(loads, computing), (computing, loads)]


@needs_gpu
@pytest.mark.skipif(ON_GPU, reason="tensors only claim to lie on a GPU")
@pytest.mark.parametrize("presence_penalty", [0.0, 1.0])
def test_no_launch_waits_for_the_gpu(
    presence_penalty: float, executors: tuple[Executor, CudaExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = executors
    ours.keep_pages(SLOTS)
    ours.install("a", [8] * 7, torch.zeros(LoraLayout(SHAPE, [8] * 7).values))
    filters = Sampling(0.8, 7, 0.9, 3, logprobs=2, min_p=0.1, presence_penalty=presence_penalty)
    under_way = []
    with in_the_interpreter(monkeypatch):
        for slot in range(SLOTS):
            ours.admit(slot, filters, "a" if slot % 2 else None, np.array([1, 2], np.int32))
        for moves, following, _ in SCRIPT:
            ours.move(moves)
            under_way.append(ours.launch(following))
        ours.move_pages([(1, 0)])
    assert all(launched.result() for launched in under_way)


@needs_gpu
def test_a_padded_window_leaves_other_pages_alone(executors: tuple[Executor, CudaExecutor]) -> None:
    _, ours = executors
    with torch.inference_mode():
        kv = ours._decoder.kv
        kv.keys.normal_()
        kv.values.normal_()
        before = kv.keys.clone(), kv.values.clone()
    ours.launch(step([], 1, [7, 0, 3])).result()
    for buffer, old in zip((kv.keys, kv.values), before, strict=True):
        changed = {tuple(place) for place in (buffer != old).any(-1).any(2).any(0).nonzero().tolist()}
        assert changed == {(0, 0), (2, 7), (4, 3)}


class NoGraph:
    def __init__(self, *_: object, **options: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@needs_gpu
def test_its_memory_is_given_back_with_it(
    executors: tuple[Executor, CudaExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: nobody collects cycles before the next model asks what is free."""
    if not ON_GPU:
        monkeypatch.setattr(CudaExecutor, "_warm_up", warm_up)
        monkeypatch.setattr(cuda_executor, "RecordedStep", RecordedStep)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", NoGraph)
        monkeypatch.setattr(torch.cuda, "graph", NoGraph)
    gc.disable()
    try:
        made = CudaExecutor(*parts(CudaKernels(processors=2), None), 8)
        arena = weakref.ref(made._decoder.kv.arena)
        del made
        assert arena() is None
    finally:
        gc.enable()


@needs_gpu
def test_steps_that_do_not_fit_are_refused(executors: tuple[Executor, CudaExecutor]) -> None:
    with pytest.raises(ValueError, match="the window 4 to 6 is not within 5 slots"):
        executors[1].launch(step([], 4, [1, 1]))


def test_graphs_are_few_and_reach_all_slots() -> None:
    assert graph_rows(1) == [1]
    assert graph_rows(5) == [1, 2, 4, 5]
    assert graph_rows(8) == [1, 2, 4, 8]
    assert graph_rows(32) == [1, 2, 4, 8, 16, 24, 32]
