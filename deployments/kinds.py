"""The kinds of service that there are; the only list of them."""

from pliant.config.base import ServiceConfig
from pliant.config.cascade import CascadeConfig
from pliant.config.cluster import Reader
from pliant.config.encoder import EncoderConfig
from pliant.config.llm import LlmConfig
from pliant.config.vision import VisionConfig

CONFIGS: tuple[type[ServiceConfig], ...] = (EncoderConfig, LlmConfig, VisionConfig, CascadeConfig)

_reader = Reader(CONFIGS)
parse = _reader.parse
read = _reader.read
