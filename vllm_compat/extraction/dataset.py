"""From a name, file or folder to prompts and masks, by the consumer's own, unmodified preprocessing.

The consumer's module looks its raw data up under one of its own names, `load_raw_dataset`; for the time of a call that
name gives the data that were loaded and looked at here. This is how a folder of `Dataset.save_to_disk` comes in, which
v0.3.0 does not know.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.extraction.conversations import KEYS, SHOWN, DataError, check_file, media, only_text
from vllm_compat.extraction.settings import Settings
from vllm_compat.extraction.store import sha256_of

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class Samples:
    """Preprocessed conversations, in order.

    `lengths`: int64 [samples], tokens of each as they will be in its file; `sha256`: `prompts_sha256` of the manifest.
    """

    rows: Any  # has a length; a slice is a dict of "input_ids" and "loss_mask", each a sequence of int64 arrays
    lengths: numpy.ndarray
    sha256: str

    def __len__(self) -> int:
        return len(self.lengths)

    def get(self, start: int, stop: int) -> tuple[list[numpy.ndarray], list[numpy.ndarray]]:
        """Ids and masks (int64 [tokens], not cut) of the samples from `start` up to `stop`."""
        import numpy

        part = self.rows[start:stop]
        ids, masks = ([numpy.asarray(each, dtype=numpy.int64) for each in part[key]] for key in _COLUMNS)
        return ids, masks


_COLUMNS = ("input_ids", "loss_mask")


def load_samples(
    settings: Settings, *, warn: Callable[[str], None], known_token_freq: str | None = None
) -> tuple[Samples, str]:
    """Load, check and preprocess; returns the samples and the SHA-256 of the token frequencies' file.

    `warn` is told what is left out of the data. `known_token_freq`: SHA-256 of that file by an earlier run on the same
    data; if it still has it, nothing is counted again. Raises DataError for data that cannot be used, and what the
    consumer raises.
    """
    from speculators.data_generation import preprocessing

    raw = _raw(settings, preprocessing, warn)
    target = settings.token_freq_path
    kept = known_token_freq is not None and target.is_file() and sha256_of(target) == known_token_freq
    # v0.3.0 leaves a file that is there as it is, whatever data it was counted from.
    folder = Path(tempfile.gettempdir()) if settings.dry_run else target.parent
    counted = target if kept else folder / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        with _lent(preprocessing, raw, settings.seed):
            try:
                rows, _tokenizer = preprocessing.load_and_preprocess_dataset(
                    target_model_path=settings.target_model_path,
                    train_data_path=settings.train_data_path,
                    seq_length=settings.seq_length,
                    build_dataset_num_proc=min(settings.num_preprocessing_workers, max(1, len(raw))),
                    seed=settings.seed,
                    max_samples=settings.max_samples,
                    token_freq_path=str(counted),
                    cache_dir=settings.hf_cache_dir,
                    assistant_pattern=settings.assistant_pattern,
                    turn_dropout=settings.turn_dropout,
                )
            except (IndexError, KeyError) as error:  # it shows the first sample without asking for their number
                raise DataError(
                    f"no conversation of {settings.train_data_path} is left after preprocessing ({error}); --verbose "
                    "shows what speculators left out and why"
                ) from error
        samples = describe(rows.with_format("numpy"), rows.with_format("arrow"), settings.seq_length)
        if target.exists():
            if not kept:
                _check_token_frequencies(counted, target)
            frequencies = sha256_of(target)
        else:
            frequencies = sha256_of(counted)
            if not settings.dry_run:
                os.replace(counted, target)
    finally:
        if not kept:
            with contextlib.suppress(OSError):
                counted.unlink()
    return samples, frequencies


def _raw(settings: Settings, preprocessing: Any, warn: Callable[[str], None]) -> Any:
    from speculators.data_generation.configs import DATASET_CONFIGS

    given = settings.train_data_path
    path = Path(given)
    if given not in DATASET_CONFIGS and path.is_dir():
        raw = _from_disk(path)
        if kinds := media(raw.column_names):  # they are not decoded to see in how many rows there are some
            warn(f"{path} has the columns {', '.join(raw.column_names)}: {only_text(kinds)}")
    else:
        if given.endswith((".json", ".jsonl")):
            if not path.is_file():
                raise DataError(f"--train-data-path {given}: there is no such file")
            warnings = check_file(path).warnings
            for text in warnings[:SHOWN]:
                warn(text)
            if len(warnings) > SHOWN:
                warn(f"and {len(warnings) - SHOWN} more such lines")
        raw = preprocessing.load_raw_dataset(
            given, num_proc=settings.num_preprocessing_workers, cache_dir=settings.hf_cache_dir
        )
    names = raw.column_names
    if "conversations" not in names and "messages" in names:
        raw = raw.rename_column("messages", "conversations")
    if "conversations" not in raw.column_names:
        raise DataError(f"{given} has the columns {', '.join(names)}: expected {' or '.join(KEYS)}")
    return raw


def _from_disk(path: Path) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise DataError(
            f"--train-data-path {path}: expected a folder written by Dataset.save_to_disk ({error})"
        ) from None
    if isinstance(loaded, datasets.DatasetDict):
        name = "train" if "train" in loaded else next(iter(loaded))
        if name != "train" and len(loaded) > 1:
            raise DataError(f"{path} has the splits {', '.join(loaded)}: give the folder of one of them")
        return loaded[name]
    return loaded


@contextlib.contextmanager
def _lent(preprocessing: Any, raw: Any, seed: int) -> Iterator[None]:
    """Two of the module's names, for a while: where raw data come from, and what turn dropout draws from.

    It draws from Python's global source, which nobody seeds and Python itself seeds anew in each forked process, so a
    resumed run would have other prompts.
    """
    load, source = preprocessing.load_raw_dataset, preprocessing.random
    preprocessing.load_raw_dataset, preprocessing.random = (lambda *args, **kwargs: raw), random.Random(seed)
    try:
        yield
    finally:
        preprocessing.load_raw_dataset, preprocessing.random = load, source


def describe(rows: Any, tables: Any, seq_length: int) -> Samples:
    """Lengths and checksum of the prompts as the generator cuts them, to `seq_length - 1` tokens.

    `tables`: the same rows as Arrow tables. Raises DataError for an empty prompt.
    """
    import numpy

    digest, lengths = hashlib.sha256(), []
    for table in tables.iter(batch_size=1000):
        for ids, mask in zip(*(_lists(table[key]) for key in _COLUMNS), strict=True):
            length = min(len(ids), seq_length - 1)
            if length == 0 or len(mask) < length:
                raise DataError(f"sample {len(lengths)} has {len(ids)} tokens and a mask of {len(mask)}")
            lengths.append(length)
            add_prompt(digest, ids[:length], mask[:length])
    return Samples(rows, numpy.array(lengths, dtype=numpy.int64), digest.hexdigest())


def add_prompt(digest: Any, ids: numpy.ndarray, mask: numpy.ndarray) -> None:
    """One sample's part of `prompts_sha256` (docs/extraction-format.md)."""
    import numpy

    for part in (numpy.array([len(ids)]), ids, mask):
        digest.update(numpy.ascontiguousarray(part, dtype="<i8").tobytes())


def _lists(column: Any) -> Iterator[numpy.ndarray]:
    """The rows of an Arrow column of lists, without making Python numbers of them."""
    for chunk in column.chunks:
        values, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
        for begin, end in pairwise(offsets.tolist()):
            yield values[begin:end]


def _check_token_frequencies(counted: Path, target: Path) -> None:
    """Raises DataError: another data set's file is there."""
    import torch

    if torch.load(target, weights_only=True) != torch.load(counted, weights_only=True):
        raise DataError(
            f"{target} has the token frequencies of other data or settings: move it away, or name another file "
            "with --token-freq-path. (v0.3.0's script would silently keep it)"
        )
