"""Run a job on an emulated cluster: several hosts on this machine, linked by a network of a given rate. Root only.

Each host (node0, node1, ...) has its own host name, network, /dev/shm, IPC and process ids: ranks of two hosts can't
share memory by accident, nor read each other's. The machine's cores are shared out among the hosts. A host's link ends
at a switch, and `--rate` holds at both ends of it, for what the host sends and what it receives. Nothing of this is
seen on the machine's own network, and all of it ends with the command, even a killed one.

COMMAND runs once for each rank, with RANK, WORLD_SIZE, MASTER_ADDR and so on in its environment. `deepspeed` and
`torchrun` run once for each host, with their own options for several hosts. The exit status is the first that is not 0.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from deepspeed_mcrdl.bench import options
from deepspeed_mcrdl.bench.launch import GRACE_S, end, first_failure, rank_environment, threads
from deepspeed_mcrdl.bench.wire import RATE
from deepspeed_mcrdl.errors import ConfigError

EXAMPLE = (
    "mcrdl hosts --nodes 2 --ranks-per-node 2 --rate 1gbit -- deepspeed train.py --deepspeed_config ds_config.json"
)


_MOST_NODES = 250
_PORT = 29500  # nothing else is on the hosts' network
_MTU = 9000
_BURST_S = 100e-6  # what a link may send at once: long enough for the kernel's timer, short beside a message
_QUEUE_BYTES = 2**20

# Of <sched.h>, <sys/mount.h> and <sys/prctl.h>; Python has them from 3.12 on, or not at all.
_FLAGS = {"mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000, "net": 0x40000000}
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1


class Rate(NamedTuple):
    """A rate as the user wrote it, and in bits per second."""

    text: str
    bits: int


def rate(text: str) -> Rate:
    """Return a rate in tc's words: ``1gbit``, ``100mbit``, or in bytes ``125mbps``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(bit|bps)", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate such as 1gbit or 100mbit")
    scale = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}[found[2]] * {"bit": 1, "bps": 8}[found[3]]
    return Rate(text, int(float(found[1]) * scale))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mcrdl hosts`."""
    parser.add_argument("--nodes", type=options.at_least(1), default=2, metavar="N", help="hosts (default: 2)")
    parser.add_argument(
        "--ranks-per-node", type=options.at_least(1), default=1, metavar="N", help="ranks on each host (default: 1)"
    )
    parser.add_argument(
        "--rate",
        type=rate,
        help=f"of each host's link, such as 1gbit (default: unlimited); the ranks find it in {RATE}, in bit/s",
    )
    parser.add_argument(
        "--timeout", type=options.seconds, default=math.inf, metavar="SECONDS", help="end the job then (default: never)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, with its options")


def main(args: argparse.Namespace) -> int:
    """Run the command on the hosts; returns the first exit status that is not 0, and 1 after `--timeout`.

    Raises:
        ConfigError: without a command or the means to make hosts.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    _check(args, command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    with _unshared("net"), contextlib.ExitStack() as opened:  # the switch is in this process' own network
        cluster = _Cluster(args, opened)
        try:
            cluster.link()
            return cluster.run(command, args.timeout)
        finally:
            cluster.end()


def _check(args: argparse.Namespace, command: Sequence[str]) -> None:
    if not command:
        raise ConfigError(f"there is no command to run; for example: {EXAMPLE}")
    if args.nodes > _MOST_NODES:
        raise ConfigError(f"{args.nodes} hosts are too many; the most is {_MOST_NODES}")
    if not sys.platform.startswith("linux"):
        raise ConfigError("mcrdl hosts needs Linux, whose namespaces the hosts are made of")
    if os.geteuid() != 0:
        raise ConfigError("mcrdl hosts needs root, who alone may make hosts' networks; start it with sudo")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(f"mcrdl hosts needs the command `{missing[0]}`; install the package iproute2")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no command `{command[0]}`")


class _Cluster:
    """The hosts of one job, not yet linked; each is a process that waits to be told what to run."""

    def __init__(self, args: argparse.Namespace, opened: contextlib.ExitStack) -> None:
        self._ranks_per_node: int = args.ranks_per_node
        self._rate: Rate | None = args.rate
        self._names = [f"node{index}" for index in range(args.nodes)]
        self._began: float | None = None
        self._failures, failures = os.pipe2(os.O_NONBLOCK)
        # A file without a name: it can't be left behind.
        self._hostfile = os.memfd_create("hostfile")
        for fd in (self._failures, failures, self._hostfile):
            opened.callback(os.close, fd)
        os.write(self._hostfile, "".join(f"{name} slots={self._ranks_per_node}\n" for name in self._names).encode())
        self._inherited = (failures, self._hostfile)
        self._nodes: list[_Node] = []
        try:
            for _ in self._names:
                self._nodes.append(_Node.start(self._inherited, opened))
        except BaseException:
            self.end()
            raise

    def link(self) -> None:
        """Connect each host to the switch.

        Raises:
            ConfigError: if this kernel can't.
        """
        # Without the link-local addresses of IPv6 nothing but the job's own bytes goes over a link.
        up = "addrgenmode none up" if Path("/proc/net/if_inet6").exists() else "up"
        links = ["link add switch type bridge", f"link set switch {up}"]
        for name, node in zip(self._names, self._nodes, strict=True):
            links += [
                f"link add {name} mtu {_MTU} type veth peer name eth0 mtu {_MTU} netns {node.process.pid}",
                f"link set {name} master switch {up}",
            ]
        _configure("ip", links)
        self._limit(self._names)
        for index, node in enumerate(self._nodes):
            with _inside(node.network):
                address = f"address add {_address(index)}/24 dev eth0"
                _configure("ip", ["link set lo up", address, f"link set eth0 {up}"])
                self._limit(["eth0"])

    def _limit(self, devices: Sequence[str]) -> None:
        if self._rate is None:
            return
        burst = max(2 * _MTU, int(self._rate.bits / 8 * _BURST_S))
        shape = f"root tbf rate {self._rate.bits}bit burst {burst} limit {burst + _QUEUE_BYTES}"
        _configure("tc", [f"qdisc add dev {device} {shape}" for device in devices])

    def run(self, command: Sequence[str], timeout_s: float) -> int:
        """Run the command on all hosts and return the first exit status that is not 0, else 0."""
        self._began = time.monotonic()
        # Torch looks up the names of its connections in IPv6's form.
        hosts = "".join(
            f"{_address(index)} {name}\n::ffff:{_address(index)} {name}\n" for index, name in enumerate(self._names)
        )
        for index, node in enumerate(self._nodes):
            node.tell(
                name=self._names[index],
                hosts=f"127.0.0.1 localhost\n{hosts}",
                cores=self._cores(index),
                starts=self._starts(list(command), index),
                failures=self._inherited[0],
                inherited=[self._hostfile],
            )
        status = first_failure([node.process for node in self._nodes], timeout_s)
        with contextlib.suppress(BlockingIOError):  # a host ends some time after the rank that failed on it
            status = os.read(self._failures, 1)[0]
        return _exit_status(status)

    def _cores(self, node: int) -> list[int]:
        """Return a host's share of the cores, at least one, so that its ranks know how few they have."""
        cores, nodes = sorted(os.sched_getaffinity(0)), len(self._names)
        share = cores[node * len(cores) // nodes : (node + 1) * len(cores) // nodes]
        return share or [cores[node * len(cores) // nodes]]

    def _starts(self, command: list[str], node: int) -> list[tuple[list[str], dict[str, str]]]:
        """Return what one host starts: command lines, and what is added to their environment."""
        nodes, here = len(self._names), self._ranks_per_node
        shared = {"OMP_NUM_THREADS": threads(nodes * here)}
        if self._rate is not None:
            shared[RATE] = str(self._rate.bits)
        meeting = ["--node_rank", str(node), "--master_addr", self._names[0], "--master_port", str(_PORT)]
        if Path(command[0]).name == "deepspeed":
            hostfile = ["--hostfile", f"/proc/self/fd/{self._hostfile}", "--no_ssh"]
            return [([command[0], *hostfile, *meeting, *command[1:]], shared)]
        words = (
            1 if Path(command[0]).name == "torchrun" else 3 if command[1:3] == ["-m", "torch.distributed.run"] else 0
        )
        if words:
            size = ["--nnodes", str(nodes), "--nproc_per_node", str(here)]
            return [([*command[:words], *size, *meeting, *command[words:]], shared)]
        return [
            (command, {**shared, **rank_environment(rank, nodes * here, _PORT, nodes, self._names[0])})
            for rank in range(node * here, (node + 1) * here)
        ]

    def end(self) -> None:
        """End all hosts, and say what each has sent if the job had begun."""
        end([node.process for node in self._nodes])
        if self._began is None:
            return
        elapsed_s = time.monotonic() - self._began
        limit = "unlimited" if self._rate is None else self._rate.text
        received = _received_bytes()  # by the switch
        for name in self._names:
            mean = received[name] * 8 / elapsed_s / 1e6
            print(
                f"{name} sent {received[name] / 1e6:.1f} MB over its link ({limit}), {mean:.1f} Mbit/s on average",
                file=sys.stderr,
            )


@dataclass(frozen=True)
class _Node:
    """A host as the command sees it.

    Args:
        process: runs `_be_a_node` below; the host ends with it.
        network: its network namespace, kept open so that its counters can be read when it has ended.
    """

    process: subprocess.Popen[bytes]
    network: int

    @classmethod
    def start(cls, inherited: Sequence[int], opened: contextlib.ExitStack) -> _Node:
        # Process ids of its own: MPI libraries take processes that they can name for neighbours, and read their memory;
        # and all of a host's processes end with its first one, daemons too.
        with _unshared("net", "pid"):
            process = subprocess.Popen(
                [sys.executable, "-m", "deepspeed_mcrdl.hosts"], stdin=subprocess.PIPE, pass_fds=inherited
            )
            network = os.open(_own("net"), os.O_RDONLY)
        opened.callback(os.close, network)
        return cls(process, network)

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a host that has ended already has an exit status
            self.process.stdin.write(json.dumps(what).encode())
            self.process.stdin.close()


def _be_a_node() -> int:
    """Run what stdin tells, as the first process of a host; the kernel ends the host's others when this one ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    told = sys.stdin.read()
    if not told:  # the command has ended
        return 1
    what = json.loads(told)
    os.sched_setaffinity(0, what["cores"])
    try:
        _furnish(what["name"], what["hosts"])
    except OSError as error:
        raise _not_allowed(error) from error
    try:
        processes = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, **more}, pass_fds=what["inherited"])
            for command, more in what["starts"]
        ]
        status = _exit_status(first_failure(processes))
        if status:
            os.write(what["failures"], bytes([status]))
        return status
    finally:
        _end_the_others()


def _furnish(name: str, hosts: str) -> None:
    """Give this process a host's name, file systems and IPC."""
    _call("unshare", _FLAGS["mnt"] | _FLAGS["uts"] | _FLAGS["ipc"])
    socket.sethostname(name)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc")
    _mount("sysfs", "/sys", "sysfs")  # lists the network devices of who mounts it
    _mount("tmpfs", "/dev/shm", "tmpfs")
    names = Path("/dev/shm/hosts")
    names.write_text(hosts, encoding="ascii")
    _mount(str(names), "/etc/hosts", None, _MS_BIND)
    names.unlink()


def _end_the_others() -> None:
    """End all other processes of this host: SIGTERM to all, and a little less time than the command gives the host."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal's Ctrl-C comes to all, and SIGTERM after it from the command
    deadline = time.monotonic() + GRACE_S - 1
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(-1, signal.SIGTERM)
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _received_bytes() -> dict[str, int]:
    """Return network device -> bytes that it has received, in this network namespace."""
    lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    return {name.strip(): int(counts.split()[0]) for name, _, counts in (line.partition(":") for line in lines)}


def _configure(tool: str, lines: Sequence[str]) -> None:
    done = subprocess.run([tool, "-batch", "-"], input="\n".join(lines) + "\n", text=True, capture_output=True)
    if done.returncode:
        raise ConfigError(f"`{tool}` can't link the hosts: {done.stderr.strip().splitlines()[0]}")


def _own(kind: str) -> str:
    return f"/proc/thread-self/ns/{kind}"


@contextlib.contextmanager
def _unshared(*kinds: str) -> Iterator[None]:
    """Let this thread, or for "pid" its children, be in new namespaces for a while."""
    homes = {kind: os.open(_own(kind), os.O_RDONLY) for kind in kinds}
    try:
        try:
            _call("unshare", sum(_FLAGS[kind] for kind in kinds))
        except OSError as error:
            raise _not_allowed(error) from error
        try:
            yield
        finally:
            for kind, home in homes.items():
                _call("setns", home, _FLAGS[kind])
    finally:
        for home in homes.values():
            os.close(home)


@contextlib.contextmanager
def _inside(network: int) -> Iterator[None]:
    """Let this thread be in a network namespace for a while."""
    home = os.open(_own("net"), os.O_RDONLY)
    try:
        _call("setns", network, _FLAGS["net"])
        yield
    finally:
        _call("setns", home, _FLAGS["net"])
        os.close(home)


def _mount(source: str, target: str, kind: str | None, flags: int = 0) -> None:
    _call("mount", source.encode(), target.encode(), None if kind is None else kind.encode(), flags, None)


def _call(name: str, *args: Any) -> None:
    """Call a function of the C library that returns 0; OSError if it does not."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _not_allowed(error: OSError) -> ConfigError:
    return ConfigError(
        f"this machine does not let root make namespaces, which the hosts are made of ({error.strerror}); "
        "a container needs the capabilities SYS_ADMIN and NET_ADMIN (docker run --privileged)"
    )


def _exit_status(status: int) -> int:
    """Return a process' exit status, or as a shell does 128 more than the signal that ended it."""
    return status if status >= 0 else 128 - status


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    try:
        sys.exit(_be_a_node())
    except ConfigError as error:
        print(f"mcrdl: error: {error}", file=sys.stderr)
        sys.exit(2)
