"""The NVIDIA GPUs of this machine, as its driver names them.

    python3 -m tests.gpu.machine --cuda 13              # names the GPUs, or says what is missing
    python -m tests.gpu.machine --cuda 13 --installed   # also that JAX computes on them, and all versions

It runs before anything is installed, with the standard library alone.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys

#: The oldest driver and the oldest compute capability of each major version of CUDA:
#: https://docs.jax.dev/en/latest/installation.html
CUDA = {"13": (580, (7, 5)), "12": (525, (5, 2))}
#: Seconds for a command of the driver.
LIMIT = 60
#: MiB of a GPU that other processes may hold before the numbers of a benchmark suffer.
HELD = 1024
_FIELDS = "index,uuid,name,driver_version,memory.total,memory.used,compute_cap"
PACKAGES = ("unisono", "jax", "jaxlib", "keras", "numpy", "nvidia-cudnn-cu{}", "nvidia-nccl-cu{}")


class MissingError(Exception):
    """What this machine lacks, and what to do about it."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU, with its memory in MiB."""

    index: int
    uuid: str
    name: str
    driver: str
    memory: int
    used: int
    capability: tuple[int, int]


def run(*command):
    """The output of a command of the driver."""
    path = shutil.which(command[0])
    if path is None:
        raise MissingError(
            f"`{command[0]}` was not found, so NVIDIA's driver is not installed, or not shown to this "
            "container. Install the driver (https://www.nvidia.com/drivers), or start the container with "
            "`--gpus all`."
        )
    try:
        given = [path, *command[1:]]
        done = subprocess.run(given, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        raise MissingError(f"`{' '.join(command)}` did not answer within {LIMIT} s: see `dmesg`.") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise MissingError(
            f"`{' '.join(command)}` must succeed. Received: exit code {done.returncode}, {said!r}. "
            "The driver is not loaded, or does not fit the kernel: see `lsmod | grep nvidia` and `dmesg`."
        )
    return done.stdout


def parse(text):
    """The GPUs of `nvidia-smi --query-gpu=… --format=csv,noheader,nounits`."""
    found = []
    for line in filter(None, text.splitlines()):
        index, uuid, name, driver, memory, used, capability = (part.strip() for part in line.split(","))
        major, _, minor = capability.partition(".")
        # Machines whose CPU and GPU share their memory have no numbers: "[N/A]".
        sizes = [int(size) if size.isdigit() else 0 for size in (memory, used)]
        found.append(Gpu(int(index), uuid, name, driver, *sizes, (int(major), int(minor or 0))))
    return found


def gpus():
    """All GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says.

    Raises:
        MissingError: there is no driver, or no GPU.
    """
    found = parse(run("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"))
    if not found:
        raise MissingError("`nvidia-smi` names no GPU: the driver is there, and the GPU is not.")
    return found


def visible(environ=os.environ):
    """The values of CUDA_VISIBLE_DEVICES that each show one GPU, or one MIG instance, to a process."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [name for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    # A GPU that is divided cannot be used as a whole.
    instances = re.findall(r"UUID: (MIG-[\w/-]+)", run("nvidia-smi", "-L"))
    return instances or [str(gpu.index) for gpu in gpus()]


def of_places(places, every):
    """The GPUs among `every` that values of CUDA_VISIBLE_DEVICES name; all where they name MIG instances."""
    known = {str(gpu.index): gpu for gpu in every} | {gpu.uuid: gpu for gpu in every}
    return [known[place] for place in places if place in known] or every


def problems(cuda, found, places):
    """What stands between these GPUs and a version of JAX, in words; nothing where all is well."""
    driver, capability = CUDA[cuda]
    if not (3, 11) <= sys.version_info < (3, 15):
        yield (
            f"Unisono needs Python 3.11 to 3.14. Received: {platform.python_version()}. "
            "Write `make gpu PYTHON=python3.12`."
        )
    if importlib.util.find_spec("ensurepip") is None:
        yield f"{sys.executable} must have the module `ensurepip`. Install it: `apt install python3-venv`."
    if sys.platform != "linux":
        yield f"JAX' CUDA packages are for Linux. Received: {sys.platform}."
    if platform.machine() not in ("x86_64", "aarch64"):
        yield f"JAX' CUDA packages are for x86_64 and aarch64. Received: {platform.machine()}."
    if not places:
        yield "CUDA_VISIBLE_DEVICES is set and shows no GPU: unset it."
    for gpu in found:
        own = int(gpu.driver.split(".")[0])
        if own < driver:
            other = next((f" Or write `make gpu CUDA={c}`." for c in CUDA if own >= CUDA[c][0]), "")
            yield (
                f"CUDA {cuda} needs driver {driver} or later. Received: {gpu.driver}. Install a later one."
                f"{other}"
            )
            break
    for gpu in found:
        if gpu.capability < capability:
            least = "{}.{}".format(*capability)
            yield (
                f"CUDA {cuda} needs GPUs of compute capability {least} or higher. Received: {gpu.name} with "
                f"{'{}.{}'.format(*gpu.capability)}. Hide it with CUDA_VISIBLE_DEVICES"
                f"{', or write `make gpu CUDA=12`' if cuda != '12' else ''}."
            )


def description(found, places):
    """The GPUs in a line, for tables: `2 x NVIDIA H100 80GB HBM3 (80 GiB), driver 580.65.06`."""
    names = sorted({f"{gpu.name} ({round(gpu.memory / 1024)} GiB)" for gpu in found})
    kind = " as MIG instances" if any(place.startswith("MIG-") for place in places) else ""
    return f"{len(places)} x {', '.join(names)}{kind}, driver {found[0].driver}"


def versions(cuda):
    """The versions of what computes, by package."""
    found = {"Python": platform.python_version()}
    for package in (name.format(cuda) for name in PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # NVIDIA's packages for CUDA 13 and later partly have no suffix.
            found[package] = "not installed"
    return found


def check(cuda):
    """Print the GPUs.

    Raises:
        MissingError: JAX for this version of CUDA will not run on them.
    """
    every, places = gpus(), visible()
    found = of_places(places, every)
    if wrong := list(problems(cuda, found, places)):
        raise MissingError("\n".join(wrong))
    print(description(found, places))
    if os.environ.get("LD_LIBRARY_PATH"):
        print("note: LD_LIBRARY_PATH is set: it may hide the packages' CUDA libraries", file=sys.stderr)
    for gpu in found:
        if gpu.used > HELD:
            print(f"note: other processes hold {gpu.used} MiB of GPU {gpu.index}", file=sys.stderr)


def check_installed(cuda):
    """Print the versions, and let JAX compute on each GPU.

    Raises:
        MissingError: JAX does not.
    """
    print(", ".join(f"{name} {version}" for name, version in versions(cuda).items()))
    import jax

    try:
        devices = jax.local_devices(backend="gpu")
        for device in devices:
            jax.device_put(1.0, device).block_until_ready()
    except RuntimeError as error:
        raise MissingError(f"JAX must compute on the GPUs. Received: {error}") from None
    print("JAX computes on", ", ".join(f"{device} ({device.device_kind})" for device in devices))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", choices=CUDA, default="13", help="the version whose JAX is installed")
    parser.add_argument("--installed", action="store_true", help="JAX is installed: let it compute")
    given = parser.parse_args()
    try:
        check(given.cuda)
        if given.installed:
            check_installed(given.cuda)
    except MissingError as error:
        sys.exit(f"make gpu: {error}")


if __name__ == "__main__":
    main()
