"""Hosts out of Linux namespaces: h1, h2, ... with an sshd each, and h0, from which `flag` reaches them.

A host has its own network, processes, name, /tmp and /run; other files are those of this machine. Nothing has a name
outside of the namespaces, so all of it is gone when this process ends. The machine has no route to the hosts.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flagcore.launchers import guard

ROOT = Path(__file__).parents[4]
NETWORK, FAST_NETWORK = "10.77.0", "10.78.0"
PORT = "p"
"""Starts the name of a host's port at the switch, which is a bridge on h0."""
TMP_BYTES = 256 << 20
ESTABLISHED, LISTEN = "01", "0A"
"""States in /proc/net/tcp."""
NAMESPACES = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "ssh", "ssh-keygen")
SLURM = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo")
os.environ["PATH"] += ":/usr/sbin:/sbin"
SSHD = shutil.which("sshd") or ""
RAY = str(Path(sys.executable).parent / "ray")

BOOT = """\
set -e
name=$1 bed=$2; shift 2
hostname $name
mount --make-rprivate /
mount --bind $bed/hosts /etc/hosts
ip link set lo up
if [ $name = h0 ]; then
    home=$(getent passwd 0 | cut -d: -f6)  # where ssh looks, whatever HOME is
    mkdir -p $home/.ssh; mount --bind $bed/ssh $home/.ssh
    mount -t tmpfs tmpfs /run
else
    exec 8< "$1" 9< "$2"  # the folders that all hosts share may be in /tmp
    mount -t tmpfs -o size=$3 tmpfs /tmp
    mount -t tmpfs -o size=$3 tmpfs /run
    mkdir -p "$1" "$2" /run/sshd
    mount -c --bind /proc/self/fd/8 "$1"; mount -c --bind /proc/self/fd/9 "$2"
    exec 8<&- 9<&-
fi
echo ready
while :; do sleep 3600 & wait $!; done  # bash reaps orphans
"""
HOST = """\
ip link set lo up; ip link add "$1" type veth peer name other; ip link set other up
ip addr add "$2/24" dev "$1"; ip link set "$1" up
mount -t tmpfs tmpfs /sys/class
for each in $3; do
    port=/sys/class/infiniband/${each%:*}/ports/1
    mkdir -p $port; echo "4: ${each#*:}" > $port/state
done
shift 3; exec "$@"
"""
"""Gives a namespace an interface with an address, and InfiniBand adapters."""
SSHD_CONFIG = """\
HostKey {bed}/ssh/host
AuthorizedKeysFile {bed}/ssh/user.pub
StrictModes no
UsePAM no
MaxStartups 100
"""
SSH_CONFIG = """\
Host h* f*
  IdentityFile {bed}/ssh/user
  UserKnownHostsFile {bed}/ssh/known_hosts
"""
SLURM_CONFIG = """\
ClusterName=bed
SlurmctldHost=h0
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
MinJobAge=60
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/run/slurmctld.log
SlurmdLogFile=/run/slurmd.log
GresTypes=gpu
NodeName=h[1-{count}] CPUs=4 CoresPerSocket=4 RealMemory=1000 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing(*more: str) -> str:
    """Return why there can be no bed here, empty if there can."""
    if os.geteuid():
        return "needs root"
    if absent := [name for name in (*TOOLS, *more) if not shutil.which(name)] + ([] if SSHD else ["sshd"]):
        return f"needs {', '.join(absent)}"
    tried = subprocess.run([*NAMESPACES, "mount", "--make-rprivate", "/"], capture_output=True, text=True)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def need(*more: str) -> None:
    """Skip the test if there can be no bed here, or one of `more` tools is missing."""
    if reason := missing(*more):
        pytest.skip(reason)


class Bed:
    """`count` hosts. `folder` is seen by all of them, and so is the checkout."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        self.folder, self.names = folder, tuple(f"h{number}" for number in range(1, count + 1))
        self.slurm = False
        self._started: dict[str, subprocess.Popen[str]] = {}
        self._first: dict[str, int] = {}
        """The first process of each host, as this machine numbers it."""
        self._prepare()
        self._start("h0")
        self._on_switch("ip link add br0 type bridge")
        self._on_switch(f"ip addr add {NETWORK}.10/24 dev br0")
        self._on_switch("ip link set br0 up")
        for name in self.names:
            self.boot(name)

    def _prepare(self) -> None:
        keys = self.folder / "ssh"
        keys.mkdir(mode=0o700)
        for name in ("host", "user"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name))
        (keys / "known_hosts").write_text(f"h*,f* {(keys / 'host.pub').read_text()}")
        (keys / "config").write_text(SSH_CONFIG.format(bed=self.folder))
        (self.folder / "sshd_config").write_text(SSHD_CONFIG.format(bed=self.folder))
        addresses = [f"{NETWORK}.{10 + number} h{number}" for number in range(len(self.names) + 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *addresses, ""]))
        (self.folder / "slurm.conf").write_text(SLURM_CONFIG.format(count=len(self.names)))

    def _start(self, name: str) -> None:
        words = ("bash", "-c", BOOT, "boot", name, str(self.folder), str(self.folder), str(ROOT), str(TMP_BYTES))
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *NAMESPACES, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout
        line = process.stdout.readline()
        assert line == "ready\n", f"{name} does not start: {line}"
        self._started[name] = process
        (self._first[name],) = [
            each for each in guard.all_processes() if (guard.read_ids(each) or (0,))[0] == process.pid
        ]

    def boot(self, name: str) -> None:
        """Start a host, again if it was off: with an empty disk."""
        self._start(name)
        number, first = int(name[1:]), self._first[name]
        port, address = PORT + name, f"02:77:00:00:00:{number:02x}"  # the same after a boot, for the others remember it
        with contextlib.suppress(subprocess.CalledProcessError):
            self._on_switch(f"ip link del {port}")
        self._on_switch(f"ip link add {port} type veth peer name eth0 address {address} netns {first}")
        self._on_switch(f"ip link set {port} master br0 up")
        _run(*f"nsenter -t {first} --net ip addr add {NETWORK}.{10 + number}/24 dev eth0".split())
        _run(*f"nsenter -t {first} --net ip link set eth0 up".split())
        self.run(name, SSHD, "-f", str(self.folder / "sshd_config"))
        if self.slurm:
            self._slurmd(name)

    def add_network(self) -> None:
        """Give the hosts a second network, in which their names are f0, f1, ...

        Each host finds itself at 127.0.1.1, as on Debian, and reaches unknown addresses through the first network.
        """
        lines = ["", *(f"{FAST_NETWORK}.{10 + number} f{number}" for number in range(len(self.names) + 1)), ""]
        with (self.folder / "hosts").open("a") as file:
            file.write("\n".join(lines))
        self._on_switch("ip link add br1 type bridge")
        self._on_switch(f"ip addr add {FAST_NETWORK}.10/24 dev br1")
        self._on_switch("ip link set br1 up")
        for number, name in enumerate(self.names, 1):
            self._on_switch(f"ip link add q{name} type veth peer name eth1 netns {self._first[name]}")
            self._on_switch(f"ip link set q{name} master br1 up")
            own = self.folder / f"hosts-of-{name}"
            own.write_text(f"127.0.1.1 f{number} {name}\n{(self.folder / 'hosts').read_text()}")
            set_up = f"ip addr add {FAST_NETWORK}.{10 + number}/24 dev eth1; ip link set eth1 up"
            route = f"ip route add default via {NETWORK}.10 dev eth0; mount --bind {own} /etc/hosts"
            self.run(name, "sh", "-ec", f"{set_up}; {route}")

    def command(self, name: str, *argv: str) -> list[str]:
        """Return the command that runs `argv` on a host, without ssh."""
        where = ("--net", "--uts", "--ipc", "--mount", "--pid", f"--wd={self.folder}")
        return ["nsenter", "-t", str(self._first[name]), *where, "--", *argv]

    def run(self, name: str, *argv: str) -> str:
        """Run a command on a host and return what it prints."""
        return _run(*self.command(name, *argv))

    def start(self, name: str, *argv: str, **how: Any) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return subprocess.Popen(self.command(name, *argv), text=True, **how)

    def _on_switch(self, command: str) -> None:
        _run("nsenter", "-t", str(self._first["h0"]), "--net", *command.split())

    def cut(self, name: str) -> None:
        """Drop all that is sent to or from a host; its link stays up."""
        self._on_switch(f"ip link set {PORT}{name} nomaster")

    def restore(self, name: str) -> None:
        """Undo `cut`."""
        self._on_switch(f"ip link set {PORT}{name} master br0")

    def kill(self, name: str) -> None:
        """End all processes of a host at once; their connections are closed."""
        os.kill(self._first[name], signal.SIGKILL)
        self._started[name].wait()

    def poweroff(self, name: str) -> None:
        """End a host; its connections stay open and silent."""
        self.cut(name)
        self.kill(name)

    def boot_all(self) -> None:
        """Start the hosts that are off."""
        for name in self.names:
            if self._started[name].poll() is not None:
                self.boot(name)

    def fill(self, name: str) -> None:
        """Leave no space on the disk of a host."""
        self.run(name, "sh", "-c", "head -c 1T /dev/zero > /tmp/filled 2> /dev/null || true")

    def unfill(self, name: str) -> None:
        """Undo `fill`."""
        self.run(name, "rm", "-f", "/tmp/filled")

    def join(self, name: str, group: Path) -> None:
        """Move all processes of a host to a cgroup."""
        for pid in guard.all_processes():
            if pid == self._first[name] or self.runs(pid, name):
                with contextlib.suppress(OSError):
                    (group / "cgroup.procs").write_text(str(pid))

    def set_rate(self, name: str, rate: str) -> None:
        """Give the link of a host, in both directions, a rate such as 200mbit."""
        bucket = f"root tbf rate {rate} burst 64k latency 200ms"
        self._on_switch(f"tc qdisc replace dev {PORT}{name} {bucket}")
        _run(*f"nsenter -t {self._first[name]} --net tc qdisc replace dev eth0 {bucket}".split())

    def need_slurm(self) -> None:
        """Start Slurm once. Skip the test where its tools are missing."""
        need(*SLURM)
        if not self.slurm:
            self.start_slurm()

    def start_slurm(self) -> None:
        """Start Slurm: its controller on h0, a daemon on every other host. Wait until all are idle."""
        self.slurm = True
        self._with_slurm_conf("h0", "slurmctld")
        for name in self.names:
            self._slurmd(name)
        deadline = time.monotonic() + 30
        while self.run("h0", "sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() != [*self.names]:
            assert time.monotonic() < deadline, self.run("h0", "sh", "-c", "sinfo -R; tail /run/slurmctld.log")
            time.sleep(0.2)

    def start_ray(self) -> str:
        """Start Ray: its head on h0, a new node on every other host. Return the address of the cluster."""
        for name in ("h0", *self.names):
            self.run(name, RAY, "stop", "--force")
        address = f"{NETWORK}.10:6379"
        common = ("start", "--disable-usage-stats", "--object-store-memory=80000000")
        head = ("--head", f"--node-ip-address={NETWORK}.10", "--num-cpus=0", "--include-dashboard=false")
        self.run("h0", RAY, *common, *head)
        for number, name in enumerate(self.names, 11):
            own = (f"--address={address}", f"--node-ip-address={NETWORK}.{number}", "--num-cpus=1")
            self.run(name, RAY, *common, *own)
        return address

    def _slurmd(self, name: str) -> None:
        self._with_slurm_conf(name, "slurmd")

    def _with_slurm_conf(self, name: str, daemon: str) -> None:
        folder = "mkdir -p /run/slurm /run/slurmctld /run/slurmd; mount -t tmpfs tmpfs /etc/slurm"
        files = f"cp {self.folder}/slurm.conf /etc/slurm; echo CgroupPlugin=cgroup/v1 > /etc/slurm/cgroup.conf"
        files += "; for n in 0 1 2 3 4 5 6 7; do mknod -m 666 /run/gpu$n c 1 3; done"  # Slurm wants character devices
        files += "; echo 'Name=gpu File=/run/gpu[0-7]' > /etc/slurm/gres.conf"
        self.run(name, "sh", "-c", f"{folder}; {files}; {daemon}")

    def processes(self, name: str) -> list[int]:
        """Return the processes of trials on a host, agents and guards included, as this machine numbers them."""
        return [pid for pid in guard.all_processes() if self.runs(pid, name) and _is_of_a_trial(pid)]

    def runs(self, pid: int, name: str) -> bool:
        """Whether a process runs on a host; its first process, which the bed needs, does not count."""
        first = self._first[name]
        with contextlib.suppress(OSError):
            return pid != first and os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(f"/proc/{first}/ns/pid")
        return False

    def orphans(self, name: str) -> list[int]:
        """Return the processes of trials on a host whose connection from h0 is gone."""
        ports = self._ports("h0", ESTABLISHED)
        return [pid for pid in self.processes(name) if _client_port(pid) not in ports]

    def listening(self, name: str) -> set[int]:
        """Return the TCP ports on which a host listens."""
        return self._ports(name, LISTEN)

    def _ports(self, name: str, state: str) -> set[int]:
        both = b"".join(guard.read_proc(self._first[name], f"net/{kind}") for kind in ("tcp", "tcp6"))
        lines = [each.split() for each in both.decode().splitlines()]
        return {int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == state}

    def root(self, name: str) -> Path:
        """Return where this machine sees the files of a host."""
        return Path(f"/proc/{self._first[name]}/root")

    def close(self) -> None:
        """End all hosts."""
        for process in self._started.values():
            process.kill()
            process.wait()


def _is_of_a_trial(pid: int) -> bool:
    """Whether a process is an agent, or was started by one."""
    marked = b"FLAGCORE_LAUNCH=" in guard.read_proc(pid, "environ")
    return marked or b"flagcore" in guard.read_proc(pid, "cmdline")


def _client_port(pid: int) -> int:
    """Return the port on h0 of the connection by which a process was started; 0 if it has ended."""
    found = re.search(rb"\0SSH_CONNECTION=\S+ (\d+) ", b"\0" + guard.read_proc(pid, "environ"))
    return int(found[1]) if found else 0


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
    return done.stdout
