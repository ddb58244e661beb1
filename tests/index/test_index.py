"""The index against a plain search over all sequences."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_lm_tiered.index.compact import CompactIndex
from mlx_lm_tiered.index.keys import common_tokens, key_tokens, pack, token_key, unpack
from mlx_lm_tiered.index.prefixes import PrefixIndex


@dataclass(eq=False)
class Item:
    tokens: tuple
    serves_shorter: bool = True

    @property
    def key(self):
        return token_key(self.tokens)

    @property
    def packed(self):
        return pack(self.key)

    @property
    def length(self):
        return len(self.tokens)


# Few distinct tokens, so that sequences share prefixes; image ids are negative.
TOKEN = st.sampled_from([0, 1, 2, -5, 2**40])
SEQUENCE = st.lists(TOKEN, min_size=1, max_size=8).map(tuple)


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def usable(item, shared):
    return shared if item.serves_shorter or shared == len(item.tokens) else 0


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(SEQUENCE, st.booleans()), max_size=12), SEQUENCE)
def test_best_is_the_longest_usable(stored, query):
    for index in (PrefixIndex(), CompactIndex()):
        look_for_the_best(index, stored, query)


def look_for_the_best(index, stored, query):
    items = {}
    for tokens, flexible in stored:
        items[tokens] = Item(tokens, flexible)
        index.add(items[tokens])
    expected = max((usable(item, common(item.tokens, query)) for item in items.values()), default=0)
    found = index.best(token_key(query), usable)
    assert (found[1] if found else 0) == expected
    if found:
        assert common(found[0].tokens, query) >= found[1]


@settings(max_examples=200, deadline=None)
@given(st.lists(SEQUENCE, max_size=12), SEQUENCE)
def test_ancestors_and_descendants(stored, query):
    index, compact = PrefixIndex(), CompactIndex()
    for tokens in stored:
        index.add(Item(tokens))
        compact.add(Item(tokens))
    assert {i.tokens for i in compact.descendants(token_key(query))} == {i.tokens for i in index.descendants(token_key(query))}
    assert [i.tokens for i in compact.ancestors(token_key(query))] == [i.tokens for i in index.ancestors(token_key(query))]
    assert (found.tokens if (found := compact.exact(token_key(query))) else None) == (query if query in stored else None)
    assert [i.tokens for i in index.ancestors(token_key(query))] == sorted(
        {t for t in stored if len(t) < len(query) and query[: len(t)] == t}, key=len
    )
    assert {i.tokens for i in index.descendants(token_key(query))} == {t for t in stored if t[: len(query)] == query}


@settings(max_examples=100, deadline=None)
@given(st.lists(SEQUENCE, max_size=12), st.data())
def test_removed_entries_are_gone(stored, data):
    index = PrefixIndex()
    for tokens in stored:
        index.add(Item(tokens))
    gone = {tokens for tokens in stored if data.draw(st.booleans())}
    for tokens in gone:
        index.remove(index.exact(token_key(tokens)))
    assert {item.tokens for item in index} == set(stored) - gone
    assert len(index) == len(set(stored) - gone)


def test_replacing_keeps_one_and_a_stale_remove_does_nothing():
    index, first, second = PrefixIndex(), Item((1, 2)), Item((1, 2))
    index.add(first)
    index.add(second)
    index.remove(first)
    assert list(index) == [second]


@given(st.lists(st.integers(-(2**60), 2**60), max_size=6))
def test_keys_round_trip(tokens):
    assert key_tokens(token_key(tokens)) == tokens


@given(SEQUENCE, SEQUENCE)
def test_common_tokens(a, b):
    assert common_tokens(token_key(a), token_key(b)) == common(a, b)


@given(SEQUENCE)
def test_packing_keeps_the_tokens(tokens):
    packed = pack(token_key(tokens))
    assert unpack(packed, len(tokens)) == token_key(tokens)
    assert len(packed) == (4 if all(0 <= t < 2**32 for t in tokens) else 8) * len(tokens)


def test_a_compact_index_forgets():
    index, narrow, wide, other = CompactIndex(), Item((1, 2)), Item((1, -5)), Item((1, 2))
    for item in (narrow, wide):
        index.add(item)
    index.remove(other)
    assert len(index) == 2 and index.closest(token_key((1, -5, 7))) == (wide, 2)
    index.remove(wide)
    index.remove(narrow)
    assert len(index) == 0 and index.closest(token_key((1, 2))) is None
