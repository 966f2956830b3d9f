"""Student's t against printed tables."""

import math

import pytest

from memjax.report.student_t import t_cdf, t_quantile

# Standard printed table, two-sided 95 % and 99 %.
TABLE = [
    (0.975, 1, 12.7062047364),
    (0.975, 2, 4.3026527299),
    (0.975, 3, 3.1824463053),
    (0.975, 4, 2.7764451052),
    (0.975, 10, 2.2281388520),
    (0.975, 30, 2.0422724563),
    (0.995, 2, 9.9248432009),
    (0.995, 5, 4.0321429836),
    (0.95, 7, 1.8945786051),
]


@pytest.mark.parametrize(("probability", "degrees", "want"), TABLE)
def test_quantile_equals_the_printed_table(probability, degrees, want):
    assert t_quantile(probability, degrees) == pytest.approx(want, abs=1e-8)


def test_quantile_is_odd_and_tends_to_the_normal():
    assert t_quantile(0.025, 4) == -t_quantile(0.975, 4)
    assert t_quantile(0.5, 4) == pytest.approx(0.0, abs=1e-12)
    assert t_quantile(0.975, 1e7) == pytest.approx(1.959964, abs=1e-5)


def test_cdf_of_one_degree_is_the_arctangent():
    for t in (-3.0, -0.5, 0.0, 0.1, 2.0, 40.0):
        assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-13)


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1])
def test_impossible_arguments_are_refused(bad):
    with pytest.raises(ValueError, match="between 0 and 1"):
        t_quantile(bad, 3)
    with pytest.raises(ValueError, match="degrees"):
        t_cdf(1.0, 0)
