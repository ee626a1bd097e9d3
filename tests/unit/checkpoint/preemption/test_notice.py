from unisono.checkpoint.preemption._notice import PreemptionNotice


def test_the_first_word_counts():
    times = iter([100, 105])
    notice = PreemptionNotice(lambda: next(times))
    notice.record()
    notice.record()
    assert notice.at == 100
