"""Mistakes in standalone servers and their clients: too little of everything, and lost connections."""

from tests.simulation._planted import Mistake

_LINK = "unisono.standalone._link"
_MACHINES = "unisono.standalone._remote_machines"
_MACHINE = "unisono.standalone._server_machine"
_PROCESS = "unisono.standalone._remote_process"


def _mistake(name, place, old, new):
    return Mistake(name, place, old, new, "serving")


MISTAKES = (
    _mistake(
        "an evaluator is told the end once, or never",
        f"{_MACHINES}:RemoteMachines.finish_evaluator",
        "except (PeerLostError, RequestRefusedError):",
        "except ZeroDivisionError:",
    ),
    _mistake(
        "a server without free ports is asked for ever",
        f"{_MACHINES}:RemoteMachines.plan",
        "if error.kind != ContextError.__name__:",
        "if False:",
    ),
    _mistake(
        "a server whose connection is lost at first does not run",
        f"{_MACHINES}:RemoteMachines._claim",
        "if time.monotonic() + _POLL >= deadline:",
        "if True:",
    ),
    _mistake(
        "a lost server is asked once",
        f"{_LINK}:ServerLink._asked_again",
        'return "it does not answer" if is_over else None',
        'return "it does not answer"',
    ),
    _mistake(
        "a process whose start is not answered is lost",
        f"{_LINK}:ServerLink.start_process",
        "self._closing.wait(_PROBE_PAUSE)",
        "break",
    ),
    _mistake(
        "a signal is lost with its connection",
        f"{_LINK}:ServerLink._turn",
        "if key in self._processes:",
        "if False:",
    ),
    _mistake(
        "an exception is lost where the disk is full",
        "unisono.standalone._server_job:ServerJob.news",
        "files.read_error(process.kept)",
        "files.read_error()",
    ),
    _mistake(
        "a server sweeps the machine",
        f"{_MACHINE}:ServerMachine.sweep",
        "sweep(self._mark, ",
        'sweep("", ',
    ),
    _mistake(
        "a server leaves its spares",
        f"{_MACHINE}:ServerMachine.close",
        "self._spares.close()",
        "pass",
    ),
    Mistake(
        "a full disk at the client costs the server",
        f"{_PROCESS}:RemoteProcess.add_output",
        "except OSError as error:",
        "except ZeroDivisionError as error:",
        "roles",
    ),
    Mistake(
        "a result that cannot be kept costs the server",
        f"{_PROCESS}:RemoteProcess.note_result",
        "except OSError as error:",
        "except ZeroDivisionError as error:",
        "roles",
    ),
)
