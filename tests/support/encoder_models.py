"""Tiny random encoders with tokenizers, as whole folders, and services of them without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from support import tiny_classifiers
from support.scripted_replicas import ANSWERS
from support.text_service import TextService
from support.tiny_classifiers import PAD
from support.waiting import PATIENT_MS
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pliant.deployments.encoder.kind import ENDPOINTS
from pliant.deployments.encoder.messages import Answer, Query
from pliant.kernels.encoder import packed_runtime
from pliant.models.encoder_info import read_encoder

KINDS = ("bert", "roberta", "distilbert", "electra", "mpnet", "deberta-v2", "modernbert")
WITH_TYPES = ("bert", "electra")
"""Those that tell the two texts of a pair apart."""
_SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
_PIECES = "a b c the cat sat on mat ber lin is in germ any . , great ü"
_WORDS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *_PIECES.split(" ")]


def save_tokenizer(folder: Path, types: bool, words_known: bool = True) -> None:
    """WordPiece, or pieces that do not say where words begin."""
    pieces = [*_WORDS, *(f"##{piece}" for piece in ("lin", "any", "s", "er"))] if words_known else ["▁", *_WORDS]
    if words_known:
        vocabulary = {piece: index for index, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
        tokenizer.decoder = decoders.WordPiece()  # type: ignore[assignment]
    else:
        pieces = [*_WORDS, *(f"▁{piece}" for piece in _WORDS[4:])]
        tokenizer = Tokenizer(models.Unigram([(piece, -float(len(piece) < 2)) for piece in pieces], unk_id=0))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
        tokenizer.decoder = decoders.Metaspace()  # type: ignore[assignment]
    assert pieces[PAD] == "[PAD]"
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # type: ignore[assignment]
    from transformers import PreTrainedTokenizerFast

    names = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, model_input_names=names, **_SPECIAL)
    fast.save_pretrained(folder)


def save(folder: Path, kind: str, task: str, words_known: bool = True, **options: Any) -> Path:
    """`folder`, with a random encoder of that model type for `task` (see `tiny_classifiers`) and its tokenizer."""
    tiny_classifiers.save(folder, kind, task, **options)
    save_tokenizer(folder, kind in WITH_TYPES, words_known)
    return folder


def save_pooling(folder: Path, pooling: str, normalized: bool, **settings: Any) -> Path:
    """Make the encoder in `folder` a sentence-transformers model; `settings` are of its own file."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalized else [])]
    module = "sentence_transformers.models"
    listed = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"{module}.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


class EncoderService(TextService):
    """A service of the model in `folder`, whose one replica computes in the test's process."""

    def __init__(self, folder: Path, name: str = "m", **options: Any) -> None:
        info = read_encoder(folder)
        runtime = packed_runtime.load(folder, info.max_length, threads=1)

        def answer(query: Query) -> Answer:
            ids = np.frombuffer(query.ids, "<i4")
            types = np.frombuffer(query.types, "u1") if query.types else None
            return Answer(runtime(ids, types).astype("<f4").tobytes(), info.max_length, len(ids))

        patient = {"slo_ms": PATIENT_MS, **options}
        endpoint = ENDPOINTS[info.task]
        super().__init__(
            folder, {"r": [ANSWERS]}, name, answer, held=info.max_length, info=info, endpoint=endpoint, **patient
        )
