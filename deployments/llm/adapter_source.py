"""One language model's adapters as files have them: its folders of adapters, and what clients did at run time.

All of this blocks. What changes the store runs in one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pliant.config.llm import AdaptersConfig, LlmConfig
from pliant.deployments.llm.adapter_folders import AdapterFolders
from pliant.deployments.llm.messages import Registered
from pliant.deployments.serving.catalog.registry import UnavailableError
from pliant.deployments.serving.catalog.store import Store, Stored, StoredEntry
from pliant.deployments.serving.state.storage import Storage
from pliant.errors import ModelError, PliantError
from pliant.formats.adapter_info import CONFIG, AdapterError, AdapterInfo, AdapterRef


class StoredAdapter(StoredEntry):
    """One adapter, as `AdapterRef` has it."""

    revision: str
    ranks: tuple[int, ...]
    base: str
    """The model that it was last checked against."""


class AdapterSource:
    """The adapters of the language model `service`. `scan` comes first, `keep` and `forget` change what is stored.

    What is stored and cannot be served now, because its folder is away or it does not fit another model, stays
    so until a client unloads it or loads another adapter of that name: a later start may find it well again.
    """

    def __init__(self, service: str, config: LlmConfig, adapters: AdaptersConfig, storage: Storage) -> None:
        self.service = service
        self.pinned = frozenset(adapters.pinned)
        self.runtime = adapters.runtime
        self._config = config
        self._adapters = adapters
        self._folders: AdapterFolders | None = None
        self.store = Store(storage, adapters.registries, service, Stored[StoredAdapter]())

    def scan(self) -> Iterator[Registered | PliantError]:
        """The adapters from earlier runs and those in the configured folder, or what is wrong with each.

        Pinned names are the folder's; of others what clients loaded comes first, and the folder's stands in where that
        cannot be served. Those that clients unloaded stay out until their files change. Fetches the zoo's adapters.
        """
        yield from self.store.open()
        try:
            self._folders = AdapterFolders(self.service, self._config, self._adapters)
        except (ModelError, OSError) as error:
            yield AdapterError(f"has no adapters, because its model cannot be read: {error}")
            return
        try:
            present = {folder.name: folder for folder in self._folders.present()}
        except AdapterError as error:
            present = {}
            yield error
        for name in dict.fromkeys(self._adapters.pinned):
            yield from self._pinned(name, present.pop(name, None))
        for name, kept in self.store.loaded.items():
            if name not in self.pinned:
                item = self._earlier(name, kept)
                yield item
                if isinstance(item, Registered):
                    present.pop(name, None)
        for folder in present.values():
            yield from self._found(folder)

    def read(self, path: str) -> AdapterInfo:
        """The adapter at a client's `path`.

        Raises OutsideError, MissingError, AdapterError if it cannot be served, or UnavailableError.
        """
        if self._folders is None:
            raise UnavailableError(f"{self.service} takes none: its model could not be read when the planner began")
        return self._folders.read(self._folders.confine(path))

    def trained_on(self, base: str | None) -> bool:
        """Whether `base` is what this service or its model is called."""
        return base in (self.service, self._config.model)

    def kept(self, name: str) -> Registered | None:
        """What is stored as loaded under `name`, served or not."""
        kept = self.store.loaded.get(name)
        return self._entry(name, kept) if kept else None

    def keep(self, entry: Registered, instead_of: Registered | None) -> None:
        """Store that a client loaded `entry`. Raises StateError: see `Store.keep`."""
        adapter = entry.adapter
        made = StoredAdapter(
            folder=adapter.folder,
            revision=adapter.revision,
            ranks=adapter.ranks,
            created=entry.created,
            base=self._config.model,
            owner=entry.owner,
        )
        self.store.keep(adapter.name, made, instead_of and self._of_folder(instead_of))

    def forget(self, entry: Registered) -> None:
        """Store that a client unloaded `entry`. Raises StateError: see `Store.keep`."""
        self.store.forget(entry.adapter.name, self._of_folder(entry))

    def _of_folder(self, entry: Registered) -> str | None:
        """The revision of `entry` if it is the configured folder's."""
        return None if entry == self.kept(entry.adapter.name) else entry.adapter.revision

    def _pinned(self, name: str, folder: Path | None) -> Iterator[Registered | PliantError]:
        """The pinned adapter in `folder`, which replicas load as they start, whatever else was loaded as `name`."""
        if (kept := self.store.loaded.get(name)) and (folder is None or Path(kept.folder) != folder):
            yield AdapterError(
                f"adapters.pinned: {name} is pinned, so it is the one of the folder; what was loaded under that name "
                f"from {Path(kept.folder).name} is not served: take it out of adapters.pinned, or load that "
                "under another name"
            )
        for item in self._found(folder) if folder else ():
            yield item
            if isinstance(item, Registered):
                self._in_folders.pin(item.adapter)

    def _earlier(self, name: str, kept: StoredAdapter) -> Registered | AdapterError:
        """What was loaded as `name`. For this same model it is believed, lest thousands be thousands of reads."""
        try:
            if kept.base == self._config.model:
                self._in_folders.check(self._entry(name, kept).adapter)
                return self._entry(name, kept)
            info = self._in_folders.read(self._in_folders.confine(kept.folder))
        except PliantError as error:
            return AdapterError(f"{name}, loaded earlier for {kept.base}, is not served: {error}")
        changes = {
            "folder": info.folder,
            "revision": info.revision,
            "ranks": info.ranks,
            "base": self._config.model,
        }
        believed = kept.model_copy(update=changes)
        self.store.believe(name, believed)
        return self._entry(name, believed)

    def _found(self, folder: Path) -> Iterator[Registered | PliantError]:
        try:
            adapter = self._in_folders.read(folder).ref(folder.name)
            created = int((folder / CONFIG).stat().st_mtime)
        except PliantError as error:
            yield error
        except OSError as error:
            yield AdapterError(f"adapter {folder.name}: {error.strerror}")
        else:
            if adapter.name in self.pinned or not self.store.is_out(adapter.name, adapter.revision):
                yield Registered(self.service, adapter, created)

    @property
    def _in_folders(self) -> AdapterFolders:
        assert self._folders is not None, "scan it first"
        return self._folders

    def _entry(self, name: str, kept: StoredAdapter) -> Registered:
        return Registered(
            self.service, AdapterRef(name, kept.folder, kept.revision, kept.ranks), kept.created, kept.owner
        )
