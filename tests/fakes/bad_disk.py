"""A disk that cannot read some files: a folder shown through FUSE, implemented here so that nothing need be installed.

    with mounted(mount, folder):
        spoil(folder / "name")    # from now on it cannot be read: EIO, and SIGBUS where it is mapped

Data read before stays in memory until the system, or a process that mapped it, releases it, as with a failing disk. A file
that replaces a spoilt one can be read, as it lies elsewhere on the disk. Needs Linux, root and ``/dev/fuse``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

DEVICE: Final = Path("/dev/fuse")
_HEADER: Final = struct.Struct("=IIQQIIIHH")
_ANSWER: Final = struct.Struct("=IiQ")
_ATTRIBUTES: Final = struct.Struct("=6Q10I")
_ENTRY: Final = struct.Struct("=4Q2I")
_OPENED: Final = struct.Struct("=QIi")
_IO: Final = struct.Struct("=QQIIQII")
_SET: Final = struct.Struct("=IIQQQQQQIIIIIIII")
_MAX_BYTES: Final = 1 << 20
_SHORT_LIVED: Final = 0
_MNT_DETACH: Final = 2


def is_possible() -> bool:
    """Whether this process may mount such a disk."""
    return sys.platform == "linux" and os.geteuid() == 0 and DEVICE.exists()


def spoil(file: Path) -> None:
    """Make all further reads of ``file`` (in the mounted folder) fail."""
    file.chmod(file.stat().st_mode | stat.S_ISVTX)


def is_spoilt(file: Path) -> bool:
    """Whether ``file`` (in the mounted folder) cannot be read."""
    return bool(file.stat().st_mode & stat.S_ISVTX)


@contextmanager
def mounted(mount: Path, folder: Path) -> Iterator[None]:
    """Show the existing folder ``folder`` at ``mount``."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.bad_disk", mount, folder], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "mounted\n", "the folder could not be mounted"
            device = mount.stat().st_dev
            ahead = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
            ahead.write_text("1024")  # a request costs more than its bytes
            yield
        finally:
            ctypes.CDLL(None).umount2(os.fsencode(mount), _MNT_DETACH)
            with suppress(subprocess.TimeoutExpired):
                server.wait(5)
            server.kill()


class _Server:
    """Serves the kernel's requests. A node is the kernel's number of a file; 1 is the folder."""

    def __init__(self, device: int, folder: Path) -> None:
        self._device = device
        self._paths: dict[int, Path | None] = {1: folder}
        self._nodes: dict[int, int] = {}
        self._open: dict[int, list[int]] = {}
        self._count = 1
        self._does: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup, 3: self._get, 4: self._set, 9: self._mkdir, 10: self._unlink, 11: self._rmdir, 12: self._rename,
            14: self._opens, 15: self._read, 16: self._write, 17: self._statfs, 18: self._release, 20: self._nothing,
            25: self._nothing, 26: self._init, 27: self._opens_folder, 28: self._list, 29: self._nothing, 30: self._nothing,
            35: self._create, 45: self._rename2,
        }  # fmt: skip

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _MAX_BYTES + (1 << 14))
            except OSError as exc:
                if exc.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # ENODEV: it was unmounted
            _, kind, unique, node, *_ = _HEADER.unpack_from(request)
            if kind in (2, 36, 42):  # forget and interrupt expect no reply
                continue
            code, answer = 0, b""
            try:
                answer = self._does[kind](node, request[_HEADER.size :])
            except KeyError:
                code = -errno.ENOSYS
            except OSError as exc:
                code = -(exc.errno or errno.EIO)
            with suppress(OSError):  # the requester is gone
                os.write(self._device, _ANSWER.pack(_ANSWER.size + len(answer), code, unique) + answer)

    def _init(self, _: int, body: bytes) -> bytes:
        _, _, read_ahead, _ = struct.unpack_from("=4I", body)
        flags = 1 | 1 << 5 | 1 << 22  # concurrent reads, writes of more than a page, requests of many pages
        return struct.pack(
            "=4IHHIIHHI7I", 7, 31, read_ahead, flags, 12, 9, _MAX_BYTES, 1, _MAX_BYTES >> 12, 0, 0, *[0] * 7
        )

    def _path(self, node: int) -> Path:
        path = self._paths.get(node)
        if path is None:
            raise OSError(errno.ENOENT, "gone")
        return path

    def _child(self, node: int, name: bytes) -> Path:
        return self._path(node) / os.fsdecode(name.split(b"\0")[0])

    def _status(self, node: int) -> os.stat_result:
        if self._paths.get(node) is None and self._open.get(node):
            return os.fstat(self._open[node][0])
        return self._path(node).lstat()

    @staticmethod
    def _attributes(status: os.stat_result) -> bytes:
        times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
        seconds, rests = zip(*(divmod(time, 10**9) for time in times), strict=True)
        return _ATTRIBUTES.pack(
            status.st_ino, status.st_size, status.st_blocks, *seconds, *rests, status.st_mode & ~stat.S_ISVTX,
            status.st_nlink, status.st_uid, status.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def _entry(self, path: Path) -> bytes:
        status = path.lstat()
        node = self._nodes.get(status.st_ino)
        if node is None:
            self._count += 1
            node = self._nodes[status.st_ino] = self._count
        self._paths[node] = path
        return _ENTRY.pack(node, 1, _SHORT_LIVED, _SHORT_LIVED, 0, 0) + self._attributes(status)

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._child(node, body))

    def _get(self, node: int, _: bytes) -> bytes:
        return struct.pack("=QII", _SHORT_LIVED, 0, 0) + self._attributes(self._status(node))

    def _set(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, _, accessed, changed, _, accessed_ns, changed_ns, _, mode, *_ = _SET.unpack_from(body)
        path = self._path(node)
        if valid & 1:
            path.chmod(mode | (path.stat().st_mode & stat.S_ISVTX))
        if valid & 8:
            os.truncate(path, size)
        if valid & (16 | 32 | 128 | 256):
            status = path.stat()
            times = [status.st_atime_ns, status.st_mtime_ns]
            if valid & 16:
                times[0] = accessed * 10**9 + accessed_ns
            if valid & 32:
                times[1] = changed * 10**9 + changed_ns
            both = valid & 128 and valid & 256
            os.utime(path, None) if both else os.utime(path, ns=(times[0], times[1]))
        return self._get(node, b"")

    def _mkdir(self, node: int, body: bytes) -> bytes:
        mode, _ = struct.unpack_from("=II", body)
        path = self._child(node, body[8:])
        path.mkdir(mode)
        return self._entry(path)

    def _forget(self, path: Path) -> None:
        """Remove the name of the file at ``path``; processes that have it open or mapped keep it."""
        with suppress(FileNotFoundError):
            node = self._nodes.pop(path.lstat().st_ino, None)
            if node is not None:
                self._paths[node] = None

    def _unlink(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body)
        self._forget(path)
        path.unlink()
        return b""

    def _rmdir(self, node: int, body: bytes) -> bytes:
        self._child(node, body).rmdir()
        return b""

    def _move(self, node: int, target_node: int, names: bytes) -> bytes:
        old, new = names.split(b"\0")[:2]
        source, target = self._child(node, old), self._child(target_node, new)
        self._forget(target)
        source.rename(target)
        moved = self._nodes.get(target.lstat().st_ino)
        if moved is not None:
            self._paths[moved] = target
        return b""

    def _rename(self, node: int, body: bytes) -> bytes:
        return self._move(node, *struct.unpack_from("=Q", body), body[8:])

    def _rename2(self, node: int, body: bytes) -> bytes:
        target, flags, _ = struct.unpack_from("=QII", body)
        if flags:
            raise OSError(errno.EINVAL, "not here")
        return self._move(node, target, body[16:])

    def _keep(self, node: int, handle: int) -> bytes:
        self._open.setdefault(node, []).append(handle)
        return _OPENED.pack(handle, 0, 0)

    def _opens(self, node: int, body: bytes) -> bytes:
        (flags,) = struct.unpack_from("=I", body)
        write = flags & os.O_ACCMODE != os.O_RDONLY
        return self._keep(node, os.open(self._path(node), os.O_RDWR if write else os.O_RDONLY))

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode, *_ = struct.unpack_from("=4I", body)
        path = self._child(node, body[16:])
        handle = os.open(path, os.O_RDWR | os.O_CREAT | (flags & (os.O_EXCL | os.O_TRUNC)), mode & 0o777)
        entry = self._entry(path)
        return entry + self._keep(struct.unpack_from("=Q", entry)[0], handle)

    def _opens_folder(self, _: int, __: bytes) -> bytes:
        return _OPENED.pack(0, 0, 0)

    def _read(self, _: int, body: bytes) -> bytes:
        handle, offset, size, *_ = _IO.unpack_from(body)
        if os.fstat(handle).st_mode & stat.S_ISVTX:
            raise OSError(errno.EIO, "a bad sector")
        return os.pread(handle, size, offset)

    def _write(self, _: int, body: bytes) -> bytes:
        handle, offset, size, *_ = _IO.unpack_from(body)
        return struct.pack("=II", os.pwrite(handle, body[_IO.size : _IO.size + size], offset), 0)

    def _release(self, node: int, body: bytes) -> bytes:
        (handle,) = struct.unpack_from("=Q", body)
        self._open[node].remove(handle)
        os.close(handle)
        return b""

    def _statfs(self, _: int, __: bytes) -> bytes:
        found = os.statvfs(self._path(1))
        return struct.pack(
            "=5Q4I6I", found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree, found.f_bsize, 255,
            found.f_frsize, 0, *[0] * 6,
        )  # fmt: skip

    def _list(self, node: int, body: bytes) -> bytes:
        _, offset, size, *_ = _IO.unpack_from(body)
        answer = b""
        for place, path in enumerate(sorted(self._path(node).iterdir())):
            name = os.fsencode(path.name)
            kind = stat.S_IFMT(path.lstat().st_mode) >> 12
            entry = struct.pack("=QQII", path.lstat().st_ino, place + 1, len(name), kind) + name
            entry += b"\0" * (-len(entry) % 8)
            if place < offset:
                continue
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def _nothing(self, _: int, __: bytes) -> bytes:
        return b""


def main(mount: str, folder: str) -> None:
    device = os.open(DEVICE, os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"bad_disk", os.fsencode(mount), b"fuse", 6, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    _Server(device, Path(folder)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
