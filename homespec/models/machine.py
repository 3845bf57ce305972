"""What memory this machine has for a model: RAM, the limits laid on this process, devices.

Three kinds of limit can hold at once, and a plan has to keep within all of them:

- `machine`: what the system can hand out without swapping (MemAvailable);
- `container`: a control group's limit, v1 or v2, on the way from this process to the root;
- `process`: the address space (`ulimit -v`), where files mapped and memory never touched count.

The reserve for the rest of the home server is the larger of 1 GiB and 10 % of the RAM. A
container's limit is its own, the rest of the server lives outside of it: 10 % of the limit stay
free. A process limit is shared with nobody, and keeps none.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GIB = 1 << 30
LimitKind = Literal["machine", "container", "process"]
_LABELS: dict[LimitKind, str] = {
    "machine": "RAM",
    "container": "the container's memory limit",
    "process": "the process's address-space limit (ulimit -v)",
}


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound on this process's memory, and what of it is free now."""

    kind: LimitKind
    total_bytes: int
    free_bytes: int

    @property
    def label(self) -> str:
        """How a sentence calls it."""
        return _LABELS[self.kind]

    @property
    def default_reserve_bytes(self) -> int:
        """What stays free unless something else is asked for."""
        if self.kind == "machine":
            return max(GIB, self.total_bytes // 10)
        return self.total_bytes // 10 if self.kind == "container" else 0

    def room(self, reserve_bytes: int | None = None) -> int:
        """The bytes a model may take; negative where the reserve itself is not free."""
        reserve = self.default_reserve_bytes if reserve_bytes is None else reserve_bytes
        return self.free_bytes - reserve


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device llama.cpp can place layers on.

    kind: `gpu` or `igpu`; llama.cpp takes integrated ones only where there is no other.
    unified: its memory is the machine's RAM, so what lies on it counts there too.
    pinned_host: its driver offers pinned host memory; llama.cpp then leaves the CPU's layers as
    they are, instead of copying them into the CPU's fastest layout.
    f16_attention: its flash attention reads f16 only, so caches of other types are copied for it.
    """

    name: str
    total_bytes: int
    free_bytes: int
    kind: str = "gpu"
    unified: bool = False
    pinned_host: bool = True
    f16_attention: bool = False

    @property
    def default_reserve_bytes(self) -> int:
        """1 GiB as llama.cpp's own fitting keeps, an eighth of a smaller device.

        It holds what no plan can list: the matrix library's workspaces, a desktop.
        """
        return min(GIB, self.total_bytes // 8)

    def room(self, reserve_bytes: int | None = None) -> int:
        """The bytes that may be taken."""
        reserve = self.default_reserve_bytes if reserve_bytes is None else reserve_bytes
        return self.free_bytes - reserve


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a model could go. cpu_features: what llama.cpp's CPU backend was built for."""

    limits: tuple[MemoryLimit, ...]
    devices: tuple[DeviceMemory, ...] = ()
    cpu_features: frozenset[str] = frozenset()

    @property
    def tightest(self) -> MemoryLimit | None:
        """The limit with the least room; None where the system tells nothing."""
        return min(self.limits, key=MemoryLimit.room, default=None)

    @property
    def ram_total_bytes(self) -> int:
        """The tightest limit."""
        return self.tightest.total_bytes if self.tightest else 0

    @property
    def ram_free_bytes(self) -> int:
        """What is free of the tightest limit."""
        return self.tightest.free_bytes if self.tightest else 0

    @property
    def limited_by(self) -> LimitKind | None:
        """What sets the tightest limit."""
        return self.tightest.kind if self.tightest else None

    @property
    def offload_devices(self) -> tuple[DeviceMemory, ...]:
        """The devices llama.cpp uses unless told otherwise; unknown memory is none."""
        known = tuple(device for device in self.devices if device.total_bytes)
        discrete = tuple(device for device in known if device.kind == "gpu")
        return discrete or known


def read_machine(
    devices: tuple[DeviceMemory, ...] = (), cpu_features: frozenset[str] = frozenset()
) -> Machine:
    """This machine as it is now; devices and features come from llama.cpp."""
    limits = list(_system_limits())
    if sys.platform == "linux":
        ram = max((limit.total_bytes for limit in limits), default=2**63)
        limits += container_limits(below=ram)
        limits += _process_limits()
    return Machine(tuple(limits), devices, cpu_features)


def _system_limits() -> Iterator[MemoryLimit]:
    found = _macos_memory() if sys.platform == "darwin" else linux_memory()
    if found:
        yield MemoryLimit("machine", *found)


def linux_memory(meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int] | None:
    """(total, available) bytes, None where the file does not tell."""
    fields = _numbers(meminfo)
    if "MemTotal" not in fields:
        return None
    # Kernels before 3.14 have no MemAvailable.
    free = fields.get("MemAvailable", fields.get("MemFree", 0) + fields.get("Cached", 0))
    return fields["MemTotal"] * 1024, free * 1024


def _macos_memory() -> tuple[int, int] | None:
    try:
        total = subprocess.run(
            ["sysctl", "-n", "hw.memsize"], capture_output=True, text=True, check=True, timeout=5
        ).stdout
        pages = subprocess.run(
            ["vm_stat"], capture_output=True, text=True, check=True, timeout=5
        ).stdout
        return int(total), vm_stat_free(pages)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def vm_stat_free(text: str) -> int:
    """The bytes macOS can hand out: free pages, and cached ones it would give up."""
    page = re.search(r"page size of (\d+) bytes", text)
    counts = dict(re.findall(r"^Pages (free|inactive|speculative|purgeable):\s+(\d+)", text, re.M))
    return sum(map(int, counts.values())) * (int(page[1]) if page else 4096)


def container_limits(
    *, below: int, proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> list[MemoryLimit]:
    """The limits of all control groups around this process that are `below` so many bytes."""
    limits = []
    for folder, names in _control_groups(proc, mount):
        totals = [_integer(folder / name) for name in names.limits]
        total = min((value for value in totals if value is not None), default=below)
        used = _integer(folder / names.usage)
        if total < below and used is not None:
            held = used - _reclaimable(folder / "memory.stat", names.stat_prefix)
            limits.append(MemoryLimit("container", total, max(0, total - max(0, held))))
    return limits


@dataclass(frozen=True, slots=True)
class _Names:
    """What a version of control groups calls its files."""

    limits: tuple[str, ...]
    usage: str
    stat_prefix: str


_V1 = _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
# Above `memory.high` a process is slowed down until it stands still.
_V2 = _Names(("memory.max", "memory.high"), "memory.current", "")


def _control_groups(proc: Path, mount: Path) -> Iterator[tuple[Path, _Names]]:
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            roots, names = [mount / "memory"], _V1
        elif not controllers:
            roots, names = [mount, mount / "unified"], _V2
        else:
            continue
        for root in roots:
            inside = [part for part in path.split("/") if part not in ("", "..")]
            # A container without a namespace of its own reads the host's path and sees its root.
            for length in range(len(inside), -1, -1):
                folder = root.joinpath(*inside[:length])
                if (folder / names.usage).is_file():
                    yield folder, names


def _reclaimable(stat: Path, prefix: str) -> int:
    """Cached file pages of a control group that nobody has mapped: they go when room is needed."""
    fields = _numbers(stat)
    cached = sum(fields.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    mapped = fields.get("file_mapped", fields.get(f"{prefix}mapped_file", 0))
    return max(0, cached - mapped)


def _process_limits() -> Iterator[MemoryLimit]:
    import resource  # noqa: PLC0415 - absent on Windows

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        used = _numbers(Path("/proc/self/status")).get("VmSize", 0) * 1024
        yield MemoryLimit("process", limit, max(0, limit - used))


def _numbers(path: Path) -> dict[str, int]:
    """`Name: 12 kB` or `name 12` on each line; empty where the file cannot be read."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    return {name: int(value) for name, value in re.findall(r"^(\w+):?\s+(\d+)", text, re.M)}


def _integer(path: Path) -> int | None:
    """The number in a file; None for `max` and where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
