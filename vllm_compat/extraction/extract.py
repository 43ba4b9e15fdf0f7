"""`vllm-compat extract`: from conversations to files of hidden states.

    preprocess (speculators' own) -> compare with the folder -> disk needed? -> replicas -> files -> manifest

The process that runs this opens no device: models are loaded by replicas, each in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_compat.extraction.dataset import Samples, load_samples
from vllm_compat.extraction.dispatch import Remote, Stop, Stopped, dispatch
from vllm_compat.extraction.folder import REPORT, OutputFolder, write_json
from vllm_compat.extraction.manifest import FolderLock
from vllm_compat.extraction.progress import Progress
from vllm_compat.extraction.replica import BatchResult, Facts, ReplicaSettings
from vllm_compat.extraction.report import Report
from vllm_compat.extraction.settings import GIB, Settings, add_arguments, from_arguments
from vllm_compat.extraction.space import AUTO_LAYERS, need
from vllm_compat.extraction.store import CONFIG
from vllm_compat.extraction.streams import say, stdout_to_stderr

__all__ = ["add_arguments", "main", "run"]


def run(settings: Settings, report: Report, stop: Stop) -> None:
    """Do it; what happened is in `report`. Raises what stops the run, ValueError for settings that cannot work."""
    settings.check()
    with contextlib.ExitStack() as stack:
        if not settings.dry_run:
            settings.output_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FolderLock(settings.output_dir))
        _Run(settings, report, stop).go()


class _Run:
    def __init__(self, settings: Settings, report: Report, stop: Stop) -> None:
        self._settings, self._report, self._stop = settings, report, stop
        self._folder = OutputFolder(
            settings.output_dir.resolve(), start_idx=settings.start_idx, batch_size=settings.batch_size
        )
        self._facts: Facts | None = None
        self._progress: Progress | None = None

    def go(self) -> None:
        settings, report, folder = self._settings, self._report, self._folder
        with self._stage("preparing"):
            from vllm_compat.extraction import devices, model

            looked = model.look_at(settings.target_model_path)
            places = devices.divide(settings)
            before = folder.manifest.data.get("token_freq_sha256") if folder.manifest else None
            samples, token_freq = load_samples(settings, warn=self._warn, known_token_freq=before)
        report.samples, report.tokens = len(samples), int(samples.lengths.sum())
        request = self._request(samples, looked.sha256, places.tensor_parallel_size)
        folder.check_request(request)
        with self._stage("scanning"):
            found = folder.scan(len(samples), contents=not settings.quick_scan)
        work = folder.work(found, len(samples))
        self._plan = {"layers": len(settings.layer_ids or ()) or AUTO_LAYERS, "hidden_size": looked.hidden_size}
        self._missing = samples.lengths[work.samples].tolist()
        room = need(self._missing, folder.path, **self._plan)
        report.files_before, report.unfinished = len(found.good), len(found.temporary)
        report.bytes_needed, report.bytes_free = room.bytes, room.free
        say(f"{len(found.good)} of {len(samples)} files are there; {room.as_text()}")
        room.check(folder.path)
        if settings.dry_run:
            report.outcome = "planned"
            return
        report.batches_again = len({number // settings.batch_size for number in work.known})
        report.quarantined = [*found.broken, *found.foreign]
        session = report.session = folder.begin(request, self._data(token_freq), found)
        try:
            if work.batches or not (folder.path / CONFIG).exists():
                self._extract(samples, work, places.replicas(self._replica_settings(session, places)))
            outcome = "stopped" if self._stop.is_set() else "complete"
        except BaseException as error:
            folder.end("stopped" if isinstance(error, KeyboardInterrupt) else "failed", places=report.replicas)
            raise
        folder.end(outcome, places=report.replicas)
        report.outcome = outcome

    def _warn(self, text: str) -> None:
        """At once, since a run may take days, and in the report."""
        say(f"warning: {text}")
        self._report.warnings.append(text)

    def _extract(self, samples: Samples, work: Any, replicas: list[Remote]) -> None:
        settings, report, folder = self._settings, self._report, self._folder
        report_tokens = sum(
            int(samples.lengths[each]) for batch in work.batches for each in folder.members(batch, len(samples))
        )
        self._progress = Progress(samples=len(work.samples), tokens=report_tokens)
        there = replicas[0]
        try:
            if work.batches:
                say(f"loading {settings.target_model_path}: {len(replicas)} replica(s)")
                begin = time.perf_counter()
                self._stop.gentle = True
                there = dispatch(
                    replicas,
                    folder.batches(work, samples),
                    stop=self._stop,
                    on_facts=self._on_facts,
                    on_result=self._on_result,
                )
                self._stop.gentle = False
                self._progress.close()
                extracting = self._progress.seconds if self._facts else 0.0
                report.seconds["loading"] = time.perf_counter() - begin - extracting
                report.seconds["extracting"] = extracting
            if not self._stop.is_set():
                with self._stage("describing"):
                    states = folder.manifest and folder.manifest.states
                    described = there.call("describe", states, self._describing(len(samples))).result()
                    write_json(folder.path / CONFIG, described)
        finally:
            self._stop.gentle = False
            self._progress.close()
            for replica in replicas:
                replica.close()
            for replica in replicas:
                replica.join()
            self._sum_up(replicas)

    def _on_facts(self, facts: Facts) -> None:
        """The first replica's facts are the run's; all others must agree."""
        if self._facts is None:
            self._facts = facts
            states = facts.states
            self._folder.note_facts(facts)
            shape = {"layers": len(states["layer_ids"]), "hidden_size": states["hidden_size"]}
            if shape != self._plan or states["dtype"] not in ("torch.bfloat16", "torch.float16"):
                itemsize = 4 if states["dtype"] == "torch.float32" else 2
                need(self._missing, self._folder.path, **shape, itemsize=itemsize).check(self._folder.path)
            self._report.states, self._report.versions = states, facts.versions
            self._report.patches = facts.patches
        self._agree(facts)
        if self._progress is not None:
            self._progress.replica_ready()

    def _agree(self, facts: Facts) -> None:
        if self._facts is not None and (found := self._facts.disagrees(facts)):
            raise RuntimeError(f"replicas do not run the same: {'; '.join(found)}. Install the same everywhere")
        if facts.place not in self._report.replicas:
            self._report.replicas.append(facts.place)

    def _on_result(self, result: BatchResult) -> None:
        self._agree(result.facts)  # a replacement has not been asked yet
        self._folder.add(result)
        self._report.files_written += len(result.records)
        self._report.tokens_computed += result.tokens
        self._report.bytes_written += sum(record.bytes for record in result.records)
        if self._progress is not None:
            self._progress.add(result, len(result.records))

    def _sum_up(self, replicas: list[Remote]) -> None:
        report, progress = self._report, self._progress
        if progress is not None:
            report.samples_per_second, report.tokens_per_second = (
                progress.samples_per_second,
                progress.tokens_per_second,
            )
            report.shares = progress.shares()
        report.replaced = max(
            sum(replica.restarts for replica in replicas), len(report.replicas) - self._settings.data_parallel
        )
        report.differing = self._folder.differing
        if report.differing:
            report.warnings.append(
                f"{len(report.differing)} files that were there came out with other bytes when their batch was "
                f"computed again ({', '.join(report.differing[:5])}): this device or release does not compute the same "
                "twice"
            )

    def _request(self, samples: Samples, model: str, tensor_parallel_size: int) -> dict[str, Any]:
        settings = self._settings
        return {
            "model_sha256": model,
            "layer_ids": None if settings.layer_ids is None else list(settings.layer_ids),
            "seq_length": settings.seq_length,
            "batch_size": settings.batch_size,
            "tensor_parallel_size": tensor_parallel_size,
            "start_idx": settings.start_idx,
            "num_samples": len(samples),
            "num_tokens": int(samples.lengths.sum()),
            "prompts_sha256": samples.sha256,
        }

    def _data(self, token_freq: str) -> dict[str, Any]:
        settings = self._settings
        return {
            "target_model_path": settings.target_model_path,
            "train_data_path": settings.train_data_path,
            "max_samples": settings.max_samples,
            "seed": settings.seed,
            "assistant_pattern": settings.assistant_pattern,
            "turn_dropout": settings.turn_dropout,
            "token_freq_path": str(settings.token_freq_path),
            "token_freq_sha256": token_freq,
        }

    def _describing(self, samples: int) -> dict[str, Any]:
        from datasets import config

        settings = self._settings
        return {
            "train_data_path": settings.train_data_path,
            "cache_dir": str(settings.hf_cache_dir or config.HF_DATASETS_CACHE),
            "num_samples": samples,
            "max_samples": settings.max_samples,
            "seed": settings.seed,
        }

    def _replica_settings(self, session: str, places: Any) -> ReplicaSettings:
        settings = self._settings
        model = settings.target_model_path
        if settings.ray is not None and os.path.isdir(model):
            model = os.path.abspath(model)  # actors run in another folder, where it may be a name on the Hub
        return ReplicaSettings(
            target_model_path=model,
            output_dir=str(self._folder.path),
            session=session,
            layer_ids=settings.layer_ids,
            seq_length=settings.seq_length,
            batch_size=settings.batch_size,
            start_idx=settings.start_idx,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            tensor_parallel_size=places.tensor_parallel_size,
            writers=settings.writers,
            write_queue=int(settings.write_queue * GIB),
            command=tuple(sys.argv),  # for data_config.json
            engine=settings.engine,
            verbose=settings.verbose,
        )

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._report.seconds[name] = time.perf_counter() - begin


def main(arguments: argparse.Namespace) -> int:
    """The command: 0 complete, 1 a problem, 130 and 143 stopped by Ctrl-C and SIGTERM."""
    settings = from_arguments(arguments)
    report = Report(folder=str(settings.output_dir))
    stop = Stop()
    code = 1
    with stdout_to_stderr(), stop.listening():
        try:
            _quiet(settings)
            run(settings, report, stop)
            code = 0 if report.ok else 128 + (stop.number or 0)
        except Stopped as error:
            report.outcome, report.error, code = "stopped", str(error), 128 + error.number
        except Exception as error:  # noqa: BLE001 - whatever stops the run is the answer, also in JSON
            report.error = f"{type(error).__name__}: {error}"
            if stop.is_set() and report.session is None:  # datasets puts an error of its own in the place of Stopped
                report.outcome, report.error, code = "stopped", None, 128 + (stop.number or 0)
            if settings.verbose:
                traceback.print_exc()
        if report.outcome == "stopped" and report.error is None:
            report.error = "Ctrl-C" if code == 130 else "SIGTERM"
        _keep(report, settings)
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report.as_text())
    return code


def _keep(report: Report, settings: Settings) -> None:
    """Leave the report of a session in its folder."""
    if report.session is not None:
        with contextlib.suppress(OSError):  # a full disk
            write_json(settings.output_dir / REPORT, report.as_dict())


def _quiet(settings: Settings) -> None:
    """Before vLLM is imported, which reads these once; replicas inherit them."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns in every forked process
    if settings.verbose:
        logging.basicConfig(level=logging.INFO)
    else:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        logging.getLogger("speculators").setLevel(logging.WARNING)


def _command(argv: Sequence[str] | None = None) -> int:
    """`python -m vllm_compat.extraction.extract`, for a checkout whose command is not installed."""
    parser = argparse.ArgumentParser(prog="vllm-compat extract", description=str(__doc__).split("\n\n")[0])
    add_arguments(parser)
    return main(parser.parse_args(argv))


# Spawned processes import the main module again: the guard keeps them from starting another run.
if __name__ == "__main__":
    sys.exit(_command())
