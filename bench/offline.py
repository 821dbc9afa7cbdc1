"""Compiling kernels for a GPU that is not there: a driver that says H200 and launches nothing.

Triton carries its own assembler, so everything up to the machine code can be checked anywhere: that
a kernel compiles natively (the interpreter takes more), its registers, what it spills, its shared
memory. `pretend()` must be called before a kernel is launched, with TRITON_INTERPRET unset.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

ARCH = 90
MAX_SHARED_BYTES = 232_448
NUM_PROCESSORS = 132
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as the assembler left it. stack_bytes: spilled registers, 0 is good."""

    name: str
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    has_wgmma: bool
    options: str

    @property
    def fits(self) -> bool:
        """Whether a processor can hold one program."""
        return (
            self.shared_bytes <= MAX_SHARED_BYTES and self.registers * self.num_warps * 32 <= 65_536
        )


class _Utils:
    """Stands in for the driver's C module."""

    def __init__(self) -> None:
        self.found: list[Compiled] = []

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What Triton asks for."""
        return {"max_shared_mem": MAX_SHARED_BYTES, "multiprocessor_count": NUM_PROCESSORS}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Nothing to load."""
        return 1, 1, 0, 0, 1024


class OfflineDriver:
    """A Triton driver without a device."""

    def __init__(self) -> None:
        self.utils = _Utils()
        self.kernels: dict[str, Compiled] = {}
        self.num_launches = 0

    def get_current_target(self) -> GPUTarget:
        """An H200."""
        return GPUTarget("cuda", ARCH, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Never used for work."""
        import torch

        return torch.device("meta")

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        """A launcher that counts."""

        def launch(*args: Any) -> None:
            self.num_launches += 1

        return launch


def pretend(pdl: bool = True) -> OfflineDriver:
    """Make every launch from here on compile for an H200 and run nothing; pdl: as on that GPU."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("unset TRITON_INTERPRET: interpreted kernels are never compiled")
    offline = OfflineDriver()
    driver.set_active(offline)

    def options(tensor: Any, wanted: bool) -> dict[str, Any]:
        return {"PDL": True, "launch_pdl": True} if wanted and pdl else {"PDL": False}

    for name, module in list(sys.modules.items()):
        if name.startswith("kernels") and hasattr(module, "pdl_options"):
            module.pdl_options = options  # type: ignore[attr-defined]
    return offline


def ready_interpreter() -> None:
    """Without a GPU: let Triton's interpreter work with NumPy 2.4, as the kernel tests do."""
    if triton.knobs.runtime.interpret:
        importlib.import_module("tests.kernels.util")


def compiled_kernels(*modules: str) -> Iterator[Compiled]:
    """Every kernel that was compiled in this process, of the modules whose names begin so."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(modules or ("kernels",)):
            continue
        for value in vars(module).values():
            if isinstance(value, triton.runtime.JITFunction) and value.__module__ == name:
                for cache in value.device_caches.values():
                    for kernel in cache[0].values():
                        yield _measure(kernel)


def _measure(kernel: Any) -> Compiled:
    """Ask cuobjdump."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        listing = subprocess.run(
            [tool, "-res-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    match = _RESOURCES.search(listing)
    if match is None:
        raise ValueError(f"cuobjdump said nothing of {kernel.name}: {listing[:200]}")
    registers, stack, _, local = (int(group) for group in match.groups())
    names = kernel.src.fn.arg_names
    constants = {names[at[0]]: value for at, value in kernel.src.constants.items() if at}
    shown = {k: v for k, v in constants.items() if isinstance(v, (int, bool)) and k.isupper()}
    return Compiled(
        name=kernel.name,
        num_warps=kernel.metadata.num_warps,
        registers=registers,
        stack_bytes=stack + local,
        shared_bytes=kernel.metadata.shared,
        has_wgmma="wgmma" in kernel.asm["ptx"],
        options=" ".join(f"{k}={int(v)}" for k, v in shown.items()),
    )
