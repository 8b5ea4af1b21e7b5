"""Tiny models that every machine can train in minutes, so that no download is needed to serve real ones, adapters of
one of them, and tasks of another.

Neither torch nor transformers is imported: `ensure` trains in a process of its own (`training_process`).
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pliant.background import BEHIND_OTHERS
from pliant.cache import cache_folder, made_once, shared
from pliant.errors import PliantError
from pliant.turns import BACKGROUND, LONG, TRAIN, busy, turn
from pliant.zoo import shapes
from pliant.zoo.training_process import train_apart

NAMES = tuple(shapes.SHAPES)
"""The models that there are, named `zoo/NAME` elsewhere."""
ADAPTERS = "adapters"
"""The entry that holds all adapters, a PEFT folder each."""
TASKS = "digits-tasks"
"""The entry that holds all vision tasks, a folder each."""
_COSTS = {
    "topics-small": 4,
    "library": 5,
    "topics-pairs": 8,
    "digits-vit": 12,
    "topics-large": 17,
    "topics-embedding": 18,
    TASKS: 30,
    "tiny-llama": 38,
    ADAPTERS: 42,
}
_LONG_S = 35
"""Of what takes longer than that, one at a time is trained beside what takes less, once the first model is there."""
_POLL_S = 0.2
_MEASURED = ("accuracy", "perplexity", "base_perplexity", "prompted_accuracy")


@dataclass(frozen=True)
class ZooEntry:
    """A model, an adapter or a task, and what was measured on data that it has not seen, once it is trained.

    Classifiers have an `accuracy`, of held-out paragraphs or images. Tasks have one, too, and the best one that prompts
    give, `prompted_accuracy`, both of the profiling images that come with them. Language models have a `perplexity`, of
    a token in held-out documents, and adapters one in held-out docstrings of their part, where the model has
    `base_perplexity` without them. `seconds` is the wall time that training took.
    """

    name: str
    accuracy: float | None = None
    perplexity: float | None = None
    parameters: int = 0
    seconds: float = 0.0
    base_perplexity: float | None = None
    prompted_accuracy: float | None = None

    @property
    def trained(self) -> bool:
        return self.parameters > 0


def folder(name: str) -> Path:
    """Where the model `name`, or `ADAPTERS` or `TASKS`, lies or will lie once trained; of what is made of a model, one
    version of that."""
    of = f"-of-{folder(base).name}" if (base := _base(name)) else ""
    return cache_folder() / "zoo" / f"{name}-v{_version(name)}{of}"


def config(name: str) -> dict[str, Any]:
    """The `config.json` that the model `name` has, or will have once it is trained."""
    return shapes.SHAPES[name].config()


def describe(name: str, into: Path) -> None:
    """Write to `into` what says what the model `name` is for, also before it is trained."""
    files: dict[str, Any] = {"config.json": config(name)}
    if isinstance(shape := shapes.SHAPES[name], shapes.EmbeddingShape):
        files |= shape.modules()
    for file, content in files.items():
        (into / file).parent.mkdir(exist_ok=True)
        (into / file).write_text(json.dumps(content, indent=2) + "\n")


def status() -> list[ZooEntry]:
    """All models of the zoo, in the order of `NAMES`, then each adapter and each task."""
    parts = [(ADAPTERS, name) for name in shapes.ADAPTERS] + [(TASKS, name) for name in shapes.TASKS]
    return [
        *(_entry(name, folder(name)) for name in NAMES),
        *(_entry(f"{group}/{name}", folder(group) / name) for group, name in parts),
    ]


def ensure(name: str, progress: Callable[[str, float], object], niceness: int = BEHIND_OTHERS) -> Path:
    """The folder of the model `name`, of the `ADAPTERS` or of the `TASKS`, which are trained first if this user has
    never done so.

    Of all that are wanted the cheapest are trained first, and beside them what takes long; others that ask meanwhile
    wait. `progress` is called with what is being done and the fraction done; adapters, tasks and embeddings may need
    their model to be trained before. Raises ModelError if training fails.
    """
    if (base := _base(name)) and not folder(name).exists():
        ensure(base, progress, niceness)
    if isinstance(shape := shapes.SHAPES.get(name), shapes.EmbeddingShape):
        return made_once(folder(name), lambda unfinished: _link(name, shape, unfinished))
    job = f"training zoo/{name}"
    report = shared(folder(name), progress)

    def make(unfinished: Path) -> None:
        while _long(name) and _nothing_answers_yet():
            report("waiting for the first model that can answer", 0.0)
            time.sleep(_POLL_S)
        with turn(job, lambda: (TRAIN, cost(name)), report, LONG if _long(name) else BACKGROUND):
            train_apart(name, unfinished, lambda _text, done: report(job, done), niceness)

    return made_once(folder(name), make, progress)


def train_ahead(names: Iterable[str]) -> None:
    """Begin to train what this user lacks of `names`, in the order of `ensure`; whoever needs one waits for it there.

    What fails, fails again for whoever needs it, who learns why.
    """
    ordered = sorted(names, key=cost)
    short, long = [name for name in ordered if not _long(name)], [name for name in ordered if _long(name)]
    one_is_there = threading.Event()
    if not short:
        one_is_there.set()

    def train(waiting: Iterator[str]) -> None:
        for name in waiting:
            with suppress(PliantError, OSError):
                ensure(name, lambda _text, _done: None)
            one_is_there.set()

    def train_long() -> None:
        one_is_there.wait()
        train(iter(long))

    def train_beside() -> None:
        while not (one_is_there.is_set() or busy(BACKGROUND)):
            time.sleep(_POLL_S)  # or it could come before the first, which is cheaper
        train(waiting)

    waiting = iter(short)
    threading.Thread(target=train, args=(waiting,), daemon=True).start()
    for _ in range(BACKGROUND.places):  # one of them waits already when a place is left, before what is less urgent
        threading.Thread(target=train_beside, daemon=True).start()
    threading.Thread(target=train_long, daemon=True).start()


def cost(name: str) -> float:
    """About how many seconds of a usual processor it takes to train `name`; what it is made of costs less, and so comes
    before it."""
    return _COSTS[name]


def _base(name: str) -> str | None:
    """The model that the adapters or the tasks are for, or that a model is made of, if it is."""
    if isinstance(shape := shapes.SHAPES.get(name), shapes.EmbeddingShape | shapes.PairShape):
        return shape.of
    return {ADAPTERS: shapes.BASE, TASKS: shapes.BACKBONE}.get(name)


def _long(name: str) -> bool:
    return cost(name) > _LONG_S


def _nothing_answers_yet() -> bool:
    """Whether the first of all models is being trained."""
    return not any(folder(name).exists() for name in NAMES) and busy(BACKGROUND)


def _version(name: str) -> int:
    known = {ADAPTERS: shapes.ADAPTERS_VERSION, TASKS: shapes.TASKS_VERSION}
    return known[name] if name in known else shapes.SHAPES[name].version


def train(name: str, into: Path, progress: Callable[[str, float], object]) -> None:
    """Train the model `name`, the `ADAPTERS` or the `TASKS` in this process; the model of the latter is there already.

    A model's folder gets weights, configuration, tokenizer and `zoo.json`.
    """
    if name == ADAPTERS:
        train_adapters(into, progress)
    elif name == TASKS:
        train_tasks(into, progress)
    else:
        _train_model(name, into, progress)


def _train_model(name: str, into: Path, progress: Callable[[str, float], object]) -> None:
    started = time.perf_counter()
    shape = shapes.SHAPES[name]

    report = _named(progress, name)
    if isinstance(shape, shapes.LlamaShape):
        from pliant.zoo import llama

        measured = asdict(llama.train(shape, into, report))
    elif isinstance(shape, shapes.VitShape):
        from pliant.zoo import digits_vit

        measured = asdict(digits_vit.train(shape, into, report))
    elif isinstance(shape, shapes.PairShape):
        from pliant.zoo import pairs

        measured = asdict(pairs.train(shape, folder(shape.of), into, report))
    else:
        from pliant.zoo import topics

        assert isinstance(shape, shapes.Shape)
        measured = asdict(topics.train(shape, into, report))
    _write_card(into, name, shape.version, measured, started)


def train_adapters(into: Path, progress: Callable[[str, float], object]) -> None:
    """Train all adapters of their model, which is there already: a folder in `into` for each, as PEFT saves it."""
    from pliant.zoo import adapters

    started = time.perf_counter()
    report = _named(progress, ADAPTERS)
    for name, measured in adapters.train(
        shapes.ADAPTERS, shapes.ADAPTER_STEPS, folder(shapes.BASE), into, report
    ).items():
        _write_card(into / name, name, shapes.ADAPTERS_VERSION, asdict(measured), started)


def train_tasks(into: Path, progress: Callable[[str, float], object]) -> None:
    """Train all tasks of their model, which is there already: a folder in `into` for each."""
    from pliant.zoo import digits_tasks

    for index, (name, shape) in enumerate(shapes.TASKS.items()):
        report = _part(progress, f"{TASKS}/{name}", index, len(shapes.TASKS))
        started = time.perf_counter()
        measured = asdict(digits_tasks.train(name, shape, folder(shapes.BACKBONE), into / name, report))
        _write_card(into / name, name, shapes.TASKS_VERSION, measured, started)


def _named(progress: shapes.Progress, name: str) -> shapes.Progress:
    """The progress of the training of `name`."""
    return lambda text, done: progress(f"{text}: zoo/{name}", done)


def _part(progress: shapes.Progress, name: str, index: int, count: int) -> shapes.Progress:
    """The progress of one of `count` trainings."""
    return lambda text, done: progress(f"{text}: zoo/{name}", (index + done) / count)


def _link(name: str, shape: shapes.EmbeddingShape, into: Path) -> None:
    """Fill `into` with links to the files of the model that it is made of, and with what says that it embeds."""
    trained = folder(shape.of)
    describe(name, into)
    (into / "config.json").unlink()
    for file in trained.iterdir():
        if file.name != "zoo.json":
            (into / file.name).symlink_to(file)
    measured = {"parameters": json.loads((trained / "zoo.json").read_text())["parameters"]}
    _write_card(into, name, shape.version, measured, time.perf_counter())


def _write_card(folder: Path, name: str, version: int, measured: dict[str, Any], started: float) -> None:
    seconds = round(time.perf_counter() - started, 1)
    card = {"name": name, "version": version, **measured, "seconds": seconds}
    (folder / "zoo.json").write_text(json.dumps(card, indent=2) + "\n")


def _entry(name: str, folder: Path) -> ZooEntry:
    card = folder / "zoo.json"
    if not card.exists():
        return ZooEntry(name)
    found = json.loads(card.read_text())
    measured = {key: found.get(key) for key in _MEASURED}
    return ZooEntry(name, parameters=found["parameters"], seconds=found["seconds"], **measured)
