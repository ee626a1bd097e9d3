import logging

from unisono.cli._warn_once import once, warn_once


def test_a_text_passes_once(caplog):
    logger = logging.getLogger("unisono")
    before = list(logger.filters)
    try:
        warn_once()
        for number in (1, 1, 2):
            logger.warning("layout %d", number)
    finally:
        logger.filters[:] = before
    assert caplog.messages == ["layout 1", "layout 2"]


def test_each_filter_begins_anew():
    record = logging.makeLogRecord({"msg": "once"})
    assert [once()(record), once()(record)] == [True, True]
