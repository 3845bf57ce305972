"""Memory limits: the system's, those of control groups of both versions, the process's own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from homespec.models.machine import (
    GIB,
    DeviceMemory,
    Machine,
    MemoryLimit,
    container_limits,
    linux_memory,
    read_machine,
    vm_stat_free,
)

MIB = 1 << 20


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")
    return folder


def test_the_systems_own_figures(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        "MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:  3000 kB\nCached: 9 kB\n"
    )
    assert linux_memory(meminfo) == (8000 * 1024, 3000 * 1024)
    meminfo.write_text("MemTotal:  8000 kB\nMemFree:  100 kB\nCached:  900 kB\n")  # an old kernel
    assert linux_memory(meminfo) == (8000 * 1024, 1000 * 1024)
    assert linux_memory(tmp_path / "absent") is None


def test_version_2_counts_every_group_up_to_the_root(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/outer/inner\n")
    mount = tmp_path / "mount"
    outer = write(mount / "outer", memory__max=900 * MIB, memory__current=300 * MIB)
    write(outer, memory__stat=f"active_file {50 * MIB}\ninactive_file {70 * MIB}\nanon 5")
    inner = write(outer / "inner", memory__max="max", memory__current=200 * MIB)
    write(inner, memory__high=800 * MIB, memory__stat="inactive_file 0")
    limits = container_limits(below=8 * GIB, proc=proc, mount=mount)
    found = {(limit.total_bytes // MIB, limit.free_bytes // MIB) for limit in limits}
    # Cached file pages go when room is needed: 300 - 120 MiB are held.
    assert found == {(800, 600), (900, 720)}
    assert {limit.kind for limit in limits} == {"container"}


def test_version_1_and_a_path_seen_from_inside(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("9:name=systemd:/x\n4:cpu,memory:/docker/0123\n0::/\n")
    root = write(
        tmp_path / "mount" / "memory",
        memory__limit_in_bytes=600 * MIB,
        memory__usage_in_bytes=500 * MIB,
        memory__stat=f"total_inactive_file {90 * MIB}\ntotal_active_file {60 * MIB}\n"
        f"total_mapped_file {40 * MIB}\ninactive_file 1",
    )
    [limit] = container_limits(below=8 * GIB, proc=proc, mount=root.parent)
    # 150 MiB are cached, 40 of them mapped by somebody: 500 - 110 are held.
    assert (limit.total_bytes, limit.free_bytes) == (600 * MIB, 210 * MIB)


@pytest.mark.parametrize("bound", ["max", str(2**63 - 4096), str(64 * GIB)])
def test_no_limit_is_none(tmp_path: Path, bound: str) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/\n")
    mount = write(tmp_path / "mount", memory__max=bound, memory__current=5, memory__stat="a 1")
    assert container_limits(below=8 * GIB, proc=proc, mount=mount) == []


def test_a_container_that_is_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/\n")
    mount = write(tmp_path / "mount", memory__max=MIB, memory__current=2 * MIB, memory__stat="a 1")
    [limit] = container_limits(below=8 * GIB, proc=proc, mount=mount)
    assert limit.free_bytes == 0
    assert limit.room() < 0


def test_macos_counts_what_it_would_give_up() -> None:
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                  100.\nPages active:               900.\n"
        "Pages inactive:               50.\nPages speculative:            7.\n"
        "Pages wired down:            400.\nPages purgeable:              3.\n"
    )
    assert vm_stat_free(text) == 160 * 16384


@pytest.mark.parametrize(
    ("limit", "reserve"),
    [
        (MemoryLimit("machine", 2 * GIB, GIB), GIB),
        (MemoryLimit("machine", 64 * GIB, GIB), 64 * GIB // 10),
        (MemoryLimit("container", 2 * GIB, GIB), 2 * GIB // 10),
        (MemoryLimit("process", 2 * GIB, GIB), 0),
    ],
)
def test_the_reserve_fits_the_kind_of_limit(limit: MemoryLimit, reserve: int) -> None:
    assert limit.default_reserve_bytes == reserve
    assert limit.room() == GIB - reserve
    assert limit.room(5) == GIB - 5


def test_the_tightest_limit_is_the_one_with_the_least_room() -> None:
    ram = MemoryLimit("machine", 8 * GIB, 2 * GIB)  # 1 GiB beside its reserve
    container = MemoryLimit("container", 3 * GIB, 2 * GIB - 5)  # less free, more room
    machine = Machine((ram, container))
    assert machine.tightest == ram
    assert (machine.ram_total_bytes, machine.ram_free_bytes) == (8 * GIB, 2 * GIB)
    assert machine.limited_by == "machine"
    assert Machine(()).tightest is None


def test_integrated_devices_count_only_where_there_is_no_other() -> None:
    igpu = DeviceMemory("iGPU", GIB, GIB, kind="igpu", unified=True)
    gpu, silent = DeviceMemory("GPU0", GIB, GIB), DeviceMemory("GPU1", 0, 0)
    limits = (MemoryLimit("machine", GIB, GIB),)
    assert Machine(limits, (igpu, gpu, silent)).offload_devices == (gpu,)
    assert Machine(limits, (igpu, silent)).offload_devices == (igpu,)
    assert Machine(limits, (silent,)).offload_devices == ()


def test_small_devices_keep_an_eighth_free() -> None:
    device = DeviceMemory("GPU0", 4 * GIB, 4 * GIB)
    assert device.default_reserve_bytes == GIB // 2
    assert replace(device, total_bytes=24 * GIB).default_reserve_bytes == GIB


@pytest.mark.skipif(sys.platform != "linux", reason="address-space limits hold on Linux alone")
def test_the_address_space_limit_of_this_process_is_seen() -> None:
    limit = 700 << 20
    script = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
        "from homespec.models.machine import read_machine\n"
        "found = {limit.kind: limit for limit in read_machine().limits}['process']\n"
        "print(found.total_bytes, found.free_bytes)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    total, free = map(int, ran.stdout.split())
    assert total == limit
    assert limit - (200 << 20) < free < limit


def test_this_machine() -> None:
    machine = read_machine()
    assert machine.tightest is not None
    assert 0 < machine.ram_free_bytes <= machine.ram_total_bytes
