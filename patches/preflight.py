"""What `vllm-compat doctor` looks at for this pair of consumer and runtime: data, and questions to the machine.

Nothing here imports torch, vLLM or speculators, or opens a device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_compat.patches._names import START_METHOD
from vllm_compat.patches.model_plan import WIDTH, cpu_build, dtype_of, first_number, read_config, text_config
from vllm_compat.registry import Check, Finding, KnownBad, Option, Surroundings
from vllm_compat.versions import matches, release_of

MIB, GIB = 2**20, 2**30

KNOWN_BAD = (
    KnownBad(
        ranges={"speculators": ">=0.5"},
        symptom="speculators dropped VllmHiddenStatesGenerator in 0.5, so there is nothing left to patch",
        advice="install speculators 0.3.0 or 0.4.0.1, or use what 0.5 has in its place",
    ),
    KnownBad(
        ranges={"speculators": ">=0.4,<0.5", "vllm": "<0.12"},
        symptom="speculators 0.4 imports what vLLM has from 0.12 on only",
        advice="install vLLM 0.12 or newer, or speculators 0.3.0",
    ),
)

OPTIONS = (
    Option(name="model", default=None, help="folder, or id in Hugging Face's cache; config.json says how wide it is"),
    Option(name="batch-size", default=8, help="prompts of one call of generate()"),
    Option(name="seq-length", default=2048, help="tokens of the longest prompts"),
    Option(name="layers", default=4, help="layers that are extracted"),
    Option(name="tensor-parallel-size", default=1, help="worker processes"),
)
WIDE = 7168
"""Width of the hidden states where no model is given: that of DeepSeek-V3 and Kimi-K2, wider than most."""

PLUGIN = "vllm_compat"


def check_platform(here: Surroundings) -> Iterator[Finding]:
    if sys.platform != "linux":
        yield Finding(status="problem", text=f"vLLM runs on Linux, this is {sys.platform}")
    if not hasattr(os, "memfd_create"):
        text = "no memfd on this platform: hidden states go through vLLM's message queue, which is slower"
        yield Finding(status="warning", text=text)


def check_start_method(here: Surroundings) -> Iterator[Finding]:
    chosen = here.environ.get(START_METHOD)
    if chosen is None:
        text = f"{START_METHOD} is not set: vLLM chooses; workers spawn where CUDA is initialised in the parent"
        yield Finding(status="ok", text=text)
    elif chosen == "spawn":
        yield Finding(status="ok", text=f"{START_METHOD}=spawn")
    elif chosen == "fork":
        text = f"{START_METHOD}=fork: refused if anybody asks CUDA for its devices before the workers start"
        yield Finding(status="warning", text=text, advice="unset it: where spawning is needed, workers are spawned")
    else:
        text = f"{START_METHOD}={chosen}: expected 'spawn' or 'fork'"
        yield Finding(status="problem", text=text, advice="unset it")


def check_plugins(here: Surroundings) -> Iterator[Finding]:
    """Workers are covered by their extension in any case; the plugin is one way more."""
    allowed = here.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        text = f"VLLM_PLUGINS={allowed} leaves {PLUGIN} out; workers are still covered, by their extension"
        yield Finding(status="note", text=text)


def check_batch(here: Surroundings) -> Iterator[Finding]:
    """Rows are handed over in anonymous memory (memfd): RAM, counted by a container's limit, not by /dev/shm's size."""
    options = here.options
    try:
        width, size, name = _width(options["model"], here.environ)
    except ValueError as error:
        yield Finding(status="problem", text=str(error))
        return
    tokens = options["batch-size"] * options["seq-length"]
    rows = tokens * options["layers"] * width * size
    need = 2 * rows  # in the workers' shared memory, and in the slices that the consumer keeps of them
    free, what = _free_memory()
    text = (
        f"one call of {options['batch-size']} prompts x {options['seq-length']} tokens, {options['layers']} layers of "
        f"{width} x {size} bytes ({name}) takes {_size(rows)} of memfd (RAM) and as much for its results; "
    )
    if free is None:
        yield Finding(status="note", text=f"{text}how much memory is free is not known")
    elif need > free:
        advice = "fewer prompts per call (--batch-size of the script)"
        yield Finding(status="problem", text=f"{text}only {_size(free)} are free ({what})", advice=advice)
    else:
        tight = need > free // 2
        yield Finding(status="warning" if tight else "ok", text=f"{text}{_size(free)} are free ({what})")


def check_queues(here: Surroundings) -> Iterator[Finding]:
    """vLLM's own message queues (ring buffers of 10 slots) and, on several GPUs, NCCL use /dev/shm."""
    workers = here.options["tensor-parallel-size"]
    slot = _number(here.environ.get("VLLM_MQ_MAX_CHUNK_BYTES_MB"), 16)
    most = 10 * slot * MIB + workers * 10 * 24 * MIB
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding(status="problem", text=f"/dev/shm cannot be used: {error}", advice="vLLM's queues need it")
        return
    free = room.f_bavail * room.f_frsize
    text = (
        f"/dev/shm has {_size(free)} free; vLLM's message queues for {workers} worker(s) use at most {_size(most)} of "
        "it and little in an extraction, whose rows do not travel through them"
    )
    if free <= 64 * MIB:
        advice = "64 MB is the default of containers: start it with --shm-size=1g or --ipc=host"
        yield Finding(status="warning", text=text, advice=advice)
    else:
        yield Finding(status="ok" if free >= most else "note", text=text)


def check_cpu_build(here: Surroundings) -> Iterator[Finding]:
    """Settings that vLLM's CPU build needs on small machines."""
    if not cpu_build(here):
        return
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    space = here.environ.get("VLLM_CPU_KVCACHE_SPACE")
    workers = here.options["tensor-parallel-size"]
    if space is None:
        half = total // nodes // 2
        text = f"VLLM_CPU_KVCACHE_SPACE is not set: each of {workers} worker(s) takes {_size(half)} for its KV cache"
        too_much = half * workers > total // 2
        advice = "set it to a few GiB, for example VLLM_CPU_KVCACHE_SPACE=4" if too_much or total < 64 * GIB else ""
        yield Finding(status="warning" if advice else "ok", text=text, advice=advice)
    elif not space.isdigit():
        yield Finding(status="problem", text=f"VLLM_CPU_KVCACHE_SPACE={space}: expected a whole number of GiB")
    elif int(space) * GIB * workers > total:
        text = f"VLLM_CPU_KVCACHE_SPACE={space}: {workers} x {space} GiB are more than the {_size(total)} here"
        yield Finding(status="problem", text=text)
    binding = here.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if workers > nodes and binding == "auto":
        text = f"{workers} workers on {nodes} NUMA node(s): vLLM refuses to bind their threads (AssertionError)"
        advice = "set VLLM_CPU_OMP_THREADS_BIND=nobind (vLLM 0.11.0 and 0.20: cores for each worker, such as 0|1)"
        yield Finding(status="problem", text=text, advice=advice)
    release = release_of(here.versions["vllm"] or "")
    if matches(release, ">=0.18,<0.19") and "libtcmalloc" not in here.environ.get("LD_PRELOAD", ""):
        # vllm/v1/worker/cpu_worker.py (init_device); a warning since 0.19, which brings the library along.
        text = "the CPU workers of vLLM 0.18 do not start without libtcmalloc in LD_PRELOAD"
        advice = "export LD_PRELOAD=libtcmalloc_minimal.so.4 (Debian, Ubuntu: apt-get install libtcmalloc-minimal4)"
        yield Finding(status="problem", text=text, advice=advice)


def _width(model: str | None, environ: Mapping[str, str]) -> tuple[int, int, str]:
    """Hidden size, bytes of a number, and where that is from.

    Raises:
        ValueError: there is no config.json that can be read.
    """
    if model is None:
        return WIDE, 2, "a wide model; give yours with --model"
    file, config = read_config(model, environ)
    text = text_config(config)
    size = 4 if dtype_of(config, text) == "float32" else 2
    width = first_number(text, WIDTH)
    return (WIDE, size, f"a wide model; {file} has no hidden_size") if width is None else (width, size, model)


def _free_memory() -> tuple[int | None, str]:
    """Bytes, and what limits them: the machine or this control group."""
    free: int | None = None
    what = "of the machine"
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
        if free is None or left < free:
            free, what = max(left, 0), "of this container"
    return free, what


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isdigit() else default


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


CHECKS = (
    Check(name="platform", run=check_platform),
    Check(name="start method", run=check_start_method),
    Check(name="plugins", run=check_plugins),
    Check(name="memory", run=check_batch),
    Check(name="message queues", run=check_queues),
    Check(name="CPU build", run=check_cpu_build),
)
