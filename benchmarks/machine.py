"""What every benchmark prints first: the machine, the versions, the date; and the floors measured in the same run."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

GB = 1e9


def describe(*packages: str) -> str:
    """One line on the machine, one on the versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        found = {key.strip(): value.strip() for key, value in lines.items()}
        flags = found.get("flags", "").split()
        simd = next((name for name in ("avx512_bf16", "avx512f", "avx2") if name in flags), "no AVX2")
        model = (
            f"{found.get('model name', model)} (family {found.get('cpu family')}, model {found.get('model')}), {simd}"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = []
    for name in packages:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} absent")
    return (
        f"{datetime.date.today()}: {os.cpu_count()} cores, {model}, {memory:.0f} GiB, Python {platform.python_version()}\n"
        + ", ".join(versions)
    )


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def drop_caches() -> bool:
    """Forget cached file data, so that a read is cold. False where that needs rights we do not have."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def forget(folder: Path) -> bool:
    """Drop cached data of the files in a folder, and of nothing else: programs stay as warm as they were. False where
    the system has no way."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def sha256_rate(threads: int, size: int = 512 << 20) -> float:
    """Bytes a second of SHA-256 over memory with `threads` threads."""
    block = os.urandom(1 << 20)

    def work() -> None:
        digest = hashlib.sha256()
        for _ in range(size >> 20):
            digest.update(block)

    def all_of_them() -> None:
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return size * threads / timed(all_of_them)


def read_rate(paths: list[Path], threads: int, block: int = 8 << 20) -> float:
    """Bytes a second of reading files front to back, `threads` at once, without looking at them."""
    queue = list(paths)
    lock = threading.Lock()

    def work() -> None:
        buffer = bytearray(block)
        while True:
            with lock:
                if not queue:
                    return
                path = queue.pop()
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def all_of_them() -> None:
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    total = sum(path.stat().st_size for path in paths)
    return total / timed(all_of_them)


def random_file(path: Path, size: int) -> None:
    """`size` bytes that do not compress and do not repeat within 64 MiB."""
    block = os.urandom(min(size, 64 << 20))
    with open(path, "wb") as file:
        written = 0
        while written < size:
            part = block[: size - written]
            file.write(written.to_bytes(8, "little") + part[8:])
            written += len(part)


def peak_memory(pid: int) -> float:
    """High-water mark of resident memory in MiB. (What `wait4` tells starts at the size of the parent.)"""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("VmHWM")), 0.0)
