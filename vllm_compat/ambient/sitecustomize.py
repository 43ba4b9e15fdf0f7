"""For PYTHONPATH: makes a Python that starts with this folder on its path wait for the consumers, then runs the user's
own sitecustomize, if there is one further down the path, as if this file were not there.

Used by `vllm-compat run` and, by hand, with `vllm-compat sitecustomize-dir`. Everything of ours is caught: it must
never break a Python start. Everything of the user's is let through.
"""

import os
import sys


def _load(path, name):
    """A file as a module, without the package around it: importing that means asking for patches."""
    loader = type(__spec__.loader)(name, path)
    module = type(sys)(name)
    loader.exec_module(module)
    return module


def _arm(package):
    route = "run" if os.environ.pop("VLLM_COMPAT_RUN", None) else "sitecustomize"
    try:
        from _vllm_compat_startup import arm
    except Exception:  # noqa: BLE001  # another Python, without vllm_compat, that inherited the path
        return
    try:
        discovery = _load(os.path.join(package, "discovery.py"), "_vllm_compat_discovery")
        arm([each.name for each in discovery.entry_points()], route)
    except Exception as error:  # noqa: BLE001
        try:
            if sys.stderr is not None:
                print(f"vllm_compat: not active: {type(error).__name__}: {error}", file=sys.stderr)
        except Exception:  # noqa: BLE001  # no usable stderr
            pass


def _users_own(here):
    """Runs the next sitecustomize of the path in place of this one."""
    path = [folder for folder in sys.path if os.path.realpath(folder) != here]
    for finder in sys.meta_path:
        spec = finder.find_spec("sitecustomize", path) if hasattr(finder, "find_spec") else None
        if spec is not None:
            from _frozen_importlib import module_from_spec  # importlib.util's, without importlib.util's own imports

            sys.modules["sitecustomize"] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules["sitecustomize"])
            return


_here = os.path.dirname(os.path.realpath(__file__))
_arm(os.path.dirname(_here))
_users_own(_here)
