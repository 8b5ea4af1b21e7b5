"""Which lengths a service's replicas may hold."""

from __future__ import annotations

import numpy as np
import pytest
from support.doubles import profile

from pliant.deployments.encoder.lengths import Lengths


def texts(*lengths: int) -> np.ndarray:
    histogram = np.zeros(513, np.int64)
    histogram[np.array(lengths, np.int64)] = 100
    return histogram


def test_configured_lengths_stay() -> None:
    lengths = Lengths((64, 512), profile(0.5))
    assert (lengths.current, lengths.longest) == ((64, 512), 512)
    assert not lengths.choose(texts(100))


def test_where_static_shapes_do_not_pay_one_dynamic_runtime_takes_all() -> None:
    lengths = Lengths(None, profile(0.99))
    assert lengths.current == (512,)
    assert not lengths.choose(texts(100))
    assert lengths.service_s == {}


def test_where_they_pay_lengths_follow_the_texts() -> None:
    lengths = Lengths(None, profile(0.5))
    before = lengths.current
    assert len(before) > 2
    assert lengths.choose(texts(17, 33))
    assert lengths.current == (24, 40, 512)
    assert not lengths.choose(texts(17, 33)), "they are good already"
    assert not lengths.choose(texts(18, 34)), "the gain would be too small"
    assert not lengths.choose(texts()), "nothing arrived"
    assert lengths.longest == 512
    assert lengths.service_s[512] == pytest.approx(0.5 * (1e-3 + 512e-5))


def test_lengths_come_from_somewhere() -> None:
    with pytest.raises(ValueError, match="configured, or follow"):
        Lengths(None, None)
