"""Every kernel in C computes what the same kernel in torch does, for every way that a CPU can take."""

import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from support.cpu_builds import BUILDS, close
from torch import Tensor

from pliant.kernels import c_compiler
from pliant.kernels.decoder import cpu_kernels
from pliant.kernels.decoder.cpu_kernels import KEPT_ROWS, CpuKernels, best
from pliant.kernels.decoder.kernels import TorchKernels

DTYPES = (torch.float32, torch.bfloat16)
HEADS = [(6, 6, 64), (8, 2, 32), (7, 1, 16), (4, 4, 128), (6, 2, 80), (4, 2, 8), (2, 1, 272)]
"""(heads, kv_heads, head_dim); the last two are left to torch."""
MAX_LENGTH = 150

pytestmark = pytest.mark.skipif(c_compiler.compiler() is None, reason="no C compiler")


@pytest.fixture(scope="module", params=list(BUILDS))
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(2, BUILDS[request.param])


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def poisoned(kernel: Callable[[], Tensor]) -> Tensor:
    """The kernel's result when its buffers held garbage before."""
    kernel().fill_(torch.nan)
    return kernel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 8, 16, 17, 33, 64, 300])
@pytest.mark.parametrize(("outs", "ins"), [(96, 64), (50, 37), (16, 32), (100, 128)])
def test_linear(kernels: CpuKernels, rows: int, outs: int, ins: int, dtype: torch.dtype) -> None:
    weight, x, bias = (torch.randn(*size).to(dtype) for size in ((outs, ins), (rows, ins), (outs,)))
    for b in (bias, None):
        layer = kernels.linear(weight, b)
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        close(poisoned(lambda layer=layer: layer(x)), expected.to(dtype))


def test_linear_takes_rows_that_do_not_lie_together(kernels: CpuKernels) -> None:
    weight, x = torch.randn(48, 32), torch.randn(32, 5).T
    close(kernels.linear(weight, None)(x), x @ weight.T)


def test_linear_keeps_results_apart(kernels: CpuKernels) -> None:
    first, second = (kernels.linear(torch.randn(16, 32), None) for _ in range(2))
    x = torch.randn(2, 32)
    result = first(x)
    before = result.clone()
    second(x)
    assert torch.equal(result, before)
    assert first(x).data_ptr() == result.data_ptr()
    prompts = torch.randn(KEPT_ROWS + 1, 32)
    assert first(prompts).data_ptr() != result.data_ptr()


def test_linear_refuses_other_dtypes(kernels: CpuKernels) -> None:
    for linear in (kernels.linear, kernels.int8_linear):
        with pytest.raises(ValueError, match="float16"):
            linear(torch.ones(16, 32, dtype=torch.float16), None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 16), (3, 100), (33, 384), (90, 768)])
@pytest.mark.parametrize("added", [True, False])
def test_add_norm(kernels: CpuKernels, size: tuple[int, int], added: bool, dtype: torch.dtype) -> None:
    hidden, delta, weight = (torch.randn(*s).to(dtype) for s in (size, size, size[1:]))
    given = delta if added else None
    reference = hidden.clone()
    expected = TorchKernels().add_norm(reference, given, weight, 1e-5)
    close(poisoned(lambda: kernels.add_norm(hidden.clone(), given, weight, 1e-5)), expected)
    updated = hidden.clone()
    kernels.add_norm(updated, given, weight, 1e-5)
    assert torch.equal(updated, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 32), (3, 200), (70, 1024)])
@pytest.mark.parametrize("scale", [1, 60])
def test_gate(kernels: CpuKernels, size: tuple[int, int], scale: int, dtype: torch.dtype) -> None:
    gate_up = (scale * torch.randn(*size)).to(dtype)
    close(poisoned(lambda: kernels.gate(gate_up)), TorchKernels().gate(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("normed", [True, False])
def test_rotate_and_store(kernels: CpuKernels, heads: tuple[int, int, int], normed: bool, dtype: torch.dtype) -> None:
    queries, kv_heads, head_dim = heads
    qkv = torch.randn(3, (queries + 2 * kv_heads) * head_dim).to(dtype)
    angles = torch.randn(MAX_LENGTH, head_dim // 2).repeat(1, 2)
    norms = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)) if normed else None
    positions, pages = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, MAX_LENGTH - 1, 76], [2, 4, 3]))
    expected_keys, expected_values, keys, values = (
        torch.full((6, kv_heads, 32, head_dim), torch.nan, dtype=dtype) for _ in range(4)
    )
    places = positions, pages, (angles.cos(), angles.sin()), norms, 1e-5
    expected = TorchKernels().rotate_and_store(qkv, *places, expected_keys, expected_values)
    close(poisoned(lambda: kernels.rotate_and_store(qkv, *places, keys, values)), expected)
    stored = expected_keys.isfinite()
    assert torch.equal(keys.isfinite(), stored)
    close(keys[stored], expected_keys[stored])
    assert torch.equal(values.nan_to_num(), expected_values.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
def test_move(kernels: CpuKernels, dtype: torch.dtype) -> None:
    keys, values = (torch.randn(3, 6, 2, 10, 16).to(dtype) for _ in range(2))
    expected = keys.clone(), values.clone()
    moves = [(5, 0, 10), (4, 2, 3), (3, 1, 0)]
    TorchKernels().move(*expected, moves)
    kernels.move(keys, values, moves)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_threads_end_with_the_kernels() -> None:
    def count() -> int:
        return len(list(cpu_kernels.Path("/proc/self/task").iterdir()))

    if not cpu_kernels.Path("/proc/self/task").exists():
        pytest.skip("no /proc")
    before = count()
    kernels = CpuKernels(4)
    assert count() == before + 3
    layer = kernels.linear(torch.randn(640, 64), None)
    del kernels
    assert count() == before + 3, "a layer still needs them"
    del layer
    assert count() == before


def test_results_do_not_depend_on_who_computes_them() -> None:
    """Two users in two threads, each with threads of its own, many calls of a few microseconds."""
    weight, x = torch.randn(256, 64), torch.randn(4, 64)
    expected = CpuKernels(1).linear(weight, None)(x).clone()
    wrong: list[int] = []

    def repeat() -> None:
        layer = CpuKernels(3).linear(weight, None)
        for i in range(300):
            if not torch.equal(layer(x), expected):
                wrong.append(i)

    users = [threading.Thread(target=repeat) for _ in range(2)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert not wrong


def test_best_falls_back_to_torch_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(best(1), CpuKernels)
    cpu_kernels._warn_once.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING, "pliant"):
        assert [type(best(1)) for _ in range(2)] == [TorchKernels, TorchKernels]
    (record,) = caplog.records
    assert "apt-get install gcc" in record.getMessage()
