"""How a profile reaches its levels: through replicas that may fail, or in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.doubles import Sleeper, Sleepers, report
from support.scripted_cascade import LABELS, TOO_LONG, Levels, Model, Service, texts
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pliant.config.cascade import CascadeConfig
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade import local
from pliant.deployments.cascade.levels import ClassifierReader, levels_of, run_on
from pliant.deployments.cascade.local import attention_agreements, local_classifiers
from pliant.deployments.cascade.profile import profile
from pliant.deployments.cascade.readings import Level, UnreadableError
from pliant.deployments.encoder.computing import Runtime
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.torchvision_ops import declare
from pliant.training.labelled_texts import sample

declare()
from transformers import BertConfig, BertForSequenceClassification  # noqa: E402

ENCODER = EncoderConfig(kind="encoder", model="m", lengths=(4, 64), replicas={"min": 1, "max": 1}, importance=True)


def reader(service: Service, patience_s: float = 20.0) -> ClassifierReader:
    classifiers: Any = {"small": service}
    return ClassifierReader(classifiers, {"small": "fp_new"}, patience_s)


async def test_a_latency_that_tells_nothing_is_measured_again() -> None:
    service = Service(Model("small", 1.0, 0.001))
    read, calls = service.read, 0

    async def recovers(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        service.interrupted, service.waited_s = calls == 1, float(calls == 2)
        return await read(*given, **options)

    service.read = recovers  # type: ignore[method-assign]
    seen = await reader(service).read("small", "w1 yes t1", True)
    assert calls == 3
    assert seen.importance is not None
    assert seen.seconds == 0.003
    assert service.calls[-1][1] is None


async def test_what_a_level_cannot_take_and_what_it_cannot_do_now_differ() -> None:
    service = Service(Model("small", 1.0, 0.001))
    with pytest.raises(UnreadableError, match="too long"):
        await reader(service).read("small", "no " * TOO_LONG + "t1", False)
    service.fails = RequestError(Outcome.UNAVAILABLE, "gone")
    with pytest.raises(RequestError, match="gone"):
        await reader(service, patience_s=0.0).read("small", "no t1", False)


async def test_what_another_version_of_the_model_has_read_is_read_again() -> None:
    service = Service(Model("small", 1.0, 0.001))
    read = service.read

    async def replaced(*given: Any, **options: Any) -> Any:
        found = await read(*given, **options)
        return replace(found, revision="fp_old" if len(service.calls) < 3 else "fp_new")

    service.read = replaced  # type: ignore[method-assign]
    await reader(service).read("small", "w1 yes t1", False)
    assert len(service.calls) == 3
    service.calls.clear()
    with pytest.raises(RequestError, match="small is answered by fp_old, another version of its model"):
        await reader(service, patience_s=0.0).read("small", "w1 yes t1", False)


def test_levels_tell_only_where_the_cascade_prunes() -> None:
    config = CascadeConfig(kind="cascade", levels=("a", "b"), data="d", accuracy_loss=0.01)
    encoders = {"a": ENCODER, "b": ENCODER.model_copy(update={"importance": False})}
    classifiers: Any = {"a": Service(Model("a", 1.0, 0.1)), "b": Service(Model("b", 1.0, 0.1))}
    assert levels_of(config, encoders, classifiers) == [Level("a", LABELS, True), Level("b", LABELS, False)]
    whole = config.model_copy(update={"prune": False})
    assert not any(level.importance for level in levels_of(whole, encoders, classifiers))


def test_what_replicas_run_on_names_processors_too() -> None:
    here, there, starting = report(8), report(8), report(0)
    there["device"], starting["backend"] = "another", ""
    assert run_on([here, there, here, starting]) == ["aoti on a processor", "aoti on another"]
    assert run_on([starting]) == []


class Teller(Sleeper):
    def with_importance(
        self, ids: np.ndarray | Sequence[int], types: object, wanted: Callable[[np.ndarray], bool]
    ) -> SimpleNamespace:
        logits = self(ids)
        assert wanted(logits)
        return SimpleNamespace(logits=logits, importance=np.arange(len(ids), dtype=np.float32), importance_s=100.0)


class Tellers(Sleepers):
    def load(self, max_length: int) -> Runtime:
        return Teller(max_length, service_s=0.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model that is not trained."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *LABELS, *(f"w{number}" for number in range(10))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(vocab_size=len(words), id2label=dict(enumerate(LABELS)), max_position_embeddings=64, **shape)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    monkeypatch.setattr(local.sources, "fetch", lambda _model: tmp_path)
    return tmp_path


async def test_levels_can_be_in_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "ModelRuntimes", lambda _config: Tellers(lengths=(4, 64)))
    told: list[str] = []
    classifiers, found_on = await local_classifiers({"a": ENCODER}, lambda text, _done: told.append(text))
    assert (found_on, told) == ({"a": ["sleeper on a bed"]}, ["loading the runtimes of a"])
    assert classifiers["a"].labels == list(LABELS)
    found = await ClassifierReader(classifiers).read("a", "w1 w2 yes", True)
    assert found.logits.tolist() == [5, 1]
    assert found.importance is not None
    assert found.importance.tolist() == [0, 1, 2, 3, 4]
    assert found.importance_s == 100
    assert found.seconds < 0  # as if it had not taken them
    short = await ClassifierReader(classifiers).read("a", "yes", False)
    assert short.logits.tolist() == [3, 1]


async def test_a_level_that_does_not_tell_is_compared_all_the_same(folder: Path) -> None:
    levels = Levels(Model("small", 0.85, 0.001), Model("large", 0.97, 0.01))
    told = [Level("small", LABELS, True), Level("large", LABELS, False)]
    found = await profile(levels, told, sample(texts(300), 0), 0, False, lambda _text, _done: None)
    assert not found.table.agreements
    [same] = attention_agreements(found, "large", ENCODER).table.agreements
    assert (same.pruner, same.reader) == ("small", "large")
    assert 0 < same.texts <= 100
    assert attention_agreements(found, "small", ENCODER) is found
