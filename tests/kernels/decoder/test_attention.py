"""Attention over pages: in C for every way that a CPU can take, in torch, and by its definition."""

import numpy as np
import pytest
import torch
from support.cpu_builds import BUILDS, close
from torch import Tensor

from pliant.kernels import c_compiler
from pliant.kernels.decoder.cpu_kernels import CpuKernels
from pliant.kernels.decoder.kernels import DecoderKernels, TorchKernels
from pliant.kernels.decoder.ragged import Ragged, Span, ragged

CPU = torch.device("cpu")
HEADS = [(6, 6, 64), (8, 2, 32), (7, 1, 16), (4, 4, 128), (6, 2, 80), (4, 2, 8), (2, 1, 272), (160, 1, 16)]
"""(heads, kv_heads, head_dim); the last three are left to torch."""
LENGTHS = [0, 149, 127, 128, 6, 63]
"""Tokens before the one of each row."""
SPANS = [Span(0, 1), Span(0, 5), Span(0, 150), Span(7, 66), Span(64, 64), Span(130, 2)]


@pytest.fixture(scope="module", params=["torch", *BUILDS])
def kernels(request: pytest.FixtureRequest) -> DecoderKernels:
    if request.param == "torch":
        return TorchKernels()
    if c_compiler.compiler() is None:
        pytest.skip("no C compiler")
    return CpuKernels(2, BUILDS[request.param])


class Texts:
    """Keys and values of rows that decode and of chunks, in pages in no order; not a number wherever none is stored."""

    def __init__(
        self, lengths: list[int], spans: list[Span], kv_heads: int, head_dim: int, page: int, dtype: torch.dtype
    ) -> None:
        self.stops = [*(length + 1 for length in lengths), *(span.start + span.tokens for span in spans)]
        self.counts = [1] * len(lengths) + [span.tokens for span in spans]
        pages = [-(-stop // page) for stop in self.stops]
        order = 1 + np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
        tables = np.split(order, np.cumsum(pages)[:-1])
        self.keys, self.values = (
            torch.full((sum(pages) + 1, 2, kv_heads, page, head_dim), torch.nan, dtype=dtype)[:, 1] for _ in range(2)
        )
        self.texts = [torch.randn(2, stop, kv_heads, head_dim).to(dtype) for stop in self.stops]
        for table, text in zip(tables, self.texts, strict=True):
            at = np.arange(text.shape[1])
            for buffer, stored in zip((self.keys, self.values), text, strict=True):
                buffer[table[at // page], :, at % page] = stored
        n = len(lengths)
        width = max((len(table) for table in tables[:n]), default=0)
        singles = np.array([np.resize(table, width) for table in tables[:n]], np.int32).reshape(n, width)
        chunks = list(zip(spans, tables[n:], strict=True))
        self.batch: Ragged = ragged(np.array(lengths, np.int32), singles, chunks, page, CPU)

    def expected(self, q: Tensor, window: int | None) -> Tensor:
        """By its definition, in float64."""
        found = []
        for text, stop, rows in zip(self.texts, self.stops, q.double().split_with_sizes(self.counts), strict=True):
            k, v = text.double().repeat_interleave(q.shape[1] // text.shape[2], dim=2)
            positions = torch.arange(stop)
            ahead = positions[stop - len(rows) :, None] - positions
            hidden = (ahead < 0) | (ahead >= (window or stop))
            scores = torch.einsum("qhd,thd->hqt", rows, k) / q.shape[2] ** 0.5
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            found.append(torch.einsum("hqt,thd->qhd", weights, v).flatten(1))
        return torch.cat(found).to(q.dtype)


def check(kernels: DecoderKernels, texts: Texts, q: Tensor, window: int | None) -> None:
    kernels.attention(q, texts.keys, texts.values, texts.batch, window).fill_(torch.nan)
    close(kernels.attention(q, texts.keys, texts.values, texts.batch, window), texts.expected(q, window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("page", "window"), [(16, None), (64, None), (64, 1), (16, 7), (64, 140)])
def test_every_token_attends_to_its_text_up_to_itself(
    kernels: DecoderKernels, heads: tuple[int, int, int], page: int, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    queries, kv_heads, head_dim = heads
    for lengths, spans in ((LENGTHS, SPANS), ([149], []), ([], [Span(40, 90)])):
        texts = Texts(lengths, spans, kv_heads, head_dim, page, dtype)
        check(kernels, texts, (3 * torch.randn(sum(texts.counts), queries, head_dim)).to(dtype), window)


@pytest.mark.parametrize("page", [1, 32, 256])
def test_pages_have_any_power_of_two_of_tokens(kernels: DecoderKernels, page: int) -> None:
    torch.manual_seed(0)
    texts = Texts([130, 3], [Span(10, 100)], 2, 32, page, torch.float32)
    check(kernels, texts, torch.randn(102, 4, 32), None)


def test_attention_that_sees_no_number_says_so(kernels: DecoderKernels) -> None:
    if not isinstance(kernels, CpuKernels):
        pytest.skip("torch gives zeros for a prompt's")
    texts = Texts([7], [Span(0, 8)], 1, 16, 8, torch.float32)
    nowhere = torch.full_like(texts.keys, torch.nan)
    assert kernels.attention(torch.ones(9, 1, 16), nowhere, texts.values, texts.batch, None).isnan().all()
