"""The n-gram source finds what a search of the whole sequence finds, however the sequence came."""

from __future__ import annotations

import random

import pytest

from mlx_lm_tiered.speculation.ngram import LEAST, LONGEST, PATIENCE, PLACES, NGramDrafter


def search(tokens: list[int], pending: int, most: int) -> list[int]:
    """The same by comparing at every place, the latest first."""
    whole = [*tokens, pending]
    best, length = -1, 0
    for end in range(len(whole) - 2, -1, -1):
        same = 0
        while same <= min(end, LONGEST) and whole[end - same] == whole[len(whole) - 1 - same]:
            same += 1
        if same > length:
            best, length = end, same
    if length < LEAST:
        return []
    copied = list(whole)
    for at in range(best + 1, best + 1 + min(most, length)):
        copied.append(copied[at])
    return copied[len(whole) :]


@pytest.mark.parametrize("seed", range(6))
def test_it_finds_the_latest_of_the_longest_matches(seed: int):
    random.seed(seed)
    tokens = [random.randint(0, 3) for _ in range(PLACES)]  # so few that no pair has more places than are looked at
    grown = NGramDrafter()
    found = 0
    for count in range(len(tokens)):
        sequence = tokens[:count]
        for pending in range(4):
            expected = search(sequence, pending, 5)
            found += bool(expected)
            grown.verified(1, 1)  # as after a draft that was right: no longer match than the least is asked for
            assert grown.draft(sequence, pending, 5).tokens == expected
            assert NGramDrafter().draft(sequence, pending, 5).tokens == expected
            assert not expected or NGramDrafter().hopes(sequence)
    assert found > 40


def test_a_repetition_goes_on_past_the_end():
    drafter = NGramDrafter()
    assert drafter.draft([7, 8, 9, 7, 8, 9, 7, 8], 9, 6).tokens == [7, 8, 9, 7, 8, 9]
    assert NGramDrafter().draft([4] * 9, 4, 3).tokens == [4, 4, 4]


def test_without_an_earlier_pair_nothing_is_hoped_for():
    drafter = NGramDrafter()
    assert not drafter.hopes([])
    assert not drafter.hopes([1, 2, 3, 4])
    assert drafter.hopes([1, 2, 3, 4, 1, 2])
    assert drafter.draft([1, 2, 3, 4, 1, 2], 9, 4).tokens == []
    assert drafter.draft([1, 2, 3, 4, 1, 2], 3, 4).tokens == [4, 1, 2]


def test_after_wrong_drafts_a_longer_match_is_asked_for_until_one_is_right():
    drafter, tokens = NGramDrafter(), [1, 2, 3, 4, 5, 9, 2, 3]
    assert drafter.draft(tokens, 4, 2).tokens == [5, 9]  # a match of 3
    drafter.verified(2, 0)
    assert drafter.draft(tokens, 4, 2).tokens == []
    longer = NGramDrafter()
    longer.verified(2, 0)
    assert longer.draft([1, 2, 3, 4, 5, 1, 2, 3], 4, 2).tokens == [5, 1]  # of 4
    drafter.verified(2, 1)
    assert drafter.draft(tokens, 4, 2).tokens == [5, 9]


def test_hopes_in_vain_ask_for_a_longer_match_too():
    drafter, tokens = NGramDrafter(), [1, 2, 3, 4, 5, 9, 2, 3]
    for _ in range(PATIENCE):
        assert drafter.hopes(tokens) and drafter.draft(tokens, 7, 2).tokens == []
    assert not drafter.hopes(tokens) and drafter.hopes([1, 2, 3, 4, 5, 1, 2, 3])
    drafter.verified(2, 1)
    assert drafter.hopes(tokens)
