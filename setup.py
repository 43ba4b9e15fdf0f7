"""What pyproject.toml cannot say: the start-up files lie at the root of site-packages, beside the package.

Python reads `*.pth` and `*.start` files only there. An editable install does not get them: it would run the checkout's
hook in every Python of the environment for as long as the folder exists. `vllm-compat doctor` says what is missing.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

STARTUP = ["_vllm_compat_startup/vllm_compat.pth", "_vllm_compat_startup/vllm_compat.start"]


class BuildWithStartup(build_py):
    def run(self) -> None:
        super().run()
        for source, target in self._startup():
            self.copy_file(source, target, preserve_mode=False)

    def _startup(self) -> list[tuple[str, str]]:
        if self.editable_mode:
            return []
        return [(source, str(Path(self.build_lib, Path(source).name))) for source in STARTUP]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(target for _, target in self._startup())]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *STARTUP]


setup(cmdclass={"build_py": BuildWithStartup})
