"""What the files beside a language model's weights say: its shape, how answers end, its chat template, its defaults.

Neither torch nor transformers is imported: the gateway uses this module.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pliant.errors import ModelError
from pliant.models.decoder_shape import DecoderShape
from pliant.sampling import Sampling


@dataclass(frozen=True)
class DecoderInfo:
    """A language model as its folder describes it."""

    shape: DecoderShape
    eos: tuple[int, ...]
    """Tokens that end an answer; () if none does."""
    chat_template: str | None
    """A jinja2 template of conversations; None if the model was not trained for them."""
    special_tokens: Mapping[str, str]
    """What chat templates know by name: bos_token, eos_token and others, as far as the tokenizer has them."""
    sampling: Sampling
    """How answers are sampled unless a request says otherwise."""

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.shape.vocab

    @property
    def max_length(self) -> int:
        """How many tokens, prompt and answer together, the model has positions for."""
        return self.shape.max_length


def read(folder: Path) -> DecoderInfo:
    """What a model's folder says.

    As elsewhere in the field, generation_config.json knows better than config.json which tokens end an answer, and its
    temperature, top_k and top_p are the defaults if it says `do_sample`. Raises ModelError.
    """
    config, generation, tokenizer = (
        read_json(folder / f"{name}.json") for name in ("config", "generation_config", "tokenizer_config")
    )
    shape = shape_of(config, str(folder))
    special_tokens = {**read_json(folder / "special_tokens_map.json"), **tokenizer}
    return DecoderInfo(
        shape=shape,
        eos=_ids(generation.get("eos_token_id")) or shape.eos,
        chat_template=_chat_template(folder, tokenizer),
        special_tokens={
            key: text for key, token in special_tokens.items() if key.endswith("_token") and (text := _text(token))
        },
        sampling=_sampling(folder, generation),
    )


def shape_of(config: Mapping[str, Any], model: str) -> DecoderShape:
    """The decoder that a config.json describes. Raises ModelError that names `model` if there is none."""
    try:
        return DecoderShape.from_config(config)
    except (ValueError, TypeError) as error:
        raise ModelError(f"{model}: its config.json is not understood: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, empty if there is no such file. Raises ModelError."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file.parent}: its {file.name} is not JSON ({error}); save the model again") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file.parent}: its {file.name} holds no JSON object; save the model again")
    return found


def _ids(found: int | list[int] | None) -> tuple[int, ...]:
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)


def _text(token: Any) -> str | None:
    """A special token's text: tokenizers save it alone, or among its properties."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _chat_template(folder: Path, tokenizer: Mapping[str, Any]) -> str | None:
    """The template in a file of its own, or else in tokenizer_config.json; of several the one named "default"."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    found = tokenizer.get("chat_template")
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}.get("default")
    return found if isinstance(found, str) else None


def _sampling(folder: Path, generation: Mapping[str, Any]) -> Sampling:
    """As transformers has it: what is a matter of chance counts only if it samples."""
    by_chance = ("temperature", "top_k", "top_p", "min_p", "typical_p") if generation.get("do_sample") else ()
    given = {key: generation.get(key) for key in (*by_chance, "repetition_penalty")}
    try:
        return Sampling(**{key: value for key, value in given.items() if value is not None})
    except (ValueError, TypeError) as error:
        raise ModelError(f"{folder}: its generation_config.json asks for what cannot be sampled: {error}") from None
