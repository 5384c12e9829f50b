"""The ssh launcher with the system's ssh and an sshd of this test's own on the loopback device."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flagcore.domain.launch import Launch
from flagcore.launchers.hosts import SSH
from flagcore.launchers.network import free_port
from tests.launchers.processes import ended

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SSHD and shutil.which("ssh")), reason="needs openssh-server and openssh-client"),
]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """Two names of an sshd here. An `ssh` in front of the system's gives it a configuration file."""
    folder, port = tmp_path / "ssh", free_port()
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized_keys").write_text((folder / "user.pub").read_text())
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "StrictModes no\nUsePAM no\nPidFile none\n"
    )
    (folder / "config").write_text(
        f"Host one two\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )
    program = folder / "ssh"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    program.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd changes its root to this folder
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(SSH, "owner", "")  # other tests use this machine, too
    server = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while subprocess.run(["ssh", "one", "true"], capture_output=True).returncode and time.monotonic() < deadline:
        time.sleep(0.1)
    yield "one", "two"
    server.terminate()
    server.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="an sshd of another user cannot start sessions")
def test_a_trial_runs_on_hosts_by_ssh(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    words = ("sh", "-c", 'echo "{node_rank} $WORDS"')
    launch = Launch(argv=words, folder=str(tmp_path / "trial"), hosts=hosts, environment={"WORDS": "a 'b' $c \"d\""})
    exit_record = ended(SSH.start(launch))
    assert (exit_record.code, exit_record.ended_by) == (0, None)
    lines = (tmp_path / "trial" / "stdout.log").read_text().splitlines()
    assert sorted(lines) == ["0 a 'b' $c \"d\"", "1 a 'b' $c \"d\""]
