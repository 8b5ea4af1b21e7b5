"""Where one language model's adapters may come from, and whether one of them fits it. All of this reads files."""

from __future__ import annotations

from pathlib import Path

from pliant.config.llm import AdaptersConfig, LlmConfig
from pliant.deployments.serving.catalog import confinement
from pliant.errors import ModelError
from pliant.formats.adapter_info import CONFIG, WEIGHTS, AdapterError, AdapterInfo, AdapterRef, bytes_of, read_adapter
from pliant.models import remote, sources
from pliant.models.decoder_shape import DecoderShape


class AdapterFolders:
    """The adapters that the language model `service` may have."""

    def __init__(self, service: str, config: LlmConfig, adapters: AdaptersConfig) -> None:
        """Trains the zoo's adapters if the configuration names them and they are not there yet. Raises ModelError."""
        self.service = service
        self._purpose = f"{service} loads adapters"
        self._most_rank = adapters.max_rank
        self._shape: DecoderShape = sources.check_decoder(config.model)
        self._dtype_bytes = config.dtype_bytes
        self._kv_value_bytes = config.kv_value_bytes
        self._memory_mb = config.memory_mb
        self._slot_tokens = config.least_slot(self._shape.max_length)
        self._pinned_bytes = 0
        self._folder: Path | None = None
        self._missing: ModelError | OSError | None = None
        try:
            self._folder = sources.fetch_adapters(adapters.folder) if adapters.folder else None
        except (ModelError, OSError) as error:
            self._missing = error
        self._remote_roots = tuple(filter(remote.is_remote, adapters.roots))
        roots = [Path(root).expanduser().resolve() for root in adapters.roots if not remote.is_remote(root)]
        self._roots = (self._folder, *roots) if self._folder else tuple(roots)

    def confine(self, path: str) -> Path | str:
        """The folder that a client calls `path`: whole, or, of one on this machine, from one of the roots on.

        Raises OutsideError when it leads, by links or otherwise, out of all roots, whether it exists or not, and
        MissingError when there is no such folder in them.
        """
        if remote.is_remote(path):
            if not any(remote.is_below(path, root) for root in self._remote_roots):
                raise confinement.outside(path, self._remote_roots, self._purpose)
            return path
        return confinement.confine(path, self._roots, self._purpose, "PEFT's save_pretrained")

    def read(self, folder: Path | str) -> AdapterInfo:
        """The adapter in `folder`, if it is within the roots and fits model and memory; of a URL, as it is there now.

        Raises AdapterError, or OutsideError.
        """
        if isinstance(folder, str):
            info = read_adapter(self._pinned(folder), self._shape, self._most_rank)
        else:
            info = read_adapter(folder, self._shape, self._most_rank)
            if not confinement.within(Path(info.folder), self._roots):  # links may change after they were confined
                raise confinement.outside(str(folder), self._roots, self._purpose)
        self._check_memory(info.ref(Path(folder).name))
        return info

    @staticmethod
    def _pinned(url: str) -> str:
        try:
            return remote.pinned(url, (CONFIG, WEIGHTS))
        except ValueError as error:
            raise AdapterError(f"adapter {confinement.public(url)}: {error}") from None

    def check(self, kept: AdapterRef) -> None:
        """Whether an adapter that was registered for the same model may still be.

        Raises AdapterError, OutsideError or MissingError.
        """
        self.confine(kept.folder)
        if kept.rank > self._most_rank:
            raise AdapterError(f"its rank is {kept.rank}; at most {self._most_rank} is allowed (max_rank)")
        self._check_memory(kept)

    def pin(self, adapter: AdapterRef) -> None:
        """Count `adapter` as always in memory: others that are checked later must fit beside it."""
        self._pinned_bytes += self._bytes(adapter)

    def present(self) -> list[Path]:
        """Those of the configured folder that should hold an adapter each, by name. Raises AdapterError."""
        if self._missing:
            raise AdapterError(f"adapters.folder: {self._missing}")
        if self._folder is None:
            return []
        try:
            if (self._folder / CONFIG).is_file():
                raise AdapterError(f"adapters.folder: {self._folder.name} is an adapter; name the folder around it")
            return sources.folders_in(self._folder)
        except OSError as error:
            raise AdapterError(f"adapters.folder: {self._folder.name} cannot be read: {error.strerror}") from None

    def _bytes(self, adapter: AdapterRef) -> int:
        return bytes_of(adapter.ranks, self._shape, self._dtype_bytes)

    def _check_memory(self, adapter: AdapterRef) -> None:
        """A request needs its adapter and a slot at the same time, beside what is pinned.

        Without memory_mb only the replicas know what they have.
        """
        if self._memory_mb is None:
            return
        own = self._bytes(adapter) / 2**20
        slot = self._shape.kv_bytes(self._slot_tokens, self._kv_value_bytes) / 2**20
        pinned = self._pinned_bytes / 2**20
        if own + slot + pinned > self._memory_mb:
            beside = f", and pinned adapters {pinned:.1f} MB" if pinned else ""
            raise AdapterError(
                f"rank {adapter.rank} takes {own:.1f} MB, keys and values of one request of {self._slot_tokens} "
                f"tokens {slot:.1f} MB{beside}: {own + slot + pinned:.1f} MB, but {self.service} has memory_mb: "
                f"{self._memory_mb}; choose a smaller rank, or allow more"
            )
