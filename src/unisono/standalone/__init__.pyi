"""The public names of `unisono.standalone`; they are loaded when they are first used."""

from unisono.standalone._client import run_on_cluster as run_on_cluster
from unisono.standalone._lease_book import ServerBusyError as ServerBusyError
from unisono.standalone._server import (
    StandardServer as StandardServer,
    run_standard_server as run_standard_server,
)
