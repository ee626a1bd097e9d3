"""Functions that are pickle_by_value by value keep the names of their files."""

import pickle
import traceback

from unisono._system._pickling import pickle_by_value


def test_a_traceback_names_the_file_and_shows_the_line():
    def work():
        def inner():
            raise ValueError("seven")  # the line

        return inner()

    try:
        pickle.loads(pickle_by_value({"call": (work, 3)}))["call"][0]()
    except ValueError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, 'raise ValueError("seven")  # the line')


def test_a_text_that_only_looks_like_it_stays():
    text = "<dynamic-code>"
    assert pickle.loads(pickle_by_value(lambda: text))() == text
