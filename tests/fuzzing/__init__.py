"""Random changes of every file format and every variable that the library reads.

What is read must be used, passed over, or end in an error of the library that says what it has received:
nothing else may be raised, and no file may be written elsewhere. `python -m tests.fuzzing` tries all, as long
as wanted; `tests/unit/test_fuzzing.py` a few cases of each.
"""
