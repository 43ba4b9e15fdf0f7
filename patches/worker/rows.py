"""Host memory for one call's rows: an anonymous file that the parent can map."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class HostMemory:
    """Page-aligned host memory of ``size`` bytes, shareable through ``fd`` where the platform has memfd.

    The file has no name, so it cannot be guessed, and it goes with the last process that holds it, however that dies.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd: int | None = None
        self.why_not_shared: str | None = None
        try:
            self.fd = os.memfd_create("vllm_compat_rows", os.MFD_CLOEXEC)
            os.fchmod(self.fd, 0o600)
            os.posix_fallocate(self.fd, 0, size)  # no room is found out here, not by a SIGBUS while copying
            self.memory = mmap.mmap(self.fd, size)
        except (AttributeError, OSError) as error:
            if self.fd is not None:
                os.close(self.fd)
                self.fd = None
            self.why_not_shared = f"{type(error).__name__}: {error}"
            self.memory = mmap.mmap(-1, size)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class HostRows:
    """``[layers, tokens, hidden]`` in host memory; grows to the largest call and is used again for the next one."""

    def __init__(self) -> None:
        self.memory: HostMemory | None = None
        self.rows: torch.Tensor | None = None
        self._pinned: int | None = None
        self._refused = False
        self._warnings: list[str] = []

    def resize(self, layers: int, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """Rows for a call, of the dtype and width of ``like`` ``[.., hidden]``; page-locked if ``like`` is on a GPU."""
        import torch

        hidden = like.shape[-1]
        size = layers * tokens * hidden * like.element_size()
        if self.memory is None or self.memory.size < size:
            self.release()
            self.memory = HostMemory(size)
            self._lock_pages(like.device)
        flat = torch.frombuffer(self.memory.memory, dtype=like.dtype, count=layers * tokens * hidden)
        self.rows = flat.view(layers, tokens, hidden)
        return self.rows

    def _lock_pages(self, device: torch.device) -> None:
        import torch

        assert self.memory is not None
        if device.type != "cuda":
            return
        address = torch.frombuffer(self.memory.memory, dtype=torch.uint8).data_ptr()
        refusal = int(torch.cuda.cudart().cudaHostRegister(address, self.memory.size, 0))
        if refusal == 0:
            self._pinned = address
            return
        if not self._refused:
            self._refused = True
            self._warnings.append(
                f"CUDA does not lock {self.memory.size} bytes of host memory (cudaHostRegister: error {refusal}); "
                "hidden states are copied to pageable memory instead, which is slower and gives the same bytes"
            )
        # Copies to pageable memory work as well, only slower and not beside the next step's compute. But the refusal
        # stays the CUDA runtime's last error, which torch raises after the next kernel launch, so launch one.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)

    def take_warnings(self) -> list[str]:
        """What has not been said yet."""
        warnings, self._warnings = self._warnings, []
        return warnings

    @property
    def is_pinned(self) -> bool:
        return self._pinned is not None

    def release(self) -> None:
        if self._pinned is not None:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = None
        self.rows = None
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def description(self) -> dict[str, Any]:
        """Where the parent finds the rows."""
        assert self.memory is not None and self.rows is not None
        return {
            "pid": os.getpid(),
            "fd": self.memory.fd,
            "why_not_shared": self.memory.why_not_shared,
            "bytes": self.memory.size,
            "shape": tuple(self.rows.shape),
            "dtype": str(self.rows.dtype).removeprefix("torch."),
        }
