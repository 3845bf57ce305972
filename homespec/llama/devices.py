"""The devices llama.cpp can compute on, and the processors it should use."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homespec.errors import UsageError
from homespec.llama.library import ggml

_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}


@dataclass(frozen=True, slots=True)
class Device:
    """A device as ggml reports it; memory in bytes (for the CPU: the machine's RAM)."""

    index: int
    name: str
    description: str
    kind: str  # cpu, gpu, igpu or accel
    free_bytes: int
    total_bytes: int

    @property
    def offloads(self) -> bool:
        """Whether layers can be placed on it."""
        return self.kind in ("gpu", "igpu")


def devices() -> list[Device]:
    """All devices, in ggml's order: CUDA, ROCm, Vulkan, Metal and the CPU count alike."""
    count = _function("ggml_backend_dev_count", ctypes.c_size_t)
    return [_device(i) for i in range(count())]


def offload_devices(names: list[str] | None = None) -> list[Device]:
    """The devices that take layers; `names` picks some of them by name, in that order.

    Raises UsageError for a name that no device has.
    """
    usable = [device for device in devices() if device.offloads]
    if names is None:
        return usable
    by_name = {device.name.lower(): device for device in usable}
    for name in names:
        if name.lower() not in by_name:
            known = ", ".join(device.name for device in usable) or "none"
            raise UsageError(
                f"There is no device {name!r} to offload to.", hint=f"Devices here: {known}."
            )
    return [by_name[name.lower()] for name in names]


def device_handle(device: Device) -> int:
    """The ggml_backend_dev_t of a device, as an address."""
    return int(_function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)(device.index))


def _device(index: int) -> Device:
    handle = _function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)(index)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory = _function(
        "ggml_backend_dev_memory", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    )
    memory(handle, ctypes.byref(free), ctypes.byref(total))
    kind = _function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle)
    name, description = (
        _function(f"ggml_backend_dev_{what}", ctypes.c_char_p, ctypes.c_void_p)(handle).decode()
        for what in ("name", "description")
    )
    kind_name = _KINDS.get(kind, "accel")
    return Device(index, name, description, kind_name, free.value, total.value)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ggml(), name)
    function.restype, function.argtypes = result, list(arguments)
    return function


def num_threads() -> int:
    """Physical cores this process may use: affinity and cgroup quota counted, siblings not."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = {_core_of(cpu) for cpu in allowed} if allowed else set(range(os.cpu_count() or 1))
    limit = _cgroup_quota()
    return max(1, min(len(cores), round(limit)) if limit else len(cores))


def cpu_name() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Hardware", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """The instruction sets the processor has, as Linux names them; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return sorted(found.partition(":")[2].split())


def _core_of(cpu: int) -> tuple[str, str] | int:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (
            (topology / "physical_package_id").read_text().strip(),
            (topology / "core_id").read_text().strip(),
        )
    except OSError:
        return cpu


def _cgroup_quota() -> float | None:
    """CPUs the cgroup grants, None without a limit (cgroup v2, then v1)."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        root = Path("/sys/fs/cgroup/cpu")
        quota_us = int((root / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    except (OSError, ValueError):
        return None
