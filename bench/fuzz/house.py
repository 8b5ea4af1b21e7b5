"""A gateway in this process, of all kinds, over replicas that answer at once and registries over folders of files.

All is ours but the models: routes, protocols, endpoints, the call path, registries of adapters and tasks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pliant.config.base import ReplicaRange
from pliant.config.cascade import CascadeConfig
from pliant.config.cluster import GatewayConfig, ServingConfig
from pliant.config.encoder import EncoderConfig
from pliant.config.llm import LlmConfig
from pliant.config.vision import VisionConfig
from pliant.deployments import kinds
from pliant.deployments.cascade.choice import Choice
from pliant.deployments.cascade.endpoint import CascadeClassifier
from pliant.deployments.encoder import messages as texts
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.kind import ENDPOINTS
from pliant.deployments.http.application import application
from pliant.deployments.llm.adapter_follower import AdapterFollower
from pliant.deployments.llm.adapter_registry import AdapterRegistry
from pliant.deployments.llm.endpoint import LanguageModel
from pliant.deployments.llm.request import Generation, Piece, TokenLogprobs
from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.catalog.part import CatalogPart
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.courier import Courier
from pliant.deployments.serving.least_held import LeastHeld
from pliant.deployments.serving.parcels import Parcel
from pliant.deployments.serving.services import Answers, Service, Services
from pliant.deployments.serving.table import Chooser, ReplicaTable
from pliant.deployments.vision import messages as images
from pliant.deployments.vision.endpoint import VisionClassifier
from pliant.deployments.vision.task_follower import TaskFollower
from pliant.deployments.vision.task_registry import TaskRegistry
from pliant.models.decoder_info import DecoderInfo, shape_of
from pliant.models.decoder_shape import DecoderShape
from pliant.models.encoder_info import EncoderInfo
from pliant.models.vision_info import VisionInfo, read_vision
from pliant.policies.cascade.candidates import Candidate
from pliant.sampling import Sampling
from pliant.torchvision_ops import declare

LABELS = ("no", "perhaps", "yes")
TEXT_TOKENS, CHAT_TOKENS, MOST_ANSWER = 2_048, 8_192, 16
_TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}<|start|>"
_DECODER = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": CHAT_TOKENS,
}
_CANDIDATE: Mapping[str, Any] = {
    "levels": ("small", "large"),
    "cutoffs": (1.0,),
    "alphas": (0.5,),
    "temperatures": (1.0, 1.0),
    "weights": ((1.0,), (0.5, 0.5)),
    "slope": 10.0,
    "shares": (0.0, 1.0),
    **dict.fromkeys(("accuracy", "accuracy_error", "loss", "loss_error", "early_accuracy_gap"), 0.0),
    **dict.fromkeys(("mean_latency_s", "p75_latency_s", "p99_latency_s"), 0.01),
}


_LABELS = EncoderInfo("classify", LABELS, TEXT_TOKENS, pairs=False, scores="softmax", vocabulary=300)
_SCORES = replace(_LABELS, labels=("suits",), pairs=True, scores="sigmoid")
_VECTORS = replace(_LABELS, task="embed", labels=(), scores="none", dimensions=8, prompts={"query": "a "})


class House:
    """Its folders are below `folder`; `adapters` and `tasks` are where clients may load from."""

    def __init__(self, folder: Path) -> None:
        self.adapters, self.tasks = folder / "adapters", folder / "tasks"
        for each in (self.adapters, self.tasks):
            each.mkdir()
        self.decoder, self.backbone = _decoder(folder / "decoder"), _backbone(folder / "backbone")
        self._folder = folder

    async def gateway(self) -> FastAPI:
        """Its HTTP application, once its registries are open."""
        config, gateway = self._config(), GatewayConfig()
        registries = AdapterRegistry(config), TaskRegistry(config)
        for registry in registries:
            await registry.started()
        adapters, tasks = AdapterFollower(_ask(registries[0])), TaskFollower(_ask(registries[1]))
        self._following = [asyncio.create_task(each.run()) for each in (adapters, tasks)]
        await adapters.catch_up()
        await tasks.catch_up()
        small, large = (_encoder(name, self._folder, _LABELS) for name in ("small", "large"))
        choice = Choice(Candidate(**_CANDIDATE), None, (0.001, 0.01), 500)
        cascade = CascadeConfig(kind="cascade", levels=("small", "large"), data="d", accuracy_loss=0.01, degrade=True)
        endpoints: dict[tuple[str, Answers], Any] = {
            ("small", "texts"): small,
            ("large", "texts"): large,
            ("both", "texts"): CascadeClassifier(
                "both",
                cascade,
                {"small": small, "large": large},
                lambda: Chosen("both", "serves", choice),
                _Uncounted(),
            ),
            ("vectors", "texts"): _encoder("vectors", self._folder, _VECTORS),
            ("scores", "texts"): _encoder("scores", self._folder, _SCORES),
            ("entities", "texts"): _encoder("entities", self._folder, replace(_LABELS, task="tokens")),
            ("chat", "prompts"): _language_model(self._folder, self.decoder),
            ("digits", "images"): _vision(self.backbone, gateway, tasks),
        }
        services = [Service(name, kind, kind) for name, kind in endpoints]
        for service, endpoint in zip(services, endpoints.values(), strict=True):
            service.open(endpoint)
        known = Services(services, patience_s=0)
        followers: dict[str, Any] = {"llm": adapters, "vision": tasks}
        routers = [
            router
            for name, kind in kinds.loaded().items()
            for router in kind.routers(known, followers.get(name), gateway)
        ]
        return application(gateway, known, dict, bytes, routers)

    def _config(self) -> ServingConfig:
        adapters = {"roots": [str(self.adapters)]}
        chat = {"kind": "llm", "model": str(self._folder / "decoder"), "max_length": 64, "adapters": adapters}
        tasks = {"roots": [str(self.tasks)]}
        digits = {"kind": "vision", "model": str(self._folder / "backbone"), "tasks": tasks}
        state = self._folder / "state"
        state.mkdir()
        return kinds.parse({"services": {"chat": chat, "digits": digits}, "state": str(state)})


class _Uncounted:
    """A recorder of any kind."""

    def __getattr__(self, _event: str) -> Callable[..., None]:
        return lambda *_what: None


class _Replica:
    """Answers at once; the transport and the streams of a `Caller`."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer

    async def one(self, parcel: Parcel[Any]) -> Any:
        await asyncio.sleep(0)
        return self._answer(parcel.queries[0])

    async def several(self, parcel: Parcel[Any]) -> AsyncGenerator[Sequence[tuple[int, Any]], None]:
        await asyncio.sleep(0)
        yield [(index, self._answer(query)) for index, query in enumerate(parcel.queries)]

    async def pieces(self, parcel: Parcel[Generation]) -> AsyncGenerator[Piece, None]:
        (generation,) = parcel.queries
        scores = _rows(generation.prompt[1:], generation.prompt_logprobs)
        for index in range(generation.max_tokens):
            await asyncio.sleep(0)
            wanted = _rows((65,), generation.sampling.logprobs)
            finish: Literal["length"] | None = "length" if index + 1 == generation.max_tokens else None
            yield Piece((65,), "a", wanted, finish, prompt_logprobs=None if index else scores)


def _rows(tokens: Sequence[int], alternatives: int | None) -> tuple[TokenLogprobs, ...] | None:
    if alternatives is None:
        return None
    return tuple(TokenLogprobs(token, -0.5, (66,) * alternatives, (-1.0,) * alternatives, 1) for token in tokens)


def _way(chooser: Chooser[Any, Any], report: Any, answer: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The table of one replica, and its caller."""
    table: ReplicaTable[Any, Any] = ReplicaTable(chooser)
    replica = _Replica(answer)
    courier: Courier[Any, Any] = Courier(table.gateway, replica)
    table.sync({"replica": {"version": 0, "held": {}, "served": 0, **report}})
    return table, Caller(table, _Uncounted(), courier, replica.pieces)


def _encoder(name: str, folder: Path, info: EncoderInfo) -> Any:
    words = {f"##{letter}": index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz", 100)}
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece({**dict(zip(special, range(4), strict=True)), "a": 9, **words}))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens([*special])
    (folder / name).mkdir()
    tokenizer.save(str(folder / name / "tokenizer.json"))
    chooser = EncoderChooser(1.0)
    point = (TEXT_TOKENS, 0.001, 0.001)

    def answer(query: texts.Query) -> texts.Answer:
        numbers = (info.dimensions or len(info.labels)) * (query.length if info.task == "tokens" else 1)
        logits = np.linspace(0, 1, numbers, dtype="<f4").tobytes()
        weights = np.linspace(0, 1, query.length, dtype="<f4").tobytes() if query.importance_request else b""
        return texts.Answer(logits, TEXT_TOKENS, query.length, weights)

    table, caller = _way(chooser, {"max_length": TEXT_TOKENS, "service_s": 0.001, "curve": (point,)}, answer)
    replicas = ReplicaRange(min=1, max=1)
    config = EncoderConfig(
        kind="encoder", model=name, lengths=(TEXT_TOKENS,), replicas=replicas, truncate=name == "large"
    )
    return ENDPOINTS[info.task](name, config, folder / name, info, chooser, table, caller, _Uncounted())


def _language_model(folder: Path, shape: DecoderShape) -> LanguageModel:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|start|>", "<|end|>")])
    (folder / "chat").mkdir()
    tokenizer.save(str(folder / "chat" / "tokenizer.json"))
    table, caller = _way(LeastHeld(), {"max_length": CHAT_TOKENS}, lambda query: query)
    info = DecoderInfo(shape, (), _TEMPLATE, {}, Sampling())
    config = LlmConfig(kind="llm", model="chat", max_tokens=MOST_ANSWER)
    return LanguageModel("chat", config, folder / "chat", info, table, caller, _Uncounted())


def _vision(info: VisionInfo, gateway: GatewayConfig, tasks: TaskFollower) -> VisionClassifier:
    def answer(query: images.Query) -> images.Answer:
        return images.Answer(np.zeros(query.task.labels, dtype="<f4").tobytes(), 0, "in_time", 1)

    table, caller = _way(LeastHeld(), {}, answer)
    config = VisionConfig(kind="vision", model="digits")
    return VisionClassifier("digits", config, info, gateway.max_megapixels, tasks, table, caller, _Uncounted())


def _decoder(folder: Path) -> DecoderShape:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_DECODER))
    return shape_of(_DECODER, str(folder))


def _backbone(folder: Path) -> VisionInfo:
    declare()
    import timm
    from timm.models import save_for_hf

    sizes: Any = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    save_for_hf(model, str(folder), safe_serialization=True)
    return read_vision(folder)


def _ask(registry: AdapterRegistry | TaskRegistry) -> Any:
    part: CatalogPart[Any] = CatalogPart(registry)

    async def ask(method: str, *what: Any) -> Any:
        return await getattr(part, method)(*what)

    return ask
