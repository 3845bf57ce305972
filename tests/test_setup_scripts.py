"""scripts/setup: what it finds, which flags it takes, what it says when a build fails."""

from __future__ import annotations

import io
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import first_run  # noqa: E402
from setup_steps import (  # noqa: E402
    backends,
    diagnosis,
    environment,
    process,
    progress,
    recipe,
    toolchain,
    wheel,
)
from setup_steps.toolchain import KEEP_STORES, WITHOUT_AMX, Amx  # noqa: E402

SETUP = ROOT / "scripts" / "setup"
TRAP = Path(__file__).with_name("amx_trap.cpp")


@pytest.fixture(scope="module")
def compilers() -> toolchain.Toolchain:
    try:
        return toolchain.find_toolchain()
    except diagnosis.SetupError as error:
        pytest.skip(error.message)


# --- the compiler and AMX ---


def test_the_native_macros_are_those_of_this_cpu(compilers: toolchain.Toolchain) -> None:
    if platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("reads the feature list of x86-64 Linux")
    cpu = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    for feature in ("avx", "avx2", "fma", "f16c", "avx512f"):
        assert (f"__{feature.upper()}__" in compilers.native_macros) == (feature in cpu), feature


@pytest.mark.skipif(sys.platform != "linux", reason="is about the linker of Linux")
def test_copies_of_the_cpp_runtime_are_kept_apart(
    compilers: toolchain.Toolchain, tmp_path: Path
) -> None:
    lone = tmp_path / "c++"  # a compiler that was moved away from its shared runtime
    lone.write_text(
        "#!/bin/sh\n"
        'case "$1" in -print-file-name=libstdc++.so) echo libstdc++.so;; '
        f'*) exec {compilers.cxx} "$@";; esac\n'
    )
    lone.chmod(0o755)
    flags = toolchain.choose_link_flags(str(lone))
    if not flags:
        pytest.skip("this compiler has no libstdc++.a")
    assert toolchain.choose_link_flags(compilers.cxx) == ()
    source = tmp_path / "library.cpp"
    source.write_text('#include <iostream>\nextern "C" void hello() { std::cerr << 1.5; }\n')
    exported = []
    for added in ((), flags):
        library = tmp_path / "library.so"
        command = [compilers.cxx, "-fPIC", "-shared", "-static-libstdc++", *added, source]
        subprocess.run([*command, "-o", library], check=True)
        listing = subprocess.check_output(["nm", "-D", "--defined-only", library], text=True)
        exported.append(listing.split()[2::3])
    assert "_ZSt4cerr" in exported[0]
    assert "hello" in exported[1]
    assert "_ZSt4cerr" not in exported[1]


def test_compilers_that_do_not_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(diagnosis.SetupError, match="/bin/false"):
        toolchain.find_toolchain()


def test_the_flags_chosen_here_leave_no_miscompiled_amx(compilers: toolchain.Toolchain) -> None:
    choice = toolchain.choose_amx_flags(lambda flags: toolchain.probe_amx(compilers.cxx, flags))
    assert toolchain.probe_amx(compilers.cxx, choice.flags) is not Amx.BROKEN


class TestProbeAsOnACpuWithAmx:
    """The probe compiled for AMX; on a CPU without it, a trap judges the tile configuration."""

    @pytest.fixture
    def extra(self, compilers: toolchain.Toolchain) -> Sequence[str | Path]:
        if sys.platform != "linux" or platform.machine() != "x86_64":
            pytest.skip("AMX is a matter of x86-64 Linux")
        if "__AMX_TILE__" in compilers.native_macros:
            return ()
        return ("-mamx-tile", "-mamx-int8", TRAP)

    def test_a_configuration_whose_stores_are_kept_is_sound(
        self, compilers: toolchain.Toolchain, extra: Sequence[str | Path]
    ) -> None:
        assert toolchain.probe_amx(compilers.cxx, ["-O0"], extra) is Amx.SOUND

    def test_the_flags_chosen_for_this_compiler_cure_it(
        self, compilers: toolchain.Toolchain, extra: Sequence[str | Path]
    ) -> None:
        def probe(flags: Sequence[str]) -> Amx:
            return toolchain.probe_amx(compilers.cxx, flags, extra)

        choice = toolchain.choose_amx_flags(probe)
        assert probe(choice.flags) is (Amx.ABSENT if choice.flags == WITHOUT_AMX else Amx.SOUND)

    def test_gcc_12_is_caught(
        self, compilers: toolchain.Toolchain, extra: Sequence[str | Path]
    ) -> None:
        if "clang" in compilers.version or not re.search(r"\b12\.\d+\.\d+", compilers.version):
            pytest.skip(f"another compiler: {compilers.version}")
        assert toolchain.probe_amx(compilers.cxx, (), extra) is Amx.BROKEN

    def test_without_amx_nothing_of_it_is_compiled(
        self, compilers: toolchain.Toolchain, extra: Sequence[str | Path]
    ) -> None:
        assert toolchain.probe_amx(compilers.cxx, WITHOUT_AMX, extra) is Amx.ABSENT


@pytest.mark.parametrize(
    ("states", "flags"),
    [
        ({(): Amx.SOUND}, ()),
        ({(): Amx.DENIED}, ()),
        ({(): Amx.BROKEN, KEEP_STORES: Amx.SOUND}, KEEP_STORES),
        ({(): Amx.BROKEN, KEEP_STORES: Amx.BROKEN}, WITHOUT_AMX),
    ],
)
def test_amx_is_cured_or_left_out(
    states: Mapping[tuple[str, ...], Amx], flags: tuple[str, ...]
) -> None:
    assert toolchain.choose_amx_flags(lambda tried: states[tuple(tried)]).flags == flags


# --- the backend ---


class OtherMachine(backends.System):
    """A machine with these files, programs, and outputs of programs."""

    def __init__(
        self,
        *files: str,
        outputs: Mapping[str, str] | None = None,
        system: str = "linux",
    ) -> None:
        self.files = files
        self.outputs = outputs or {}
        self.platform = system

    def which(self, name: str, *folders: str) -> str:
        return f"/bin/{name}" if any(line.split()[0] == name for line in self.outputs) else ""

    def output(self, *command: str) -> str:
        return self.outputs.get(" ".join((Path(command[0]).name, *command[1:])), "")

    def exists(self, *patterns: str) -> bool:
        return any(Path(file).match(pattern) for file in self.files for pattern in patterns)


NVCC = {"nvcc --version": "Cuda compilation tools, release 12.4, V12.4.131"}
GPU = {"nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader": "RTX 3060, 8.6"}
ROCM = {
    "hipcc": "",
    "hipconfig -l": "/opt/rocm/lib/llvm/bin",
    "hipconfig -R": "/opt/rocm",
    "rocm_agent_enumerator": "gfx000\ngfx1100\ngfx1100",
}
VULKAN_FILES = (
    "/dev/dri/renderD128",
    "/usr/include/vulkan/vulkan.h",
    "/usr/lib/x86_64-linux-gnu/libvulkan.so",
)
SPIRV = "/usr/share/cmake/SPIRV-Headers"
GLSLC = {"glslc --version": "shaderc v2023.2"}

MACHINES = [
    (OtherMachine(), "cpu"),
    (OtherMachine(outputs=NVCC), "cpu"),
    (OtherMachine("/dev/nvidia0"), "cpu"),
    (OtherMachine("/dev/nvidia0", outputs=NVCC), "cuda"),
    (OtherMachine(outputs=NVCC | GPU), "cuda"),
    (OtherMachine("/dev/kfd", outputs=ROCM), "rocm"),
    (OtherMachine(outputs=ROCM), "cpu"),
    (OtherMachine(*VULKAN_FILES, SPIRV, outputs=GLSLC), "vulkan"),
    (OtherMachine(*VULKAN_FILES, outputs=GLSLC), "cpu"),
    (OtherMachine(*VULKAN_FILES, SPIRV, outputs=GLSLC | NVCC | GPU), "cuda"),
    (OtherMachine(system="darwin"), "metal"),
]


@pytest.mark.parametrize(("machine", "name"), MACHINES)
def test_a_backend_needs_its_device_and_its_toolkit(machine: OtherMachine, name: str) -> None:
    assert backends.choose_backend(system=machine).name == name


def test_a_gpu_without_its_toolkit_is_told_of() -> None:
    chosen = backends.choose_backend(system=OtherMachine("/dev/nvidia0"))
    assert "nvcc" in chosen.advice
    assert "install the CUDA toolkit" in chosen.advice


def test_rocm_is_built_for_the_gpus_that_are_there() -> None:
    chosen = backends.choose_backend(system=OtherMachine("/dev/kfd", outputs=ROCM))
    assert chosen.cmake["GPU_TARGETS"] == "gfx1100"
    assert chosen.environment["HIPCXX"] == "/opt/rocm/lib/llvm/bin/clang"


def test_this_machine_gets_a_gpu_build_only_with_a_gpu() -> None:
    here = backends.System()
    chosen = backends.choose_backend()
    if not here.exists("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dri/renderD*", "/Applications"):
        assert chosen.name == "cpu"
    assert chosen.reason


def test_a_wish_is_obeyed_or_refused_with_what_is_missing() -> None:
    whole = OtherMachine("/dev/nvidia0", outputs=NVCC)
    assert backends.choose_backend("cpu", whole).name == "cpu"
    assert backends.choose_backend("cuda", OtherMachine(outputs=NVCC)).name == "cuda"
    with pytest.raises(diagnosis.SetupError, match="nvcc") as missing:
        backends.choose_backend("cuda", OtherMachine())
    assert missing.value.exit_code == 4
    with pytest.raises(diagnosis.SetupError, match="gpu is unknown") as unknown:
        backends.choose_backend("gpu", whole)
    assert unknown.value.exit_code == 2


# --- the recipe and the wheel ---


@pytest.fixture
def plain_recipe(monkeypatch: pytest.MonkeyPatch) -> recipe.Recipe:
    for name in recipe.BUILD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    tools = toolchain.Toolchain("cc", "c++", "gcc 12.2.0", frozenset({"__AVX2__"}))
    return recipe.make_recipe(
        "0.3.36", backends.cpu("here"), tools, toolchain.AmxChoice((), "none")
    )


def test_the_key_tells_builds_apart(
    plain_recipe: recipe.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = plain_recipe.toolchain
    others = [
        replace(plain_recipe, version="0.3.37"),
        replace(plain_recipe, backend=backends.choose_backend("cuda", OtherMachine(outputs=NVCC))),
        replace(plain_recipe, toolchain=replace(tools, version="gcc 13.2.0")),
        replace(plain_recipe, toolchain=replace(tools, native_macros=frozenset())),
        replace(plain_recipe, toolchain=replace(tools, link_flags=toolchain.HIDE_RUNTIME)),
        replace(plain_recipe, amx=toolchain.AmxChoice(KEEP_STORES, "cured")),
        replace(plain_recipe, variables={"CMAKE_ARGS": "-DGGML_NATIVE=OFF"}),
    ]
    keys = [each.key for each in (plain_recipe, *others)]
    assert len(set(keys)) == len(keys)
    assert replace(plain_recipe, amx=toolchain.AmxChoice((), "said otherwise")).key == keys[0]


def test_the_flags_join_the_users_own(
    plain_recipe: recipe.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXXFLAGS", "-g")
    cured = toolchain.AmxChoice(KEEP_STORES, "cured")
    made = recipe.make_recipe("0.3.36", plain_recipe.backend, plain_recipe.toolchain, cured)
    variables = made.environment(jobs=3)
    assert variables["CXXFLAGS"] == "-g -fno-tree-dse -fno-dse"
    assert variables["CFLAGS"] == "-fno-tree-dse -fno-dse"
    assert variables["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"
    assert "cmake.define.LLAVA_BUILD=OFF" in made.settings()


def test_metal_is_switched_off_where_the_cpu_is_wished_for() -> None:
    chosen = backends.choose_backend("cpu", OtherMachine(system="darwin"))
    assert chosen.cmake == {"HOMESPEC_METAL": "OFF"}


def test_a_cached_wheel_is_taken_without_a_build(
    plain_recipe: recipe.Recipe, tmp_path: Path
) -> None:
    kept = tmp_path / "wheels" / plain_recipe.key / "llama_cpp_python-0.3.36-py3-none-any.whl"
    kept.parent.mkdir(parents=True)
    kept.touch()
    no_python = tmp_path / "no-python"
    assert wheel.obtain_wheel(plain_recipe, tmp_path, no_python) == kept


def test_a_failed_fetch_says_why_and_keeps_the_log(
    plain_recipe: recipe.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    nowhere = replace(plain_recipe, version="0.0.0.dev1")
    with pytest.raises(diagnosis.SetupError, match="package index could not be reached") as failed:
        wheel.obtain_wheel(nowhere, tmp_path, Path(sys.executable))
    assert failed.value.exit_code == 4
    assert "llama-cpp-python==0.0.0.dev1" in failed.value.message
    assert list(tmp_path.glob("builds/*/build.log"))
    assert not list(tmp_path.glob("wheels/*"))


def test_a_number_of_compilers_that_is_none_is_refused(
    plain_recipe: recipe.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "many")
    (tmp_path / "builds" / plain_recipe.key / "source").mkdir(parents=True)
    with pytest.raises(diagnosis.SetupError, match="PARALLEL_LEVEL=many") as refused:
        wheel.obtain_wheel(plain_recipe, tmp_path, Path(sys.executable))
    assert refused.value.exit_code == 2


def test_memory_bounds_the_compilers_at_a_time() -> None:
    gib = 1 << 30
    assert wheel.parallel_jobs("cpu", 8, 100 * gib) == 8
    assert wheel.parallel_jobs("cpu", 8, 3 * gib) == 3
    assert wheel.parallel_jobs("cuda", 8, 10 * gib) == 3
    assert wheel.parallel_jobs("cpu", 8, gib // 4) == 1


def test_the_pin_is_what_is_installed_here() -> None:
    from importlib.metadata import version

    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert first_run.pinned_version(pyproject) == version("llama-cpp-python")


# --- what a failure says ---


def test_a_missing_header_is_named(compilers: toolchain.Toolchain, tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("#include <no/such_header.h>\n" + "int x = y;\n" * 50)
    log = tmp_path / "log"
    assert process.run_logged([compilers.cxx, "-c", source, "-o", tmp_path / "a.o"], log) != 0
    found = diagnosis.diagnose(log.read_text().splitlines())
    assert found.cause == "A header file is missing."
    assert any("no/such_header.h" in line for line in found.lines)


def test_only_the_first_ten_telling_lines_are_kept() -> None:
    steps = [f"[{n}/90] c++ -c file{n}.cpp" for n in range(50)]
    errors = [f"file.cpp:{n}:1: error: 'x{n}' was not declared" for n in range(30)]
    found = diagnosis.diagnose([*steps, "", *errors, "error: subprocess-exited-with-error"])
    assert list(found.lines) == errors[:10]


def test_a_cmake_error_comes_with_its_text() -> None:
    log = ["-- Found Threads: TRUE", "CMake Error at CMakeLists.txt:5 (message):", "", "  Too old"]
    assert diagnosis.telling_lines(log) == (log[1], "Too old")


def test_a_log_without_errors_shows_its_end() -> None:
    log = [f"step {n}" for n in range(30)]
    assert list(diagnosis.telling_lines(log)) == log[-10:]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "memory"),
        ("/tmp/ccX.s: fatal error: write failed: No space left on device", "disk is full"),
        ("#error -- unsupported GNU version! gcc versions later than 13 are not", "CUDA toolkit"),
        ("CMake Error: No CMAKE_CXX_COMPILER could be found.", "compiler"),
        ('  Could not find a package provided by "SPIRV-Headers"', "Vulkan"),
    ],
)
def test_common_causes_are_named_with_a_cure(line: str, cause: str) -> None:
    found = diagnosis.diagnose(["[1/2] c++ -c a.cpp", line])
    assert cause in found.cause
    assert found.hint
    assert found.is_out_of_memory == (cause == "memory")


@pytest.mark.parametrize(
    ("os_release", "command"),
    [
        ("ID=debian\n", "sudo apt install build-essential"),
        ('ID=linuxmint\nID_LIKE="ubuntu debian"\n', "sudo apt install build-essential"),
        ("NAME=Fedora\nID=fedora\n", "sudo dnf install gcc gcc-c++"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', "sudo zypper install gcc gcc-c++"),
    ],
)
def test_what_to_install_is_said_in_the_systems_own_words(os_release: str, command: str) -> None:
    family = diagnosis.system_family(os_release)
    assert diagnosis.how_to_install("compiler", family) == command


# --- progress and processes ---


def test_progress_is_sparse_where_no_terminal_reads_it() -> None:
    now = [0.0]
    stream = io.StringIO()
    shown = progress.Progress("compiling", 200.0, stream=stream, clock=lambda: now[0])
    for step in range(1, 84):
        now[0] += 2.0
        shown.update(step, 83)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[-1] == "compiling [83/83] 2:46 of about 2:46"


def test_expected_time_leaves_the_guess_for_what_is_seen() -> None:
    now = [0.0]
    shown = progress.Progress("x", 100.0, stream=io.StringIO(), clock=lambda: now[0])
    assert shown.expected_seconds() == 100.0
    now[0] = 150.0
    shown.update(3, 4)
    assert shown.expected_seconds() == pytest.approx(175.0)


def test_an_interruption_ends_the_command_and_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("child"):
            children.append(int(line.split()[1]))
            raise process.Stopped(signal.SIGTERM)

    children: list[int] = []
    command = ["sh", "-c", "sleep 60 & echo child $!; wait"]
    # A shell's background job ignores the interruption, and has to be killed.
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)
    with pytest.raises(process.Stopped):
        process.run_logged(command, tmp_path / "log", on_line=interrupt)
    with pytest.raises(ProcessLookupError):
        _wait_until_gone(children[0])


def _wait_until_gone(pid: int) -> None:
    """Raises ProcessLookupError once the process has ended (a zombie counts as ended)."""
    for _ in range(50):
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            raise ProcessLookupError
        time.sleep(0.1)


# --- the environment and the scripts themselves ---


def test_an_environment_whose_python_is_gone_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(tmp_path / "removed")
    made = environment.Environment(tmp_path)
    made.make()
    subprocess.run([made.python, "-c", "import pip"], check=True)


def test_an_environment_without_its_note_is_not_current(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv").mkdir()
    assert not environment.Environment(tmp_path).is_current(dev=False)


def test_a_python_without_venv_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(diagnosis.SetupError, match="virtual environments") as failed:
        environment.Environment(tmp_path).make()
    assert failed.value.hint == diagnosis.how_to_install("venv")


def test_setup_explains_itself() -> None:
    run = subprocess.run([SETUP, "--help"], capture_output=True, text=True, check=True)
    assert "HOMESPEC_BACKEND" in run.stdout


def test_setup_refuses_what_it_does_not_know() -> None:
    run = subprocess.run([SETUP, "--fast"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "--fast" in run.stderr
    assert "Traceback" not in run.stderr


def test_setup_names_what_to_install_where_python_is_missing(tmp_path: Path) -> None:
    for name in ("dirname", "cat"):
        [program] = [
            path for path in map(Path, (f"/bin/{name}", f"/usr/bin/{name}")) if path.exists()
        ][:1]
        (tmp_path / name).symlink_to(program)
    run = subprocess.run(
        ["/bin/sh", SETUP], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 4
    assert "Python 3.10" in run.stderr
    assert "apt install" in run.stderr
