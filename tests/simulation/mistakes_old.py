"""Old defects: the project had each until a soak, a review or a simulation found it. They are put back.

`DEFECTS` says what it was, and by which of the planted mistakes it is put back.
"""

#: Planted by the tables of the other modules.
MISTAKES = ()

DEFECTS = {
    "a server whose log was damaged went on without its last updates": (
        "a log that ends early is taken as it is"
    ),
    "tasks of a generation that was replaced went on writing backups": "the fence is not raised",
    "a chief waited for ever for a worker that was lost between HELLO and programs": (
        "a worker is taken for present after its connection was lost"
    ),
    "a chief that was replaced ended well with another job's values": (
        "an older chief reads a newer one's values"
    ),
    "a chief that was replaced took the workers of the newer one": "a worker follows an older chief",
    "the folder of the first checkpoints was lost with the power": (
        "the folder of checkpoints is not flushed in the one above"
    ),
    "a replaced checkpoint came back in part after a loss of power": (
        "names are not flushed before the old one is deleted"
    ),
    "a checkpoint whose remains were swept came back in part": (
        "a name is not flushed before what it named is deleted"
    ),
    "a process that was replaced completed a checkpoint without its files": "a commit is not taken back",
    "a standalone client that was stopped began its lost job again": "a job begins again after its END",
    "a server's folder was lost with the power, and its snapshots": (
        "a server's folder is not flushed in the one above"
    ),
    "a new job's snapshots had lower numbers than damaged ones": (
        "snapshots behind a damaged one are older than it"
    ),
}
