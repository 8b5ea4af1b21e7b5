"""A random Llama, many random LoRA adapters of it, and what transformers and PEFT answer with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.scripted import TOKENIZER

from pliant.deployments.llm.token_texts import TokenTexts
from pliant.models.lora_layout import MODULES
from pliant.torchvision_ops import declare

NAME = "lora"
"""Of the service."""
RANKS = (8, 16, 32, 64)
FOUND = [f"tenant-{index}" for index in range(12)]
"""Adapters of the configured folder. Memory holds about four of them."""
MORE = ["later", "stays", "spreads"]
"""Adapters that are loaded at run time."""
TOKENS = 24
TEXTS = TokenTexts(TOKENIZER)


class Oracle:
    """In `folder`: the model, the adapters that are `found` there, `more` of them, and a broken one.

    Torch computes on one thread from now on: the model is tiny, and the cluster needs the cores.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        declare()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            vocab_size=TOKENIZER.get_vocab_size(),
            max_position_embeddings=96,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        torch.manual_seed(0)
        self.folder = folder
        self._adapted: Any = None
        self._model = LlamaForCausalLM(config).eval()
        self._model.save_pretrained(folder / "model")
        TOKENIZER.save(str(folder / "model" / "tokenizer.json"))
        for index, name in enumerate([*FOUND, *MORE]):
            self._adapt(name, folder / ("found" if name in FOUND else "more") / name, RANKS[index % len(RANKS)], index)
        broken = folder / "more" / "broken"
        broken.mkdir()
        (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8')

    def service(self) -> dict[str, Any]:
        """What serves all this."""
        adapters = {
            "folder": str(self.folder / "found"),
            "roots": [str(self.folder / "more")],
        }
        return {
            "kind": "llm",
            "model": str(self.folder / "model"),
            "replicas": 2,
            "slots": 8,
            "tensor_parallel": 2,
            "memory_mb": 1,
            "cpus": 0.05,
            "debug": True,
            "adapters": adapters,
        }

    def _adapt(self, name: str, folder: Path, rank: int, seed: int) -> None:
        """Save a random adapter of all modules in `folder`, and know what `name` answers."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=rank, lora_alpha=16, target_modules=list(MODULES), task_type="CAUSAL_LM")
        if self._adapted is None:
            self._adapted = get_peft_model(self._model, config, adapter_name=name)
        else:
            self._adapted.add_adapter(name, config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self._adapted.modules():
                if name in getattr(module, "lora_A", ()):
                    a, b = module.lora_A[name].weight, module.lora_B[name].weight
                    a.copy_(torch.randn(a.shape, generator=generator))
                    b.copy_(torch.randn(b.shape, generator=generator) / (15 * module.scaling[name] * rank**0.5))
        self._adapted.save_pretrained(folder.parent, selected_adapters=[name])

    @torch.inference_mode()
    def answer(self, name: str, prompt: list[int], tokens: int = TOKENS) -> list[str]:
        """The texts of the tokens that greedy decoding gives; alone, without our kernels."""
        if name == NAME:
            with self._adapted.disable_adapter():
                return self._generate(prompt, tokens)
        self._adapted.set_adapter(name)
        return self._generate(prompt, tokens)

    def _generate(self, prompt: list[int], tokens: int) -> list[str]:
        ids = torch.tensor([prompt])
        found = self._adapted.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
        return [TEXTS[token].text for token in found[0, len(prompt) :].tolist()]
