"""What can go wrong, for people: every text says what is wrong, what was expected and what to do."""


class CompatError(RuntimeError):
    """The consumer cannot be made to work here, or was not. Base of what plans and activation raise.

    A call of the consumer raises ValueError for its input and RuntimeError (such as this one) for what went wrong;
    `vllm_compat.extraction` has errors of its own.

    Deliberately not an ImportError: code that treats a consumer as optional (`try: import ...; except
    ImportError`) must not swallow it and carry on with something half working.
    """


class PlanError(CompatError):
    """What is there cannot be patched: a version, a missing package, a shape, a wrong record or switch."""


class PatchError(CompatError):
    """The plan was good and applying it failed, or it came too late. Everything was rolled back."""
