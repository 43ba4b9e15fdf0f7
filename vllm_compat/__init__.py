"""Makes a consumer library work on newer runtimes by patches applied when the consumer is imported.

Importing this package activates it, before or after the consumer is imported; see `activation.py`.
"""

from _thread import get_ident as _get_ident

__version__ = "0.1.0"

from _vllm_compat_startup import finder as _finder
from vllm_compat.activation import activate, deactivate, require, status
from vllm_compat.errors import CompatError, PatchError, PlanError
from vllm_compat.plan import plan

__all__ = [
    "CompatError",
    "PatchError",
    "PlanError",
    "__version__",
    "activate",
    "deactivate",
    "plan",
    "require",
    "status",
]

# When the import hook imports the engine for an ambient route, that is nobody asking for patches explicitly.
if _get_ident() not in _finder().waking:
    activate("import")
