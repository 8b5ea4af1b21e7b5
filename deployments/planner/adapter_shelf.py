"""One language model's adapters as files have them: its folders of adapters, and what clients did at run time.

All of this blocks; at most one thread changes it at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pliant.adapter_info import CONFIG, AdapterError, AdapterInfo, AdapterRef
from pliant.cache import cache_folder
from pliant.config import AdaptersConfig, LlmConfig
from pliant.deployments.planner import adapter_file
from pliant.deployments.planner.adapter_file import BrokenFileError, Kept, KeptAdapter
from pliant.deployments.planner.adapter_folders import AdapterFolders
from pliant.deployments.planner.messages import Registered


class AdapterShelf:
    """The adapters of the language model `service`. `stock` comes first, `keep` and `forget` change the file."""

    def __init__(self, service: str, config: LlmConfig, adapters: AdaptersConfig) -> None:
        self.service = service
        self.pinned = adapters.pinned
        self.file = _file(service, adapters)
        self._config = config
        self._adapters = adapters
        self._folders: AdapterFolders | None = None
        self._kept = Kept(base=config.model)
        self._unreadable: OSError | None = None

    def stock(self) -> Iterator[Registered | AdapterError]:
        """The adapters from earlier runs and those in the configured folder, or what is wrong with each.

        Those that clients unloaded stay out until their files change. Fetches the zoo's adapters. Raises ModelError.
        """
        self._folders = AdapterFolders(self.service, self._config, self._adapters)
        try:
            self._kept = adapter_file.read(self.file, self._config.model)
        except BrokenFileError as error:
            yield AdapterError(str(error))
        except OSError as error:
            self._unreadable = error
            yield AdapterError(f"{self.file}: cannot be read, so nothing is written there either: {error.strerror}")
        if self._kept.base == self._config.model:
            yield from self._known()
        else:
            yield from self._read_again()
        try:
            for folder in self._folders.present():
                if folder.name not in self._kept.loaded:
                    yield from self._found(folder)
        except AdapterError as error:
            yield error

    def attempt(self, path: str) -> AdapterInfo | AdapterError:
        """The adapter at a client's `path`, or why it cannot be served."""
        try:
            return self.folders.read(self.folders.confine(path))
        except AdapterError as error:
            return error

    def keep(self, entry: Registered, instead_of: Registered | None) -> None:
        """Write down that a client loaded `entry`. Raises OSError, and then nothing is changed."""
        kept = self._kept if instead_of is None else self._without(instead_of)
        adapter = entry.adapter
        made = KeptAdapter(folder=adapter.folder, revision=adapter.revision, ranks=adapter.ranks, created=entry.created)
        self._write(kept.model_copy(update={"loaded": {**kept.loaded, adapter.name: made}}))

    def forget(self, entry: Registered) -> None:
        """Write down that a client unloaded `entry`. Raises OSError, and then nothing is changed."""
        self._write(self._without(entry))

    @property
    def folders(self) -> AdapterFolders:
        assert self._folders is not None, "stock it first"
        return self._folders

    def _known(self) -> Iterator[Registered | AdapterError]:
        """What was loaded for this same model: believed, so that thousands of adapters are no thousands of reads."""
        for name, each in self._kept.loaded.items():
            adapter = AdapterRef(name, each.folder, each.revision, each.ranks)
            try:
                self.folders.check(adapter)
            except AdapterError as error:
                yield AdapterError(f"{name}, loaded earlier: {error}")
            else:
                yield Registered(self.service, adapter, each.created)

    def _read_again(self) -> Iterator[Registered | AdapterError]:
        """What was loaded when the service had another model, as far as it fits this one, too."""
        old, self._kept = self._kept, Kept(base=self._config.model, unloaded=self._kept.unloaded)
        for name, each in old.loaded.items():
            info = self.attempt(each.folder)
            if isinstance(info, AdapterError):
                yield AdapterError(f"{name}, loaded earlier for {old.base}: {info}")
                continue
            adapter = info.ref(name)
            self._kept.loaded[name] = each.model_copy(update={"revision": adapter.revision, "ranks": adapter.ranks})
            yield Registered(self.service, adapter, each.created)

    def _found(self, folder: Path) -> Iterator[Registered | AdapterError]:
        try:
            adapter = self.folders.read(folder).ref(folder.name)
            created = int((folder / CONFIG).stat().st_mtime)
        except AdapterError as error:
            yield error
        except OSError as error:
            yield AdapterError(f"adapter {folder}: {error.strerror}")
        else:
            if self._kept.unloaded.get(adapter.name) != adapter.revision:
                yield Registered(self.service, adapter, created)

    def _without(self, entry: Registered) -> Kept:
        """What to keep once `entry` is gone. If it is not from the file, it is from the folder, and would come back."""
        name = entry.adapter.name
        if name not in self._kept.loaded:
            return self._kept.model_copy(update={"unloaded": {**self._kept.unloaded, name: entry.adapter.revision}})
        loaded = {other: each for other, each in self._kept.loaded.items() if other != name}
        return self._kept.model_copy(update={"loaded": loaded})

    def _write(self, kept: Kept) -> None:
        if self._unreadable:
            raise self._unreadable
        adapter_file.write(self.file, kept)
        self._kept = kept


def _file(service: str, adapters: AdaptersConfig) -> Path:
    if adapters.registry:
        return Path(adapters.registry).expanduser()
    return cache_folder() / "registries" / f"{service}.json"
