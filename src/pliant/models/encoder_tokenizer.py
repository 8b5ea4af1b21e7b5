"""An encoder's tokenizer, alike for all who read texts for it: gateways, profiles and trainers."""

from pathlib import Path

from tokenizers import Tokenizer, normalizers

from pliant.models import hub
from pliant.models.encoder_info import EncoderInfo


def encoder_tokenizer(folder: Path, info: EncoderInfo, longest: int | None = None) -> Tokenizer:
    """That of the encoder in `folder`, which `info` describes. It pads nothing, and cuts texts that have more than
    `longest` tokens, if that is given.
    """
    tokenizer = Tokenizer.from_file(str(folder / hub.TOKENIZER))
    if info.lowercase:
        own = tokenizer.normalizer
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([own] if own else [])])
    tokenizer.no_padding()
    if longest is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(longest)
    return tokenizer
