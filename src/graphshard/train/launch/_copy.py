# SPDX-License-Identifier: Apache-2.0
"""copy_partition: each host gets its parts, and a JSON that loads there.

::

    WORKSPACE/ip_config.txt        the hosts
    WORKSPACE/DATA/cora.json       the partition's JSON, as it is: its paths are relative
    WORKSPACE/DATA/part0/...       the parts of the host, and no others; with users' ids, if any
    WORKSPACE/DATA/cora.dataset.json   what these ids and the columns mean, if there are ids
    WORKSPACE/SCRIPTS/...          the folder of scripts, if one is given

On the other side ``sh``, ``mkdir``, ``cat``, ``mv`` and ``sha256sum`` (or ``shasum``) are enough.
A file whose SHA-256 digest is the same there is not sent. Others are written under another name
(``.partial``), and renamed once their digest is right; so a copy that was cut short is taken up
where it stood, file by file, and no half-written file is ever read. The JSON goes last.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import shlex
import stat
import subprocess
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..._base.files import TemporaryFolder, check_regular
from ..._base.settings import LONGEST_TIMEOUT
from ...data.id_files import check_id_file, id_files
from ...data.task import task_path
from ...partition.format import read_config
from ...servers import HostAddress, parts_of_host
from ._children import how_ended
from ._hosts import RemoteShell, quoted_path

_MAX_HOSTS_AT_ONCE = 8
_MAX_SOCKET_FOLDER = 60  # characters; the path of a socket has about 100
_NAMES_AT_ONCE = 200
_DIGEST = (
    'd() { if command -v sha256sum >/dev/null; then sha256sum "$1"; else shasum -a 256 "$1"; fi; }'
)


@dataclass(frozen=True)
class FileToCopy:
    """A file, and where it goes.

    Args:
        target: There, relative to the workspace, with ``/`` between folders.
    """

    source: Path
    target: str


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """What was done for one host."""

    host: int
    address: str
    num_sent: int = 0
    num_there: int = 0
    num_bytes: int = 0
    error: str | None = None

    def __str__(self) -> str:
        name = f"host {self.host} ({self.address})"
        if self.error is not None:
            return f"{name}: {self.error}"
        return (
            f"{name}: {self.num_sent} files sent ({self.num_bytes:,} bytes), {self.num_there} "
            "there already"
        )


def copy_partition(
    part_config: str | os.PathLike[str],
    addresses: Sequence[HostAddress],
    shell: RemoteShell,
    workspace: str,
    *,
    data_path: str | None = None,
    script_folder: str | os.PathLike[str] | None = None,
    ip_config: str | os.PathLike[str] | None = None,
    timeout: float = 3600.0,
    on_host: Callable[[HostCopy], None] | None = None,
) -> list[HostCopy]:
    """Copy to each host its parts of a partition, as `graphshard serve` wants them there.

    Args:
        addresses: The hosts; host ``i`` gets the parts that ``parts_of_host`` says.
        workspace: Folder on each host, made if it is not there; ``~/`` is the user's own.
        data_path: Folder of the JSON in the workspace; by default that of ``part_config``, if it
            is a relative path, else the workspace itself.
        script_folder: A folder that goes to the workspace under its name, with what its links lead
            to.
        ip_config: The file of the hosts, which goes to the workspace under its name.
        timeout: Longest time for one file, in seconds.
        on_host: Called for each host once it is done, from a thread.

    Returns:
        What was done, by host. A host that fails does not stop the others: look at ``error``.

    Raises:
        PartitionFormatError: The partition is damaged, or a part is missing here.
        ValueError: There are more hosts than parts, or a path leads out of the workspace.
        OSError: A file cannot be read.
    """
    if not 0 < timeout <= LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout must be above 0 and at most {LONGEST_TIMEOUT:,} seconds (got {timeout})"
        )
    plans = [
        files_of_host(part_config, host, len(addresses), data_path)
        for host in range(len(addresses))
    ]
    more = _scripts(script_folder)
    if ip_config is not None:
        more.append(FileToCopy(Path(ip_config), Path(ip_config).name))
    for plan in plans:
        plan[:0] = more
    digest_of = functools.cache(_digest)  # once, also where several hosts get a file

    def copy(sender: _Sender) -> HostCopy:
        done = sender.send_all(plans[sender.host], digest_of)
        if on_host is not None:
            on_host(done)
        return done

    with TemporaryFolder() as folder, ExitStack() as stack:
        if len(str(folder)) <= _MAX_SOCKET_FOLDER:
            shell = dataclasses.replace(shell, sockets=folder)
        senders = []
        for host, address in enumerate(addresses):
            senders.append(_Sender(host, address, shell, workspace, timeout))
            stack.callback(shell.close, address.address)
        workers = min(_MAX_HOSTS_AT_ONCE, len(addresses))
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        try:
            return list(pool.map(copy, senders))
        except BaseException:  # such as Ctrl-C: what is not whole stays under its other name
            for sender in senders:
                sender.stop()
            raise


def files_of_host(
    part_config: str | os.PathLike[str], host: int, num_hosts: int, data_path: str | None = None
) -> list[FileToCopy]:
    """The files of a partition that one host needs, the JSON last.

    Raises:
        PartitionFormatError: The partition is damaged, or a part is missing here.
        ValueError: There are more hosts than parts, or ``data_path`` leads out of the workspace.
    """
    config = read_config(part_config)
    folder = _folder_of(Path(part_config)) if data_path is None else _inside(data_path)
    config.check_format()
    files = []
    own = parts_of_host(host, num_hosts, config.num_parts)
    for part in own:
        for kind, described in config.files[part].items():
            path = config.open_part(part, kind).path
            files.append(FileToCopy(path, str(folder / described.name)))
    of_users = id_files(part_config, config)
    inside = {str(PurePosixPath(config.files[part]["part_graph"].name).parent) for part in own}
    for name, record in of_users.items():
        if str(PurePosixPath(name).parent) in inside:
            check_id_file(config.path.parent / name, record)
            files.append(FileToCopy(config.path.parent / name, str(folder / name)))
    if of_users:  # what the ids and columns mean
        described_by = task_path(part_config)
        files.append(FileToCopy(described_by, str(folder / described_by.name)))
    return [*files, FileToCopy(config.path, str(folder / config.path.name))]


def _folder_of(part_config: Path) -> PurePosixPath:
    """Where the JSON's folder goes: to the same place, seen from the workspace as from here."""
    if part_config.is_absolute() or ".." in part_config.parts:
        return PurePosixPath(".")
    return PurePosixPath(*part_config.parent.parts)


def _inside(path: str) -> PurePosixPath:
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"rel_data_path must be a path inside the workspace (got {path!r})")
    return relative


def _scripts(folder: str | os.PathLike[str] | None) -> list[FileToCopy]:
    if folder is None:
        return []
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"script_folder must be a folder (got {os.fspath(folder)!r})")
    files: list[FileToCopy] = []
    _add_files(root, Path(os.path.abspath(root)).name, (), files)
    return files


def _add_files(
    folder: Path, target: str, above: tuple[tuple[int, int], ...], files: list[FileToCopy]
) -> None:
    """Add what is in a folder, links followed, as the hosts do not have what they lead to.

    Args:
        target: Its name in the workspace.
        above: Devices and inodes of the folders that it is in.
    """
    status = folder.stat()
    above = (*above, (status.st_dev, status.st_ino))
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path, name = Path(entry.path), f"{target}/{entry.name}"
        try:
            status = path.stat()
        except FileNotFoundError:
            _warn_left_out(path, "is a link that leads nowhere")
            continue
        if stat.S_ISREG(status.st_mode):
            files.append(FileToCopy(path, name))
        elif not stat.S_ISDIR(status.st_mode):
            _warn_left_out(path, "is neither a file nor a folder")
        elif (status.st_dev, status.st_ino) in above:
            _warn_left_out(path, "is a link to a folder that it is in")
        elif entry.name != "__pycache__":
            _add_files(path, name, above, files)


def _warn_left_out(path: Path, why: str) -> None:
    warnings.warn(f"{path} {why}; it is not copied", UserWarning, stacklevel=5)


def _digest(path: Path) -> str:
    """SHA-256 of a file here."""
    check_regular(path)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


class _HostFailed(Exception):
    """Why a host's copy cannot go on."""


class _Sender:
    """What sends files to one host, one after another."""

    def __init__(
        self, host: int, address: HostAddress, shell: RemoteShell, workspace: str, timeout: float
    ) -> None:
        self.host, self.address = host, address.address
        self._shell, self._timeout = shell, timeout
        self._folder = quoted_path(workspace)
        self._running: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Send nothing more."""
        self._is_stopped = True
        if self._running is not None:
            self._running.terminate()

    def send_all(self, files: Sequence[FileToCopy], digest_of: Callable[[Path], str]) -> HostCopy:
        """Send those files that the host does not have."""
        num_sent = num_bytes = 0
        error = None
        try:
            there = self._digests_there(files)
            for file in files:
                digest = digest_of(file.source)
                if there.get(file.target) != digest:
                    self._send(file, digest)
                    num_sent, num_bytes = num_sent + 1, num_bytes + file.source.stat().st_size
        except (_HostFailed, OSError, ValueError) as caught:
            error = str(caught)
        return HostCopy(
            host=self.host,
            address=self.address,
            num_sent=num_sent,
            num_there=0 if error else len(files) - num_sent,
            num_bytes=num_bytes,
            error=error,
        )

    def _digests_there(self, files: Sequence[FileToCopy]) -> dict[str, str]:
        """Digests of those files that the host has with the size that they have here."""
        # The names come by standard input: a line of the size, a line of the name.
        command = (
            f"{_DIGEST}; mkdir -p {self._folder} && cd {self._folder} && "
            'while read -r n && read -r f; do if [ -f "$f" ] && [ "$(wc -c < "$f")" -eq "$n" ]; '
            'then d "./$f" < /dev/null || exit 1; fi; done'
        )
        digests = {}
        for start in range(0, len(files), _NAMES_AT_ONCE):
            some = files[start : start + _NAMES_AT_ONCE]
            for file in some:
                if "\n" in file.target or "\\" in file.target:
                    raise ValueError(f"the name of a file must be plain (got {file.target!r})")
            text = "".join(f"{file.source.stat().st_size}\n{file.target}\n" for file in some)
            for line in self._ask(command, text, "the list of files there").splitlines():
                digest, _, name = line.partition("  ./")
                digests[name] = digest
        return digests

    def _send(self, file: FileToCopy, digest: str) -> None:
        """Send a file, and have it renamed once it is whole there."""
        target = PurePosixPath(file.target)
        # Hosts may share a file system.
        partial, name = shlex.quote(f"./{target}.partial{self.host}"), shlex.quote(f"./{target}")
        mode = "755" if os.access(file.source, os.X_OK) else "644"
        command = (
            f"{_DIGEST}; cd {self._folder} && mkdir -p {shlex.quote(f'./{target.parent}')} && "
            f"if [ -d {name} ]; then echo 'a folder has its name' >&2; exit 1; fi && "
            f"cat > {partial} && s=$(d {partial}) && "
            f'if [ "${{s%% *}}" != {digest} ]; then rm -f {partial}; '
            'echo "it arrived with another SHA-256 digest, ${s%% *}" >&2; exit 1; fi && '
            f"chmod {mode} {partial} && mv -f {partial} {name}"
        )
        self._ask(command, file.source, file.target)

    def _ask(self, command: str, given: str | Path, what: str) -> str:
        """What a command on the host prints, given a text or a file."""
        words = self._shell.to(self.address, f"exec sh -c {shlex.quote(command)}")
        with ExitStack() as stack:
            is_file = isinstance(given, Path)
            stdin = stack.enter_context(open(given, "rb")) if is_file else subprocess.PIPE
            pipe = subprocess.PIPE
            try:
                process = subprocess.Popen(words, stdin=stdin, stdout=pipe, stderr=pipe)
            except FileNotFoundError:
                raise _HostFailed(f"{words[0]} was not found; pass --ssh-command") from None
            self._running = stack.enter_context(process)
            try:
                if self._is_stopped:
                    raise _HostFailed("stopped")
                text = None if isinstance(given, Path) else given.encode()
                printed, said = process.communicate(text, self._timeout)
            except subprocess.TimeoutExpired:
                raise _HostFailed(f"{what}: not done within {self._timeout:g} s") from None
            finally:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
                self._running = None
        if process.returncode:
            lines = said.decode(errors="replace").strip().splitlines()
            how = how_ended(process.returncode)
            raise _HostFailed(f"{what}: {words[0]} ended with {how}: {' '.join(lines[-3:])}")
        return printed.decode(errors="replace")
