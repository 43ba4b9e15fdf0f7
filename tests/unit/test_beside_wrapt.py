"""Our import hook and wrapt's on the same module, whichever came first."""

from __future__ import annotations

from pathlib import Path

import pytest
import wrapt

HOOK = """
    import wrapt
    seen = []
    def hook(module):
        seen.append(module.start)
        def wrapper(wrapped, instance, args, kwargs): return ("theirs", wrapped(*args))
        wrapt.wrap_function_wrapper(module, "start", wrapper)
    wrapt.register_post_import_hook(hook, "fakeuser.gen")
"""


@pytest.mark.parametrize("first", ["ours", "wrapt"])
def test_both_hooks_run(world, check, first: str) -> None:
    (world.engine / "wrapt").symlink_to(Path(wrapt.__file__).parent)
    parts = ["import vllm_compat", HOOK] if first == "ours" else [HOOK, "import vllm_compat"]
    check(
        *parts,
        """
    import fakeuser.gen as gen, fakerun.core as core
    result = gen.start(1)
    assert sorted(result[:1] + result[1][:1]) == ["patched", "theirs"], result
    assert len(seen) == 1 and core.start(1) == ("runtime", 1)
    kinds = [type(gen.__loader__).__name__, type(gen.__spec__.loader).__name__]
    assert "Loader" not in kinds  # ours is gone; old releases of wrapt leave theirs
    vllm_compat.require()
    left = vllm_compat.deactivate()
    assert bool(left) or gen.start(1) == ("theirs", ("runtime", 1))  # what is under or over us stays
    """,
    )
