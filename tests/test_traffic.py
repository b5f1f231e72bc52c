"""Moving averages of what arrives."""

import pytest

from pdjax.traffic import WEIGHT, Traffic


def test_few_requests_count_alike():
    traffic = Traffic()
    for at_s, tokens in ((0.0, 10), (1.0, 20), (2.0, 30)):
        traffic.arrived(at_s, tokens, None)
    assert traffic.prompt_tokens == pytest.approx(20)
    assert traffic.rate(2.0) == pytest.approx(1.0)


def test_after_many_the_newest_has_its_weight():
    traffic = Traffic()
    for number in range(100):
        traffic.arrived(float(number), 10, None)
    traffic.arrived(100.0, 110, None)
    assert traffic.prompt_tokens == pytest.approx(10 + WEIGHT * 100)


def test_an_answer_of_known_length_counts_when_its_request_comes():
    traffic = Traffic()
    traffic.arrived(0.0, 10, 40)
    assert traffic.output_tokens == 40


def test_an_answer_of_unknown_length_counts_when_it_is_complete():
    traffic = Traffic()
    traffic.arrived(0.0, 10, None)
    assert traffic.output_tokens == 0
    traffic.finished(30)
    assert traffic.output_tokens == 30


def test_a_long_silence_lowers_the_rate():
    traffic = Traffic()
    traffic.arrived(0.0, 10, None)
    traffic.arrived(1.0, 10, None)
    assert traffic.rate(1.0) == pytest.approx(1.0)
    assert traffic.rate(101.0) == pytest.approx(1 / (WEIGHT * 100))
