"""The operations of the messages between chief, workers and parameter servers."""

import enum


class Op(enum.IntEnum):
    """The request or answer of a message; the numbers travel and must not change within a version."""

    #: The first message of a client: who it is, and of which generation.
    HELLO = 1
    #: The answer to any request that was carried out.
    OK = 2
    #: The answer to a request that was rejected, or failed.
    ERROR = 3

    #: Makes variables.
    CREATE = 10
    #: Brings a program.
    PROGRAM = 11
    #: Asks for the values that are newer than those that the client has.
    PULL = 12
    #: Brings gradients, and what else a step changes.
    PUSH = 13
    #: Asks for one variable, or a part of it.
    READ = 14
    #: Brings a new value of a variable.
    WRITE = 15
    #: Asks for rows of a table.
    ROWS = 16
    #: Asks for what a task does, and how far it is.
    STATUS = 17
    #: Drops variables.
    DROP = 19

    #: Asks a worker to run a closure.
    RUN = 30
    #: Brings the result of a closure.
    RESULT = 31
    #: Makes a dataset of a worker.
    DATASET = 32
    #: Takes back closures.
    CANCEL = 33

    #: The job is over: the task ends.
    END = 40
    #: Shows that a task is alive.
    HEARTBEAT = 41

    #: Asks a standalone server for free ports of its machine.
    PORTS = 50
    #: Brings a file of a job, or a part of it.
    PUT = 51
    #: Asks for a part of a file of a job.
    GET = 52
    #: Starts a process of a job.
    START = 53
    #: Asks for what is new of a job's processes: output, errors, ends.
    POLL = 54
    #: Sends a signal to a process of a job.
    SIGNAL = 55
    #: Asks a standalone server to kill what a job's processes have left behind.
    SWEEP = 56
