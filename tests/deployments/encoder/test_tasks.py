"""Whatever an encoder is for: what is answered is what transformers' own pipelines answer, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.doubles import Sleepers
from support.encoder_models import KINDS, WITH_TYPES, EncoderService, save, save_pooling
from support.tiny_classifiers import read

from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.messages import Answer, Query
from pliant.deployments.http.parameters import ClassifyParameters, EmbedParameters, TagParameters
from pliant.deployments.http.texts import Input, Pair, TokenIds
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.kernels.encoder import compiled_classifier, packed_runtime
from pliant.torchvision_ops import declare

declare()
from transformers import AutoTokenizer, pipeline  # noqa: E402

TEXT = "Berlin is in Germany, the cats sat on a great mat."
PAIRS = [Pair("the cat sat", "on a mat"), Pair("Berlin is great", "the cat"), Pair("a", "the cat sat on a mat .")]
PLAIN = ClassifyParameters()


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification", "regression"])
@pytest.mark.parametrize("kind", KINDS)
async def test_labels_of_texts_and_of_pairs(kind: str, problem: str, tmp_path: Path) -> None:
    labels = {"num_labels": 1} if problem == "regression" else {}
    save(tmp_path, kind, "classify", problem_type=problem, **labels)
    theirs = pipeline("text-classification", model=str(tmp_path), device="cpu")
    texts: list[Input] = [TEXT, *PAIRS]
    found = await EncoderService(tmp_path).classifier.classify(texts, PLAIN)
    for text, ours in zip(texts, found, strict=True):
        given: Any = {"text": text.first, "text_pair": text.second} if isinstance(text, Pair) else text
        said = theirs(given, top_k=None)
        assert ours.labels == [each["label"] for each in said]
        assert ours.scores == pytest.approx([each["score"] for each in said], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_model_of_one_label_scores_pairs_by_what_its_config_says(kind: str, tmp_path: Path) -> None:
    sbert = {"activation_fn": "torch.nn.modules.linear.Identity"}
    save(tmp_path, kind, "classify", num_labels=1, sentence_transformers=sbert)
    service = EncoderService(tmp_path)
    found = await service.classifier.relevance(PAIRS, PLAIN)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = read(tmp_path)
    for pair, ours in zip(PAIRS, found, strict=True):
        inputs = tokenizer(pair.first, pair.second, return_tensors="pt")
        with torch.inference_mode():
            assert ours.score == pytest.approx(model(**inputs).logits.item(), abs=1e-5)
        assert ours.tokens == inputs["input_ids"].shape[1]
    assert any(query.types for query in service.queries) == (kind in WITH_TYPES)


async def test_a_model_that_chooses_does_not_score_pairs(tmp_path: Path) -> None:
    service = EncoderService(save(tmp_path, "bert", "classify"))
    with pytest.raises(RequestError, match="chooses among 3 labels") as refused:
        await service.classifier.relevance(PAIRS, PLAIN)
    assert refused.value.outcome is Outcome.REJECTED


@pytest.mark.parametrize("names", [["contradiction", "neutral", "entailment"], ["ENTAILMENT", "not_entailment"]])
@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
async def test_zero_shot(kind: str, many: bool, names: list[str], tmp_path: Path) -> None:
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}
    save(tmp_path, kind, "classify", type_vocab_size=2 if kind == "bert" else 1, num_labels=len(names), **labels)
    theirs = pipeline("zero-shot-classification", model=str(tmp_path), device="cpu")
    classifier = EncoderService(tmp_path).classifier
    for candidates in (["cat", "mat", "berlin"], ["great"]):
        template = "{} is in the mat ."
        asked = ClassifyParameters(candidate_labels=candidates, hypothesis_template=template, multi_label=many)
        [found] = await classifier.classify([TEXT], asked)
        said = theirs(TEXT, candidates, hypothesis_template=template, multi_label=many)
        assert found.labels == said["labels"]
        assert found.scores == pytest.approx(said["scores"], abs=1e-5)


async def test_only_models_of_inference_take_labels_of_others(tmp_path: Path) -> None:
    service = EncoderService(save(tmp_path, "bert", "classify"))
    with pytest.raises(RequestError, match=r"no label that begins with 'entail'.*; it has LABEL_0, LABEL_1, LABEL_2"):
        await service.classifier.classify([TEXT], ClassifyParameters(candidate_labels=["a"]))


@pytest.mark.parametrize("words_known", [True, False])
@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "deberta-v2"])
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
async def test_entities(kind: str, strategy: Any, words_known: bool, tmp_path: Path) -> None:
    names = ["O", "B-LOC", "I-LOC"]
    save(tmp_path, kind, "tokens", words_known, id2label=dict(enumerate(names)))
    theirs = pipeline("token-classification", model=str(tmp_path), device="cpu", aggregation_strategy=strategy)
    service = EncoderService(tmp_path)
    told = 0
    for ignored in (["O"], []):
        for text in (TEXT, "the cat", "Berlin sat  in ☃ a bermat ."):
            said = theirs(text, ignore_labels=ignored)
            [found] = await service.classifier.tag(
                [text], TagParameters(aggregation_strategy=strategy, ignore_labels=ignored)
            )
            told += len(said)
            key = "entity" if strategy == "none" else "entity_group"
            assert [(each.label, each.word, each.start, each.end, each.index) for each in found.entities] == [
                (each[key], each["word"], each["start"], each["end"], each.get("index")) for each in said
            ]
            assert [each.score for each in found.entities] == pytest.approx([each["score"] for each in said], abs=1e-5)
    assert told


def mean_of(folder: Path, text: str) -> Any:
    """The mean of transformers' states of a text's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        return read(folder, "embed")(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()


@pytest.mark.parametrize("kind", KINDS)
async def test_embeddings(kind: str, tmp_path: Path) -> None:
    save(tmp_path, kind, "embed")
    save_pooling(tmp_path, "mean", False, prompts={"query": "a great ", "document": "the "})
    embedder = EncoderService(tmp_path).classifier
    plain = mean_of(tmp_path, TEXT)
    [found] = await embedder.embed([TEXT], EmbedParameters())
    np.testing.assert_allclose(found.vector, plain, atol=1e-5)
    [short] = await embedder.embed([TEXT], EmbedParameters(dimensions=5))
    np.testing.assert_allclose(short.vector, plain[:5], atol=1e-5)
    [unit] = await embedder.embed([TEXT], EmbedParameters(dimensions=5, normalize=True))
    np.testing.assert_allclose(unit.vector, plain[:5] / np.linalg.norm(plain[:5]), atol=1e-5)
    [asked] = await embedder.embed(["cat"], EmbedParameters(prompt_name="query"))
    np.testing.assert_allclose(asked.vector, mean_of(tmp_path, "a great cat"), atol=1e-5)
    ids = AutoTokenizer.from_pretrained(tmp_path)(TEXT)["input_ids"]
    [again] = await embedder.embed([TokenIds(ids)], EmbedParameters())
    np.testing.assert_allclose(again.vector, plain, atol=1e-5)
    assert again.tokens == found.tokens == len(ids)


@pytest.mark.parametrize("lowercase", [True, False])
async def test_texts_are_made_lower_case_if_the_model_s_folder_says_so(lowercase: bool, tmp_path: Path) -> None:
    folder = save_pooling(save(tmp_path, "bert", "embed", words_known=False), "mean", False)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": lowercase}))
    [found] = await EncoderService(folder).classifier.embed(["The CAT"], EmbedParameters())
    np.testing.assert_allclose(found.vector, mean_of(folder, "the cat" if lowercase else "The CAT"), atol=1e-5)
    assert not np.allclose(mean_of(folder, "the cat"), mean_of(folder, "The CAT"), atol=1e-5)


async def test_vectors_of_a_normalized_model_have_the_length_1_however_short(tmp_path: Path) -> None:
    embedder = EncoderService(save_pooling(save(tmp_path, "bert", "embed"), "cls", True)).classifier
    for size in (None, 1, 7, 32):
        [found] = await embedder.embed([TEXT], EmbedParameters(dimensions=size))
        assert len(found.vector) == (size or 32)
        assert np.linalg.norm(found.vector) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("measure", ["cosine", "dot", "euclidean", "manhattan"])
async def test_what_makes_vectors_compares_queries_with_documents(measure: str, tmp_path: Path) -> None:
    save_pooling(
        save(tmp_path, "bert", "embed"),
        "mean",
        False,
        prompts={"query": "a great ", "document": "the "},
        similarity_fn_name=measure,
    )
    service = EncoderService(tmp_path)
    pairs = [Pair("cat", "mat"), Pair("cat", "berlin"), Pair("cat", "mat")]
    found = await service.classifier.relevance(pairs, PLAIN)
    assert len(service.queries) == 3  # each text once
    assert sum(each.tokens for each in found) == sum(query.length for query in service.queries)
    for pair, ours in zip(pairs, found, strict=True):
        one, other = mean_of(tmp_path, f"a great {pair.first}"), mean_of(tmp_path, f"the {pair.second}")
        wanted = {
            "cosine": one @ other / np.linalg.norm(one) / np.linalg.norm(other),
            "dot": one @ other,
            "euclidean": -np.sqrt(((one - other) ** 2).sum()),
            "manhattan": -np.abs(one - other).sum(),
        }
        assert ours.score == pytest.approx(wanted[measure], abs=1e-4)


@pytest.mark.parametrize(
    ("texts", "parameters", "why"),
    [
        (["a"], EmbedParameters(dimensions=33), "dimensions: got 33; embeddings of m have 32"),
        (["a"], EmbedParameters(prompt_name="x"), "prompt_name: got 'x'; prompts of m: query"),
        ([Pair("a", "b")], EmbedParameters(), "embeds single texts"),
        ([TokenIds([2, 99])], EmbedParameters(), "token ids of m are 0 to 98; got 2 to 99"),
        ([TokenIds([2] * 65)], EmbedParameters(), "text of 65 tokens; m takes at most 64"),
        (["cat " * 63], EmbedParameters(truncate=False), "text of 65 tokens"),
    ],
)
async def test_what_cannot_be_embedded_is_refused(
    texts: list[Input], parameters: EmbedParameters, why: str, tmp_path: Path
) -> None:
    save_pooling(save(tmp_path, "bert", "embed"), "mean", False, prompts={"query": "q"})
    service = EncoderService(tmp_path, truncate=parameters.truncate is False)
    with pytest.raises(RequestError, match=why) as refused:
        await service.classifier.embed(texts, parameters)
    assert refused.value.outcome is Outcome.REJECTED
    assert not service.queries


async def test_texts_are_cut_where_the_service_or_the_request_says_so(tmp_path: Path) -> None:
    save_pooling(save(tmp_path, "bert", "embed"), "mean", False)
    embedder = EncoderService(tmp_path).classifier
    long: list[Input] = ["cat " * 100, TokenIds([2, *([8] * 100)])]
    for found in await embedder.embed(long, EmbedParameters(truncate=True)):
        assert found.tokens == 64
        assert "text cut to the first 64 of 10" in str(found.warning)


async def test_a_pair_is_cut_where_it_is_longest(tmp_path: Path) -> None:
    save(tmp_path, "bert", "classify", num_labels=1)
    service = EncoderService(tmp_path, truncate=True)
    pair = Pair("cat " * 100, "mat")
    [found] = await service.classifier.relevance([pair], PLAIN)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer(*pair, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        assert found.score == pytest.approx(torch.sigmoid(read(tmp_path)(**inputs).logits).item(), abs=1e-5)
    assert found.tokens == 64


class _Uncompiled(Sleepers):
    """Runtimes of one model as a replica has them at first."""

    def __init__(self, folder: Path) -> None:
        super().__init__(lengths=(64,))
        self._folder = folder

    def load(self, max_length: int) -> Any:
        return compiled_classifier.load(self._folder, max_length, compiling=False)


@pytest.mark.parametrize("task", ["classify", "tokens", "embed"])
async def test_a_replica_answers_whatever_its_model_is_for(task: str, tmp_path: Path) -> None:
    engine = Engine(_Uncompiled(save(tmp_path, "bert", task)))
    await engine.hold(64)
    ids, types = np.array([2, 8, 9, 3, 10, 3], "<i4"), np.array([0, 0, 0, 0, 1, 1], "u1")
    wanted = packed_runtime.load(tmp_path, 64)
    for given in (types, None):
        answer = await engine.infer(Query(ids.tobytes(), 6, None, 1.0, types=b"" if given is None else given.tobytes()))
        assert isinstance(answer, Answer)
        np.testing.assert_allclose(np.frombuffer(answer.logits, "<f4"), wanted(ids, given).flatten(), atol=1e-5)
    assert np.abs(wanted(ids, types) - wanted(ids)).max() > 1e-3
