"""Several processes that compute one model together (tensor parallel), over gloo: the same answers, and how fast."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from pliant.bench.adapters.folders import folders
from pliant.bench.findings import Findings
from pliant.bench.llm.checkpoints import LARGE, Size, checkpoint
from pliant.bench.llm.our_kernels import GREEDY
from pliant.bench.llm.roofline import step_s
from pliant.bench.report import Figure, median, ratio
from pliant.deployments.llm.adapter_loader import AdapterLoader, PeftFolders
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.report import LlmReport
from pliant.deployments.llm.request import Generation, Piece
from pliant.formats.adapter_info import AdapterRef, bytes_of, read_adapter
from pliant.kernels.decoder import parallel_executor
from pliant.kernels.decoder.kv_pages import PAGE
from pliant.models.sources import describe_decoder
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.request_scheduler import Scheduler

COUNTS = (2, 4)
"""Of ranks, each compared with one."""
TINY = Size("tiny", hidden=64, layers=2, heads=4, intermediate=96, vocab=301)
_DTYPE, _DTYPE_BYTES = "float32", 4
_LIMIT_S = 60.0
_SLOTS, _MAX_LENGTH = 16, 4 * PAGE
_LONGEST_TEXTS = 4
"""That there is memory for: fewer than slots, so that requests, prefixes and adapters make way."""
_ADAPTER_RANKS = (8, 16, 32, 64, 8, 16, 32, 64)
_LONGEST_ANSWER = 24
_AT_ONCE = 32
_STALL_S = 1e-4
"""So short that prompts are computed in chunks."""
_ROWS, _CONTEXT, _STEPS = 8, 64, 16


@dataclass(frozen=True)
class Scale:
    """How many requests each count of ranks answers, and how often steps are timed."""

    requests: int
    repetitions: int

    @property
    def runs(self) -> int:
        return 1 + len(COUNTS) + self.repetitions


def compare(scale: Scale, done: Callable[[], object]) -> Findings:
    """Equal answers of two and four ranks, and the time of a step of two, against one."""
    return Findings([*answers_equal(scale.requests, done), _step(scale.repetitions, done)])


def answers_equal(count: int, done: Callable[[], object]) -> list[Figure]:
    """For each count of ranks: the fraction of `count` greedy answers whose tokens are those of one rank.

    Prompts with common beginnings and without come all at once, in chunks, for the base model and for more adapters
    than there is memory for.
    """
    folder = checkpoint(TINY, _DTYPE)
    shape = describe_decoder(folder).shape
    adapters = [
        read_adapter(path, shape).ref(f"adapter-{number}")
        for number, path in enumerate(folders(TINY, _ADAPTER_RANKS, _DTYPE))
    ]
    requests = mixture(count, adapters)
    expected, _ = _answers(folder, 1, requests)
    done()
    figures = []
    for ranks in COUNTS:
        answers, report = _answers(folder, ranks, requests)
        equal = statistics.mean(answers[request.id] == expected[request.id] for request in requests)
        beside = (
            f"of {count} answers; {report['memory']['hit']:,} tokens of prefixes found, {report['preempted']} requests "
            f"made way, {report['adapters']['loads']} loads of {len(adapters)} adapters"
        )
        figures.append(median(f"tp{ranks}_answers_equal", [equal], "1", beside))
        done()
    return figures


def mixture(count: int, adapters: Sequence[AdapterRef]) -> list[Generation]:
    """Greedy requests: half of the prompts begin alike, and two of three are for one of `adapters`."""
    rng = random.Random(0)

    def text(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(TINY.vocab) for _ in range(length))

    beginnings = [text(2 * PAGE + 5) for _ in range(4)]
    return [
        Generation(
            str(number),
            prompt=(*rng.choice(beginnings), *text(rng.randint(1, 8)))
            if rng.random() < 0.5
            else text(rng.randint(1, 3 * PAGE)),
            max_tokens=rng.randint(1, _LONGEST_ANSWER),
            sampling=GREEDY,
            ignore_eos=True,
            adapter=rng.choice(adapters) if rng.random() < 2 / 3 else None,
        )
        for number in range(count)
    ]


def _answers(folder: Path, ranks: int, requests: Sequence[Generation]) -> tuple[dict[str, list[int]], LlmReport]:
    """The tokens of each request's answer, and the engine's report at the end."""
    shape = describe_decoder(folder).shape
    largest = max(bytes_of(request.adapter.ranks, shape, _DTYPE_BYTES) for request in requests if request.adapter)
    arena = 2 * largest + _LONGEST_TEXTS * shape.kv_bytes(_MAX_LENGTH, _DTYPE_BYTES)
    loaded = parallel_executor.load(
        folder, ranks, _LIMIT_S, _SLOTS, _MAX_LENGTH, _DTYPE, arena_bytes=arena, most_rank=max(_ADAPTER_RANKS)
    )
    engine = Engine(
        loaded,
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        (),
        queue=len(requests),
        stall_s=_STALL_S,
        scheduler=Scheduler(
            MultiQueue(QueueClasses(1.0)), AdapterCache("joint"), loaded.arena_bytes, slots=loaded.slots
        ),
        loader=AdapterLoader(PeftFolders(loaded, _DTYPE_BYTES, max(_ADAPTER_RANKS), ranks)),
    )
    answers: dict[str, list[int]] = {request.id: [] for request in requests}
    coming, open_ = list(reversed(requests)), 0
    while coming or engine.busy:
        while coming and open_ < _AT_ONCE:
            engine.add(coming.pop())
            open_ += 1
        for name, piece in engine.step():
            assert isinstance(piece, Piece), piece
            answers[name] += piece.tokens
            open_ -= piece.finish is not None
    engine.close()
    return answers, engine.report()


def _step(repetitions: int, done: Callable[[], object]) -> Figure:
    """The time of a decode step of two ranks over that of one, on 120M parameters, with a thread for each rank."""
    folder = checkpoint(LARGE, "bfloat16")
    both = [
        parallel_executor.load(folder, ranks, _LIMIT_S, _ROWS, _CONTEXT + _STEPS, "bfloat16", threads=1)
        for ranks in (1, 2)
    ]
    one: list[float] = []
    two: list[float] = []
    for _ in range(repetitions):
        for took, loaded in zip((one, two), both, strict=True):
            took.append(step_s(loaded, _ROWS, _CONTEXT, _STEPS))
        done()
    beside = (
        f"{statistics.median(two) * 1e3:.3g} against {statistics.median(one) * 1e3:.3g} ms for {_ROWS} texts, "
        "a thread for each rank"
    )
    return ratio("tp2_step_vs_tp1", two, one, "", beside)
