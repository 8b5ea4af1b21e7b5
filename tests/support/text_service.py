"""A classifier service as a gateway has it, over replicas that follow scripts: without Ray, and without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.call_path import CallPath, Recorder
from support.doubles import report
from support.scripted_replicas import Act, ScriptedReplicas
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.errand import TextWant
from pliant.deployments.encoder.messages import Answer, Query, Report
from pliant.deployments.encoder.reading import Reader
from pliant.models.encoder_info import EncoderInfo, Scores

LOGITS = np.array([0.0, 2.0, 1.0], dtype=np.float32)
ANSWER = Answer(LOGITS.tobytes(), 8, 8)


def save_tokenizer(folder: Path) -> Path:
    """One that gives each word a token, and each text two more."""
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class TextRecorder(Recorder):
    def arrived(self, tokens: int) -> None:
        self.events.append(("arrived", tokens))

    def answered(self, seconds: float, slo_s: float, tokens: int, answer: Answer) -> None:
        self.events.append(("answered", answer.max_length, tokens, seconds <= slo_s))

    def shed(self) -> None:
        self.events.append("shed")


class TextService(CallPath[TextWant, Query, Answer, Report, TextRecorder]):
    """`replicas` follow `scripts`; each reports `held` tokens that take `service_s`, and answers with `answer`."""

    def __init__(
        self,
        folder: Path,
        scripts: Mapping[str, Sequence[Act]],
        name: str = "topics",
        answer: Callable[[Query], Answer] = lambda _query: ANSWER,
        labels: tuple[str, ...] = ("x", "y", "z"),
        held: int = 8,
        service_s: float = 0.005,
        info: EncoderInfo | None = None,
        endpoint: type[Reader] = Classifier,
        **options: Any,
    ) -> None:
        scores: Scores = "softmax" if len(labels) > 1 else "sigmoid"
        info = info or EncoderInfo("classify", labels, held, pairs=False, scores=scores, vocabulary=6)
        config = EncoderConfig(kind="encoder", model="m", lengths=(held,), replicas={"min": 1, "max": 1}, **options)
        self.chooser = EncoderChooser(config.slo_ms / 1e3)
        self.replicas = ScriptedReplicas(scripts, answer, on_death=lambda replica: self.table.lose(replica))
        super().__init__(self.chooser, self.replicas, TextRecorder())
        made = endpoint(name, config, folder, info, self.chooser, self.table, self.caller, self.recorder)
        self.classifier: Any = made
        """Whatever answers; a classifier if no other is given."""
        self.table.sync({replica: report(held, service_s=service_s) for replica in scripts})

    @property
    def queries(self) -> list[Query]:
        """All that were sent, in order."""
        return [query for parcel in self.replicas.parcels for query in parcel.queries]
