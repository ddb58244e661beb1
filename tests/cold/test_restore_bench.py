from mlx_lm_tiered.bench import restore


def test_what_is_compared_is_read_one_after_the_other_and_each_as_often_first():
    order = []
    names = ("raw", "raw_threads", "restore", "unchecked")
    times = restore._alternate({name: (lambda name=name: order.append(name)) for name in names}, 4, None)
    assert all(len(times[name]) == 4 and min(times[name]) >= 0 for name in names)
    rounds = [order[i : i + 4] for i in range(0, len(order), 4)]
    assert len(rounds) == 5 and all(sorted(one) == sorted(names) for one in rounds)  # the first is not counted
    places = [(one.index("restore"), one.index("unchecked")) for one in rounds[1:]]
    assert all(abs(checked - unchecked) == 1 for checked, unchecked in places)
    assert sum(checked < unchecked for checked, unchecked in places) == 2
