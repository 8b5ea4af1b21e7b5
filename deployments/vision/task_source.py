"""The tasks of one vision service as files have them: its folder of tasks, and what clients did at run time.

All of this blocks. What changes the store runs in one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pliant.config.vision import VisionConfig
from pliant.deployments.serving.catalog.confinement import confine, outside, within
from pliant.deployments.serving.catalog.registry import UnavailableError
from pliant.deployments.serving.catalog.store import Store, Stored, StoredEntry
from pliant.deployments.serving.state.storage import Storage
from pliant.deployments.vision.messages import RegisteredTask
from pliant.errors import ModelError, PliantError
from pliant.formats.vision_task import (
    MOST_PROFILING,
    PROFILING,
    TASK,
    WEIGHTS,
    TaskError,
    TaskInfo,
    TaskRef,
    own_task,
    read_task,
)
from pliant.models import sources
from pliant.models.vision_info import VisionInfo, read_vision

_OWN_SLO_MS = 1000.0
_OWN_UTILITY = 1.0
"""Of the model's own head, where neither the service nor a request says anything."""
_MOST_BYTES = 256 * 2**20


class TaskSource:
    """The tasks of the vision service `service`. `scan` comes first, `keep` and `forget` change what is stored.

    What is stored and cannot be served now stays so until a client unloads it or loads another task of
    that name: a later start may find it well again.
    """

    def __init__(self, service: str, config: VisionConfig, storage: Storage) -> None:
        self.service = service
        self.runtime = config.tasks.runtime
        self._config = config
        self._purpose = f"{service} loads tasks"
        self._roots = tuple(Path(root).expanduser().resolve() for root in config.tasks.roots)
        self._model: VisionInfo | None = None
        self.store = Store(storage, config.tasks.registries, service, Stored[StoredEntry]())

    def scan(self) -> Iterator[RegisteredTask | PliantError]:
        """The tasks from earlier runs and those in the configured folder, or what is wrong with each.

        Without such a folder the model's own head is a task. What clients loaded comes first, and the folder's stands
        in where that cannot be served. Those that clients unloaded stay out until their files change. Fetches the zoo's
        model and tasks.
        """
        yield from self.store.open()
        try:
            self._model = read_vision(sources.fetch_vision(self._config.model))
        except (ModelError, OSError) as error:
            yield TaskError(f"has no tasks, because its model cannot be read: {error}")
            return
        present: list[Path] = []
        try:
            present = self._present()
        except PliantError as error:
            yield error
        yield from self._own()
        served = set()
        for name, kept in self.store.loaded.items():
            try:
                yield self.read(name, kept.folder, kept.created)._replace(owner=kept.owner)
                served.add(name)
            except PliantError as error:
                yield TaskError(f"{name}, loaded earlier, is not served: {error}")
        for folder in present:
            yield from (item for item in self._found(folder) if _name(item) not in served)

    def read(self, name: str | None, path: str, created: int) -> RegisteredTask:
        """The task in the folder that a client calls `path`, to be called `name`, or as it calls itself.

        Raises OutsideError, MissingError, TaskError if it does not fit the model, or UnavailableError.
        """
        if self._model is None:
            raise UnavailableError(f"{self.service} takes none: its model could not be read when the planner began")
        folder = confine(path, self._roots, self._purpose, "`pliant train-prompts`")
        info = read_task(folder, self._model)
        if not within(info.folder, self._roots):  # links may change after the path was confined
            raise outside(path, self._roots, self._purpose)
        _check_small(info)
        task = info.ref._replace(name=name or info.name)
        return RegisteredTask(self.service, task, info.labels, info.slo_ms, info.utility, created)

    def kept(self, name: str) -> RegisteredTask | None:
        """What is stored as loaded under `name`, served or not; it says no more of it than the folder."""
        kept = self.store.loaded.get(name)
        if kept is None:
            return None
        return RegisteredTask(
            self.service, TaskRef(name, kept.folder, "", 0, ()), (), 0, 0, kept.created, owner=kept.owner
        )

    def keep(self, entry: RegisteredTask, instead_of: RegisteredTask | None) -> None:
        """Store that a client loaded `entry`. Raises StateError: see `Store.keep`."""
        self.store.keep(entry.task.name, _made(entry), instead_of and self._of_folder(instead_of))

    def forget(self, entry: RegisteredTask) -> None:
        """Store that a client unloaded `entry`. Raises StateError: see `Store.keep`."""
        self.store.forget(entry.task.name, self._of_folder(entry))

    def _of_folder(self, entry: RegisteredTask) -> str | None:
        """The revision of `entry` if it is the configured folder's."""
        return None if self.store.loaded.get(entry.task.name) == _made(entry) else entry.task.revision

    def _own(self) -> Iterator[RegisteredTask | PliantError]:
        """The model's own head, where no folder of tasks stands for it."""
        if self._config.tasks.folder:
            return
        if self._model and self._model.labels:
            labels = self._model.labels
            task = own_task(self._config.model, len(labels))
            yield RegisteredTask(self.service, task, labels, _OWN_SLO_MS, _OWN_UTILITY, 0)
        elif not self._roots:
            yield TaskError("has no tasks: its model has no head of its own; give it a folder of tasks, or roots")

    def _present(self) -> list[Path]:
        """Those of the configured folder that hold a task each, by name. Raises ModelError or TaskError."""
        if not self._config.tasks.folder:
            return []
        try:
            folder = sources.fetch_tasks(self._config.tasks.folder)
            self._roots = tuple(dict.fromkeys((folder, *self._roots)))
            if (folder / TASK).is_file():
                raise TaskError(f"tasks.folder: {folder.name} is a task; it must be the folder around it")
            entries = sorted(folder.iterdir())
            return [each for each in entries if (each / TASK).is_file() and not each.name.startswith(".")]
        except ModelError as error:
            raise TaskError(f"tasks.folder: {error}") from None
        except OSError as error:
            name = Path(self._config.tasks.folder).name
            raise TaskError(f"tasks.folder: {name} cannot be read: {error.strerror}") from None

    def _found(self, folder: Path) -> Iterator[RegisteredTask | PliantError]:
        try:
            entry = self.read(None, str(folder), int((folder / TASK).stat().st_mtime))
        except PliantError as error:
            yield error
        except OSError as error:
            yield TaskError(f"task {folder.name}: {error.strerror}")
        else:
            if not self.store.is_out(entry.task.name, entry.task.revision):
                yield entry


def _check_small(info: TaskInfo) -> None:
    """Raise TaskError for what would take a replica too much memory, or too long to measure."""
    size = (info.folder / WEIGHTS).stat().st_size
    if size > _MOST_BYTES:
        raise TaskError(f"task {info.folder.name}: its {WEIGHTS} has {size:,} bytes, for at most {_MOST_BYTES:,}")
    if info.profiling_images > MOST_PROFILING:
        images = f"{info.profiling_images:,} images in its {PROFILING}"
        raise TaskError(f"task {info.folder.name}: has {images}, for at most {MOST_PROFILING:,}; keep some only")


def _made(entry: RegisteredTask) -> StoredEntry:
    return StoredEntry(folder=entry.task.folder, created=entry.created, owner=entry.owner)


def _name(item: RegisteredTask | PliantError) -> str | None:
    return None if isinstance(item, PliantError) else item.task.name
