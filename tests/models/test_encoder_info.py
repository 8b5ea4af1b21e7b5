"""What is served of an encoder is found in its folder: task, labels, limits, prompts and how scores are made."""

import json
from pathlib import Path
from typing import Any

import pytest

from pliant.errors import ModelError
from pliant.models.encoder_info import read_encoder

BERT = {"model_type": "bert", "max_position_embeddings": 512, "type_vocab_size": 2}
CLASSIFIER = {**BERT, "architectures": ["BertForSequenceClassification"]}
LABELS = {"id2label": {"1": "bad", "0": "good"}}


def save(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("more", "labels", "scores"),
    [
        (LABELS, ("good", "bad"), "softmax"),
        ({**LABELS, "problem_type": "multi_label_classification"}, ("good", "bad"), "sigmoid"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "none"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0",),
            "none",
        ),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            ("LABEL_0",),
            "sigmoid",
        ),
    ],
    ids=str,
)
def test_classifiers(more: dict[str, Any], labels: tuple[str, ...], scores: str, tmp_path: Path) -> None:
    info = read_encoder(save(tmp_path, CLASSIFIER | more))
    assert (info.task, info.labels, info.scores, info.max_length) == ("classify", labels, scores, 512)
    assert info.pairs
    assert info.scores_pairs == (len(labels) == 1)


def test_a_model_that_labels_tokens(tmp_path: Path) -> None:
    info = read_encoder(save(tmp_path, {**BERT, **LABELS, "architectures": ["BertForTokenClassification"]}))
    assert (info.task, info.labels, info.scores, info.scores_pairs) == ("tokens", ("good", "bad"), "softmax", False)


def test_token_types_are_given_where_both_tokenizer_and_model_know_of_them(tmp_path: Path) -> None:
    names = ["input_ids", "attention_mask"]
    assert not read_encoder(save(tmp_path, CLASSIFIER, tokenizer_config={"model_input_names": names})).pairs
    assert read_encoder(
        save(tmp_path, CLASSIFIER, tokenizer_config={"model_input_names": [*names, "token_type_ids"]})
    ).pairs


def test_embeddings_with_prompts(tmp_path: Path) -> None:
    settings = {
        "prompts": {"query": "query: ", "passage": "passage: "},
        "default_prompt_name": "passage",
        "similarity_fn_name": "dot",
    }
    folder = save(
        tmp_path,
        {
            "architectures": ["XLMRobertaModel"],
            "model_type": "xlm-roberta",
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
        },
        config_sentence_transformers=settings,
    )
    info = read_encoder(folder)
    assert (info.task, info.labels, info.scores, info.max_length) == ("embed", (), "none", 512)
    assert (info.prompts["query"], info.default_prompt, info.similarity) == ("query: ", "passage: ", "dot")
    assert not info.pairs


@pytest.mark.parametrize("said", [True, False])
def test_texts_are_made_lower_case_where_sentence_transformers_does_so(said: bool, tmp_path: Path) -> None:
    assert read_encoder(save(tmp_path, CLASSIFIER, sentence_bert_config={"do_lower_case": said})).lowercase is said


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, 512),
        ({"sentence_bert_config": {"max_seq_length": 128}}, 128),
        ({"tokenizer_config": {"model_max_length": 256}}, 256),
        ({"tokenizer_config": {"model_max_length": int(1e30)}, "sentence_bert_config": {"max_seq_length": None}}, 512),
    ],
    ids=str,
)
def test_the_least_limit_counts(files: dict[str, Any], most: int, tmp_path: Path) -> None:
    assert read_encoder(save(tmp_path, CLASSIFIER, **files)).max_length == most


@pytest.mark.parametrize(
    ("config", "files", "reason"),
    [
        ({**BERT, "architectures": ["BertForQuestionAnswering"]}, {}, "its architecture is BertForQuestionAnswering"),
        ({"architectures": ["BertModel"]}, {}, "no max_position_embeddings"),
        (CLASSIFIER, {"config_sentence_transformers": {"default_prompt_name": "q"}}, "none of its prompts"),
        (CLASSIFIER | {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, {}, "Tanh makes its scores"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_cannot_be_served_is_refused(
    config: dict[str, Any], files: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        read_encoder(save(tmp_path, config, **files))


@pytest.mark.parametrize("padding", [{"pad_token_id": 1}, {}])
def test_roberta_loses_the_positions_up_to_its_padding(tmp_path: Path, padding: dict[str, int]) -> None:
    config = {"architectures": ["RobertaForSequenceClassification"], "model_type": "roberta", **padding}
    assert read_encoder(save(tmp_path, {**config, "max_position_embeddings": 514})).max_length == 512


@pytest.mark.parametrize(
    ("changes", "chooses"),
    [
        ({}, True),
        ({"problem_type": "multi_label_classification"}, False),
        ({"id2label": {"0": "relevant"}}, False),
        ({"id2label": None, "num_labels": 1}, False),
    ],
)
def test_a_model_chooses_among_labels_that_exclude_each_other(
    tmp_path: Path, changes: dict[str, Any], chooses: bool
) -> None:
    assert read_encoder(save(tmp_path, {**CLASSIFIER, **LABELS, **changes})).chooses == chooses


def test_labels_come_in_the_order_of_the_outputs(tmp_path: Path) -> None:
    labels = {str(index): f"label {index}" for index in range(12)}
    found = read_encoder(save(tmp_path, {**CLASSIFIER, "id2label": labels}))
    assert found.labels == tuple(labels.values())
