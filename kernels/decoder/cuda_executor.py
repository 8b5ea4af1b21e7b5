"""Runs a decoder's iterations on a GPU while the CPU prepares the next one (Flover §V).

A decode step launches hundreds of small kernels, which takes a CPU longer than the GPU needs for them. So the step is
recorded once as a CUDA graph for each of a few numbers of rows, and a window runs in the smallest that holds it; rows
beyond it have page 0, which belongs to nobody. Where there may be adapters, each is recorded a second time with them,
for windows in which a row uses one. A step with prefills is launched kernel by kernel, as these have enough to do.
The graph draws the tokens, too, and keeps them for the next step, so that a step is one copy to the GPU, one launch,
and one copy back. Where a row's logits are edited or masked, or typical_p filters them, the window is sampled once more
behind the graph; log probabilities follow there, too, for those who want them. Nothing waits for the GPU before a
result is asked for, so that the engine can launch step t + 1 and only then read step t.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.kernels.cuda_graph import graph_rows
from pliant.kernels.decoder.cuda_kernels import CudaKernels
from pliant.kernels.decoder.decode_step import Launched, Output, Step
from pliant.kernels.decoder.executor import Computed, Done, Executor
from pliant.kernels.decoder.kv_pages import PAGE, pages_of
from pliant.kernels.decoder.lora import LoraBatch, LoraGroup
from pliant.kernels.decoder.model import Decoder
from pliant.kernels.decoder.prompt_scores import Scored
from pliant.kernels.decoder.ragged import Ragged, Span, ragged
from pliant.kernels.decoder.sampling import Needs, Ranked, Sampled, Sampler
from pliant.kernels.decoder.triton_attention import WorkTensors
from pliant.kernels.decoder.triton_lora import LoraTiles, rounded, tables_of
from pliant.kernels.upload import packed, refill, unpacked, upload
from pliant.models.lora_layout import MODULES, LoraLayout

Tables = list[NDArray[np.int32]]
"""What the GPU must know of a step's window."""
Drawn = tuple[Tensor, Tensor]
"""Logits [rows, vocab], and the tokens [rows] int64 that are drawn from them."""
Forward = Callable[[list[Tensor], LoraTiles | None], Drawn]
"""(inputs, adapters) -> what the window gives."""
_WARM_TOKENS = 2048
"""Tokens of the longest chunk of a prompt that is computed before readiness."""
_EVERY_FILTER = Needs(True, 64, False, True, 5, min_p=True, typical_p=True)


class CudaExecutor(Executor):
    """An `Executor` whose decoder computes with `CudaKernels`, on the GPU's default stream; no launch waits for it.
    Adapters are copied on a stream of their own.

    Making one compiles all kernels and records all graphs, which takes seconds; nothing else in this process may use
    the GPU meanwhile.
    """

    pipelined = True

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, sampler: Sampler, most_rank: int = 0) -> None:
        super().__init__(decoder, sampler, most_rank)
        self._last = self._last.new_zeros(self.slots + 1)
        """The last is for rows that mean nothing."""
        assert isinstance(decoder.kernels, CudaKernels)
        self._kernels = decoder.kernels
        self._windows = sorted(set(self.shape.windows), key=lambda window: window or 0)
        self._pages = pages_of(self.max_length)
        self._loads = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._landing: set[str] = set()
        """Adapters that are being copied on that stream."""
        self._warm_up()
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        logits = torch.empty(self.slots, self.shape.vocab, dtype=decoder.kv.arena.dtype, device=decoder.device)
        tokens = self._last.new_empty(self.slots)

        def recorded(rows: int, tiles: LoraTiles | None = None) -> RecordedStep:
            drawn = logits[:rows], tokens[:rows]
            return RecordedStep(self._forward, self._tables(rows, None), drawn, pool, stream, tiles)

        counts = graph_rows(self.slots)[::-1]
        self._recorded = [recorded(rows) for rows in counts]
        """Largest first, so that the others find room in its memory."""
        tiles = [self._tiles(rows) for rows in counts if self.adapters]
        self._recorded_adapted = [recorded(len(each.rows), each) for each in tiles]

    def _warm_up(self) -> None:
        """Run what no graph holds once, so that no request waits for a compiler, or for code to be loaded: passes with
        chunks of rising length, moves, and all ways to sample."""
        nothing = LoraGroup(np.zeros(1, np.int32), 0, LoraLayout(self.shape, [0] * len(MODULES)))
        lora = LoraBatch(self._decoder.kv.arena, [nothing]) if self.adapters else None
        logits = self._run_for_nobody(1, lora)
        tokens = 2
        while tokens < min(_WARM_TOKENS, self.max_length):
            logits = self._run_for_nobody(tokens, None)
            tokens *= 2
        self._decoder.kv.move([(0, 0)])
        every = _EVERY_FILTER._replace(top_k=min(_EVERY_FILTER.top_k, self.shape.vocab))
        for rows in (1, self.slots):
            at, some = torch.zeros(rows, dtype=torch.int64, device=logits.device), logits[:1].expand(rows, -1)
            for narrow in (False, True):
                self._sampler.sample(some, slice(0, rows), at, every._replace(narrow=narrow))
        for row in (logits[:1], logits[1:], logits[:1].float()):  # Triton has code of its own for aligned addresses
            self._sampler.sample(row, slice(0, 1), at[:1], every._replace(typical_p=False))

    def _run_for_nobody(self, tokens: int, lora: LoraBatch | None) -> Tensor:
        """A pass with a row of one token and a chunk of so many, which are stored in page 0."""
        chunk = Span(0, tokens), np.zeros(pages_of(tokens), np.int32)
        batch = ragged(np.zeros(1, np.int32), np.zeros((1, 1), np.int32), [chunk], self.page, self._decoder.device)
        ids = torch.zeros(1 + tokens, dtype=torch.int64, device=self._decoder.device)
        return self._decoder.run(ids, batch, ids[:2], lora)

    def install(self, key: str, ranks: Sequence[int], blob: Tensor) -> None:
        """As in `Executor`; steps that use neither it nor what moves for it are computed meanwhile."""
        self._loads.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._loads):
            self._landing |= self._adapters.install(key, ranks, blob)

    def remove(self, key: str) -> None:
        self._land()
        super().remove(key)

    def keep_pages(self, count: int) -> None:
        self._land()
        super().keep_pages(count)

    def _land(self) -> None:
        """What is launched from now on finds all adapters copied."""
        if self._landing:
            torch.cuda.current_stream().wait_stream(self._loads)
            self._landing.clear()

    def _tiles(self, rows: int) -> LoraTiles:
        """Room for the adapters of so many rows, each of which may use another."""
        arena, sizes = self._decoder.kv.arena, LoraLayout(self.shape, [0] * len(MODULES)).sites
        tables = (upload(table, arena.device) for table in tables_of(None, rows))
        return LoraTiles(arena, sizes, rounded(self._adapters.most_rank), *tables)

    def _computed(self, step: Step) -> Computed:
        if not self._landing.isdisjoint(self._adapters.keys_of(step)):
            self._land()
        if step.prefills:
            return super()._computed(step)
        lora = self._adapters.of_step(step)
        steps = self._recorded if lora is None else self._recorded_adapted
        recorded = next(one for one in reversed(steps) if one.rows >= len(step.lengths))
        logits, drawn = recorded.run(self._tables(recorded.rows, step), len(step.lengths), lora)
        return Computed(logits, drawn=drawn)

    def _launched(self, first: Sampled | None, window: Sampled | None, scored: Scored | None) -> Launched:
        return _UnderWay(first, window, scored)

    def _tables(self, rows: int, step: Step | None) -> Tables:
        """Slots, indices and lengths [rows] and tables [rows, pages], filled up with rows of page 0 and no text, and
        for each window the lists of who attends to what. Rows without text have a slot behind all others."""
        slots, indices, lengths, tables = (np.zeros(size, np.int32) for size in (rows, rows, rows, (rows, self._pages)))
        if step is not None:
            count, width = step.tables.shape
            slots[:count] = np.arange(step.offset, step.offset + count)
            indices[:count] = step.indices
            lengths[:count] = step.lengths
            tables[:count, :width] = step.tables[:, : self._pages]
        slots[lengths == 0] = self.slots
        keys, _ = self._decoder.kv.layer(0)
        lists = [table for window in self._windows for table in self._kernels.work(lengths, window, keys)]
        return [slots, indices, lengths, tables, *lists]

    def _forward(self, inputs: list[Tensor], tiles: LoraTiles | None) -> Drawn:
        """As `Decoder.run`, for a window that is known on the GPU alone, and the tokens that follow."""
        slots, indices, lengths, tables, *lists = inputs
        slots = slots.long()
        pages = tables.gather(1, (lengths // PAGE).long()[:, None])[:, 0]
        works = (WorkTensors(*lists[first : first + 3]) for first in range(0, len(lists), 3))
        work = {window: (each,) for window, each in zip(self._windows, works, strict=True)}
        batch = Ragged(lengths, pages, tables, len(slots), work=work)
        logits = self._decoder.step(self._last[slots], batch, add_lora=None if tiles is None else tiles.add)
        tokens = self._sampler.draw(logits, slots, indices)
        self._last.index_copy_(0, slots, tokens)
        return logits, tokens


class RecordedStep:
    """A decode step of as many rows as `drawn` has, which each run fills, as a CUDA graph.

    `tables` are those of a step without rows, of the same sizes as every step's; `forward` is given them on the GPU. It
    must launch the same work whatever they hold, and never wait for the GPU. Rows use adapters if there are `tiles` for
    them, one for each row. Graphs that are recorded on the same `stream` and share a `pool` share its memory.
    """

    def __init__(
        self,
        forward: Forward,
        tables: Tables,
        drawn: Drawn,
        pool: Any,
        stream: torch.cuda.Stream,
        tiles: LoraTiles | None = None,
    ) -> None:
        logits, tokens = drawn
        self.rows = len(logits)
        self._drawn = drawn
        self._tiles = tiles
        self._given = upload(packed(tables), logits.device)
        given = unpacked(self._given, tables)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward(given, tiles)  # compiles kernels, which cannot be done while recording
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            found = forward(given, tiles)
            logits.copy_(found[0])
            tokens.copy_(found[1])

    def run(self, tables: Tables, count: int, lora: LoraBatch | None = None) -> Drawn:
        """What the `count` first rows of these tables give; views of what it was made with.

        The rows of `lora` are those of the window; where there are tiles, none stands for no adapters.
        """
        refill(self._given, packed(tables))
        if self._tiles is not None:
            rows, places = tables_of(lora, self.rows)
            refill(self._tiles.rows, rows)
            refill(self._tiles.places, places)
        self._graph.replay()
        logits, tokens = self._drawn
        return logits[:count], tokens[:count]


class _UnderWay(Done):
    """A step whose tokens are on their way to the CPU."""

    def __init__(self, first: Sampled | None, window: Sampled | None, scored: Scored | None) -> None:
        super().__init__(_to_host(first), _to_host(window), scored and scored.on_host())
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._copied.record()

    def result(self) -> Output:
        self._copied.synchronize()
        return super().result()


def _to_host(sampled: Sampled | None) -> Sampled | None:
    """Copies in pinned memory, there when all that was launched before is done."""
    if sampled is None:
        return None
    tokens = sampled.tokens.to("cpu", non_blocking=True)
    ranked = sampled.ranked
    return Sampled(tokens, ranked and Ranked(*(tensor.to("cpu", non_blocking=True) for tensor in ranked)))
